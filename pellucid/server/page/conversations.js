// The conversations that this browser keeps: plain data, bounded, the newest first.  Never the key.

const ENTRY = "conversations";
export const MOST_CHATS = 30;
export const MOST_CHARACTERS = 1_000_000; // of all together, as they are stored; browsers give a page about 5 million
const TITLE = 48; // characters

/** {id, at, turns}; a turn is {role, content}, an answer also has what Answer notes of it; two answers to one question
    are {role, answers}. */
export function newChat() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return { id: [...random].map((part) => part.toString(36)).join(""), at: Date.now(), turns: [] };
}

/** All that are kept; what cannot be read is none. */
export function keptChats(storage) {
  try {
    const chats = JSON.parse(storage.getItem(ENTRY) ?? "[]");
    return chats.filter((chat) => typeof chat.id === "string" && Array.isArray(chat.turns));
  } catch {
    return [];
  }
}

/** Keep a chat as the newest; older ones that no longer fit go.  False if it alone is too long, and is not kept. */
export function keep(storage, chat) {
  const others = keptChats(storage).filter(({ id }) => id !== chat.id);
  const texts = [{ ...chat, at: Date.now() }, ...others].slice(0, MOST_CHATS).map((each) => JSON.stringify(each));
  let room = MOST_CHARACTERS;
  const fitting = texts.filter(({ length }) => length <= room && (room -= length, true));
  try {
    storage.setItem(ENTRY, `[${fitting.join(",")}]`);
  } catch {
    return false; // the browser is out of room, or keeps nothing
  }
  return fitting.includes(texts[0]);
}

export function forget(storage, id) {
  storage.setItem(ENTRY, JSON.stringify(keptChats(storage).filter((chat) => chat.id !== id)));
}

export function forgetAll(storage) {
  storage.removeItem(ENTRY);
}

export function titleOf({ turns }) {
  const text = (turns[0]?.content ?? "").replace(/\s+/g, " ").trim();
  return text.length > TITLE ? `${text.slice(0, TITLE - 1)}…` : text;
}

/** The answers of a turn, the left one first. */
export const answersOf = (turn) => turn.answers ?? [turn];

/** What a model gets to read: where there are two answers, those of its own side.  Questions whose answers have failed, and
    these answers, are not part of it. */
export function messagesOf(turns, system, side = 0) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  const own = turns.map((turn) => answersOf(turn)[side] ?? answersOf(turn)[0]);
  for (const [index, { role, content, error }] of own.entries()) {
    const hasFailed = error || (role === "user" && own[index + 1]?.error);
    if (!hasFailed) messages.push({ role, content });
  }
  return messages;
}
