// Requests to the server this page came from, with the key, if there is one.

const KEY = "pellucid-key"; // forgotten when the browser's tab is closed

export function getKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Send a request; throws an Error with the server's own words if it is refused. */
export async function call(path, { body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  const reply = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
  });
  if (!reply.ok) throw new Error(await reasonOf(reply));
  return reply;
}

async function reasonOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered with status ${reply.status}`;
  }
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
