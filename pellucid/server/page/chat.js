// The chat: a conversation that is kept, its turns on the page, and the answer under way.

import { Answer, button, newAnswer, plural } from "./answer.js";
import { KEY_CHANGED, call, events, wordsOf } from "./api.js";
import { answersOf, forget, forgetAll, keep, keptChats, messagesOf, newChat, titleOf } from "./conversations.js";
import { goToKey, settings, showSettings, startSettings } from "./settings.js";

const SUGGESTIONS = ["What is 47 + 85?", "Sort in ascending order: 930, 425, 341, 84, 278", "Reverse this list: lantern cloud river stone"];
const SHOWN = "chat"; // of sessionStorage: which conversation this tab shows
const NEAR_END = 80; // pixels: whoever reads further up is not pulled down

const $ = (id) => document.getElementById(id);

let chat = newChat();
let stopper = null; // of the answer under way
let isLeft = false; // the page: what then breaks off is no fault

export function startChat() {
  for (const text of SUGGESTIONS) $("suggestions").append(button(text, "", () => send(text)));
  startSettings();
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (stopper) stopper.abort();
    else send($("draft").value.trim());
  });
  $("draft").addEventListener("input", fitDraft);
  $("draft").addEventListener("keydown", (event) => isEnter(event) && !stopper && send($("draft").value.trim()));
  document.addEventListener("keydown", (event) => event.key === "Escape" && stopper?.abort());
  document.addEventListener(KEY_CHANGED, () => showSettings(false));
  addEventListener("pagehide", leave);
  addEventListener("pageshow", () => (isLeft = false));
  $("new-chat").addEventListener("click", () => openChat(newChat()));
  $("forget-chats").addEventListener("click", forgetChats);
  $("forget-chats").addEventListener("blur", listChats);
  const kept = keptChats(localStorage).find(({ id }) => id === sessionStorage.getItem(SHOWN));
  openChat(kept ?? chat);
}

function leave() {
  isLeft = true;
  if (chat.turns.length) keep(localStorage, chat);
}

/** Enter that means "send": it is then the page's own. */
function isEnter(event) {
  const isMeant = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (isMeant) event.preventDefault();
  return isMeant;
}

/** Show another conversation; the answer under way ends. */
function openChat(other) {
  stopper?.abort();
  chat = other;
  sessionStorage.setItem(SHOWN, chat.id);
  drawTurns();
  listChats();
  showSettings(false);
  $("draft").focus();
  fitDraft();
}

function drawTurns() {
  const nodes = chat.turns.map((turn, index) => (turn.role === "user" ? question(turn, index) : keptAnswers(turn)));
  $("messages").replaceChildren($("welcome"), ...nodes);
  $("welcome").hidden = nodes.length > 0;
  $("messages").scrollTop = $("messages").scrollHeight;
  tellTotals();
}

function question(turn, index) {
  const node = document.createElement("div");
  node.className = "message user";
  const text = Object.assign(document.createElement("div"), { className: "text", textContent: turn.content });
  const edit = button("edit", "act", () => node.replaceChildren(editor(turn, index)));
  node.append(text, edit);
  return node;
}

/** A field in place of a question; what it sends is asked instead, and all below it goes. */
function editor(turn, index) {
  const form = document.createElement("form");
  form.className = "editor";
  form.innerHTML =
    '<textarea aria-label="Edit the message"></textarea><p>What stands below it is answered anew.</p>' +
    '<button type="submit" class="plain-button">Send</button>';
  const field = form.querySelector("textarea");
  field.value = turn.content;
  field.rows = Math.min(12, turn.content.split("\n").length + 1);
  const submit = () => field.value.trim() && replaceFrom(index, field.value.trim());
  form.addEventListener("submit", (event) => (event.preventDefault(), submit()));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") drawTurns();
    else if (isEnter(event)) submit();
  });
  form.append(button("Cancel", "plain-button", drawTurns));
  requestAnimationFrame(() => field.focus());
  return form;
}

function replaceFrom(index, text) {
  stopper?.abort();
  chat = { ...chat, turns: chat.turns.slice(0, index) };
  drawTurns();
  send(text);
}

function keptAnswers(turn) {
  const { node, views } = viewsOf(turn);
  for (const view of views) view.end();
  return node;
}

/** A turn's answer, or two beside each other: {node, views}. */
function viewsOf(turn) {
  const answers = answersOf(turn);
  if (answers.length < 2) {
    const view = new Answer(turn, actions);
    return { node: view.node, views: [view] };
  }
  const views = answers.map((each) => new Answer(each, { ...actions, choose: () => choose(turn, each) }));
  const node = document.createElement("div");
  node.className = "message pair";
  node.append(...views.map((view) => view.node));
  return { node, views };
}

/** Of two answers this one stands; the other goes. */
function choose(turn, answer) {
  if (stopper) return;
  chat.turns[chat.turns.indexOf(turn)] = answer;
  drawTurns();
  save(chat);
  $("draft").focus();
}

/** Ask the last question again: the newest answer gives way to another. */
function retry() {
  if (stopper) return;
  chat.turns.pop();
  drawTurns();
  answer();
}

const actions = { retry, enterKey: goToKey };

function send(text) {
  if (!text) return;
  $("draft").value = "";
  $("welcome").hidden = true;
  const turn = { role: "user", content: text };
  chat.turns.push(turn);
  $("messages").append(question(turn, chat.turns.length - 1));
  answer();
}

async function answer() {
  const asked = chat, stop = new AbortController();
  const { sides } = settings();
  const bodies = sides.map((_, side) => requestBody(asked.turns, side));
  const answers = sides.map(newAnswer);
  const turn = answers.length > 1 ? { role: "assistant", answers } : answers[0];
  const { node, views } = viewsOf(turn);
  asked.turns.push(turn);
  $("messages").append(node);
  scroll();
  const isFollowed = () => $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < NEAR_END;
  let wasFollowed = true;
  $("messages").onscroll = () => (wasFollowed = isFollowed());
  for (const view of views) view.onDraw = () => wasFollowed && scroll();
  setBusy(stop);
  save(asked);
  await Promise.all(views.map((view, side) => follow(view, bodies[side], stop.signal)));
  if (stopper === stop) setBusy(null);
  const isForgotten = asked.id === chat.id ? asked !== chat : !keptChats(localStorage).some(({ id }) => id === asked.id);
  if (!isForgotten && !isLeft) save(asked);
}

/** Have an answer come, to its end. */
async function follow(view, body, signal) {
  try {
    for await (const event of events(await call("v1/chat/completions", { body, signal }))) view.take(event);
    view.turn.finish ??= "stop";
    view.end();
  } catch (error) {
    if (error.name === "AbortError") view.turn.finish = "stopped";
    view.end(error.name === "AbortError" ? null : { message: wordsOf(error), needsKey: error.status === 401 });
  }
}

function requestBody(turns, side) {
  const { system, sides, sampling } = settings();
  const { model, temperature } = sides[side];
  return {
    messages: messagesOf(turns, system, side),
    ...(model && { model }),
    temperature,
    ...sampling,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

function setBusy(stop) {
  stopper = stop;
  $("composer").classList.toggle("busy", stop !== null);
  $("messages").setAttribute("aria-busy", String(stop !== null));
  $("send").title = stop ? "Stop" : "Send";
  $("send").setAttribute("aria-label", $("send").title);
  fitDraft();
}

function save(kept) {
  const isKept = keep(localStorage, kept);
  $("unkept").hidden = isKept;
  tellTotals();
  listChats();
}

function scroll() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

function fitDraft() {
  const draft = $("draft");
  draft.style.height = "auto";
  draft.style.height = `${draft.scrollHeight + 2}px`;
  $("send").disabled = !stopper && !draft.value.trim();
}

function tellTotals() {
  const sum = (part) => chat.turns.flatMap(answersOf).reduce((total, { usage }) => total + (usage?.[part] ?? 0), 0);
  const [read, written] = [sum("prompt"), sum("completion")];
  $("totals").textContent = read ? `This chat: ${plural(read, "token")} read, ${written.toLocaleString("en")} written` : "";
}

// The conversations that are kept

function listChats() {
  const chats = keptChats(localStorage);
  $("kept").hidden = chats.length === 0;
  $("chats").replaceChildren(...chats.map(entry));
  $("forget-chats").textContent = "Forget all";
  delete $("forget-chats").dataset.sure;
}

function entry(kept) {
  const item = document.createElement("li");
  const title = titleOf(kept);
  const go = button(title, "chat-title", () => kept.id === chat.id || openChat(kept));
  if (kept.id === chat.id) go.setAttribute("aria-current", "true");
  const drop = button("×", "chat-drop", () => {
    forget(localStorage, kept.id);
    if (kept.id === chat.id) openChat(newChat());
    else listChats();
  });
  drop.setAttribute("aria-label", `Forget “${title}”`);
  drop.title = "Forget";
  item.append(go, drop);
  return item;
}

/** The first click asks, the second one does. */
function forgetChats() {
  if ("sure" in $("forget-chats").dataset) {
    forgetAll(localStorage);
    openChat(newChat());
  } else {
    $("forget-chats").dataset.sure = "";
    $("forget-chats").textContent = `Forget all ${plural(keptChats(localStorage).length, "chat")}?`;
  }
}
