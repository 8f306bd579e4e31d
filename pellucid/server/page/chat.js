// The chat: turns, the answer that streams, and what is to be said about it.

import { call, events, getKey, setKey } from "./api.js";
import { render } from "./markdown.js";

const SUGGESTIONS = ["What is 47 + 85?", "Sort in ascending order: 930, 425, 341, 84, 278", "Reverse this list: lantern cloud river stone"];
const SETTINGS = { system: "", temperature: 0.6, top_p: 0.95, max_tokens: 1024 };
const NEAR_END = 80; // pixels: whoever reads further up is not pulled down

const $ = (id) => document.getElementById(id);
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

let turns = []; // {role, content}
let stopper = null; // of the answer under way
let totals = { prompt: 0, completion: 0 };

export function startChat() {
  for (const text of SUGGESTIONS) {
    const button = document.createElement("button");
    button.textContent = text;
    button.addEventListener("click", () => send(text));
    $("suggestions").append(button);
  }
  restoreSettings();
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (stopper) stopper.abort();
    else send($("draft").value.trim());
  });
  $("draft").addEventListener("input", fitDraft);
  $("draft").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!stopper) send($("draft").value.trim());
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && stopper?.abort());
  $("new-chat").addEventListener("click", newChat);
  $("draft").focus();
  fitDraft();
}

function restoreSettings() {
  const kept = JSON.parse(localStorage.getItem("settings") ?? "{}");
  for (const [name, value] of Object.entries({ ...SETTINGS, ...kept })) {
    if (!(name in SETTINGS)) continue;
    const input = $(name);
    input.value = value;
    const say = () => {
      const output = document.querySelector(`label[for="${name}"] output`);
      if (output) output.textContent = Number(input.value).toFixed(2);
    };
    input.addEventListener("input", () => {
      say();
      localStorage.setItem("settings", JSON.stringify(settings()));
    });
    say();
  }
  $("key").value = getKey();
  $("key").addEventListener("input", () => setKey($("key").value.trim()));
}

function settings() {
  return {
    system: $("system").value,
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    max_tokens: $("max_tokens").value === "" ? null : Number($("max_tokens").value),
  };
}

function newChat() {
  stopper?.abort();
  turns = [];
  totals = { prompt: 0, completion: 0 };
  $("messages").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("totals").textContent = "";
  $("draft").focus();
}

function fitDraft() {
  const draft = $("draft");
  draft.style.height = "auto";
  draft.style.height = `${draft.scrollHeight + 2}px`;
  $("send").disabled = !stopper && !draft.value.trim();
}

async function send(text) {
  if (!text || stopper) return;
  $("draft").value = "";
  $("welcome").hidden = true;
  turns.push({ role: "user", content: text });
  const own = document.createElement("div");
  own.className = "message user";
  own.append(Object.assign(document.createElement("div"), { className: "text", textContent: text }));
  $("messages").append(own);
  await answer();
}

async function answer() {
  const chat = turns;
  const view = new Answer();
  stopper = new AbortController();
  $("composer").classList.add("busy");
  $("send").title = "Stop";
  fitDraft();
  try {
    const { system, ...sampling } = settings();
    const messages = system.trim() ? [{ role: "system", content: system }, ...chat] : chat;
    const body = {
      messages,
      ...sampling,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    for await (const event of events(await call("v1/chat/completions", { body, signal: stopper.signal }))) {
      view.take(event);
    }
  } catch (error) {
    view.end(error.name === "AbortError" ? "stopped" : null, error.name === "AbortError" ? null : error.message);
  } finally {
    view.end();
    stopper = null;
    $("composer").classList.remove("busy");
    $("send").title = "Send";
    fitDraft();
  }
  if (chat !== turns) return; // another chat has begun
  if (view.content || !view.hasFailed) chat.push({ role: "assistant", content: view.content });
  else takeBack(chat.pop().content);
  totals.prompt += view.usage?.prompt_tokens ?? 0;
  totals.completion += view.usage?.completion_tokens ?? 0;
  $("totals").textContent = `This chat: ${count(totals.prompt, "token")} read, ${totals.completion.toLocaleString("en")} written`;
}

/** What was refused may be sent again, and is no part of the conversation. */
function takeBack(text) {
  $("draft").value ||= text;
  fitDraft();
}

/** One answer on the page.  Thoughts come as reasoning, or between the model's own tags. */
class Answer {
  constructor() {
    this.began = performance.now();
    this.first = this.last = this.thought = null; // milliseconds
    this.raw = this.reasoning = "";
    this.usage = this.finish = null;
    this.hasEnded = this.hasFailed = false;
    this.node = document.createElement("div");
    this.node.className = "message assistant";
    this.node.innerHTML =
      '<details class="thinking" hidden><summary></summary><div class="thoughts"></div></details>' +
      '<div class="text"><span class="waiting-dot"></span></div><div class="facts"></div>';
    $("messages").append(this.node);
    this.scroll(true);
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning } = choice.delta;
    if (content || reasoning) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    this.reasoning += reasoning ?? "";
    this.raw += content ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    this.plan();
  }

  end(reason = null, error = null) {
    if (this.hasEnded) return;
    this.hasEnded = true;
    this.finish = reason ?? this.finish;
    if (error !== null) {
      this.hasFailed = true;
      const note = document.createElement("p");
      note.className = "error";
      note.setAttribute("role", "alert");
      note.textContent = error;
      this.node.querySelector(".facts").before(note);
    }
    this.draw();
  }

  /** Thoughts and answer apart; a model without a parser at the server writes both into the text. */
  get parts() {
    const match = /^\s*<think>([\s\S]*?)(<\/think>|$)/.exec(this.raw);
    if (!match) return { thoughts: this.reasoning, text: this.raw, isThinking: !this.raw && this.reasoning !== "" };
    return { thoughts: match[1], text: this.raw.slice(match[0].length), isThinking: !match[2] };
  }

  get content() {
    return this.parts.text.trim();
  }

  plan() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = null;
    const isFollowed = this.isAtEnd;
    const { thoughts, text, isThinking } = this.parts;
    if (thoughts.trim()) this.drawThoughts(thoughts, isThinking && !this.hasEnded);
    const body = this.node.querySelector(".text");
    if (text.trim() || this.hasEnded) body.replaceChildren(...render(text.trim()));
    else if (thoughts) body.replaceChildren();
    this.drawFacts();
    this.scroll(isFollowed);
  }

  drawThoughts(thoughts, isThinking) {
    const details = this.node.querySelector(".thinking");
    details.hidden = false;
    details.classList.toggle("busy", isThinking);
    if (!isThinking) this.thought ??= this.last - this.first;
    const seconds = ((this.thought ?? 0) / 1000).toFixed(1);
    details.querySelector("summary").textContent = isThinking ? "Thinking" : `Thought for ${seconds} s`;
    details.querySelector(".thoughts").textContent = thoughts.trim();
  }

  drawFacts() {
    const facts = [];
    const tokens = this.usage?.completion_tokens ?? 0;
    if (tokens) facts.push(count(tokens, "token"));
    if (tokens > 1 && this.last > this.first) {
      facts.push(`${Math.round((tokens - 1) / ((this.last - this.first) / 1000)).toLocaleString("en")} tokens/s`);
    }
    if (this.first !== null) facts.push(`first after ${Math.round(this.first - this.began)} ms`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.hasEnded && this.usage) {
      facts.push(`prompt ${this.usage.prompt_tokens.toLocaleString("en")}${cached ? `, ${cached.toLocaleString("en")} cached` : ""}`);
    }
    if (this.finish === "length") facts.push("cut: most tokens reached");
    if (this.finish === "stopped") facts.push("stopped");
    const bar = this.node.querySelector(".facts");
    bar.replaceChildren(...facts.map((fact) => Object.assign(document.createElement("span"), { textContent: fact })));
    if (this.hasEnded && this.content) bar.append(this.copyButton());
  }

  copyButton() {
    const button = Object.assign(document.createElement("button"), { textContent: "copy", type: "button" });
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(this.content);
      button.textContent = "copied";
    });
    return button;
  }

  get isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = $("messages");
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  scroll(isFollowed) {
    if (isFollowed) $("messages").scrollTop = $("messages").scrollHeight;
  }
}
