// Requests to the server this page came from, with the key, if there is one.

const KEY = "pellucid-key"; // forgotten when the browser's tab is closed
const PATIENCE = 5000; // milliseconds for an answer that costs the server nothing

export const KEY_CHANGED = "key-changed"; // an event of the document

export function getKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(key) {
  if (key === getKey()) return;
  sessionStorage.setItem(KEY, key);
  document.dispatchEvent(new Event(KEY_CHANGED));
}

/** What the page says when the server takes no request without another key. */
export function askForKey() {
  return getKey() ? "The server does not know this API key." : "This server needs an API key.";
}

/** What the page says of a request that has failed. */
export function wordsOf(error) {
  if (error instanceof Refused) return error.status === 401 ? askForKey() : error.message;
  return error instanceof TypeError ? "The server does not answer." : error.message; // fetch throws no other
}

/** An answer that is no success.  status: HTTP's; the message is the server's own. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request; throws Refused, or what fetch throws if there is no answer. */
export async function call(path, { body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  const reply = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
  });
  if (!reply.ok) throw new Refused(reply.status, await reasonOf(reply));
  return reply;
}

async function reasonOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered with status ${reply.status}`;
  }
}

/** What is wrong with the server: {state, text}, where state is "key", "dead" or "lost"; null: nothing. */
export async function findFault() {
  try {
    await call("health", { signal: AbortSignal.timeout(PATIENCE) });
    await call("v1/models", { signal: AbortSignal.timeout(PATIENCE) });
    return null;
  } catch (error) {
    return faultOf(error);
  }
}

export function faultOf(error) {
  if (!(error instanceof Refused)) return { state: "lost", text: "The server does not answer." };
  if (error.status === 401) return { state: "key", text: askForKey() };
  return { state: "dead", text: `The server cannot work: ${error.message}.` };
}

/** The events of a stream, parsed, up to its end. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Open a websocket of this server; browsers let a page bring its key among the protocols only. */
export function openSocket(path, protocol) {
  const url = new URL(path, location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const protocols = [protocol];
  if (getKey()) {
    const bytes = String.fromCharCode(...new TextEncoder().encode(getKey()));
    const key = btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
    protocols.push(`key.${key}`);
  }
  return new WebSocket(url, protocols);
}
