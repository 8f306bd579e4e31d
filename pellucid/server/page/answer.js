// One answer on the page: what has come of it, and what is to be said about it.

import { render } from "./markdown.js";

export const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/** A turn of the conversation.  Times in milliseconds; finish: the API's word, "stopped", or null as long as it comes;
    side: the {model, temperature} that it was asked of. */
export function newAnswer(side) {
  return { role: "assistant", content: "", thoughts: "", finish: null, usage: null, wait: null, span: 0, thinking: null, side };
}

/** Thoughts and answer apart; a model without a parser at the server writes both into the text. */
export function partsOf(raw, reasoning) {
  const match = /^\s*<think>([\s\S]*?)(<\/think>|$)/.exec(raw);
  if (!match) return { thoughts: reasoning, text: raw, isThinking: !raw && reasoning !== "" };
  return { thoughts: match[1], text: raw.slice(match[0].length), isThinking: !match[2] };
}

/** Why there is no text in an answer that has ended. */
export function whyEmpty({ finish, thoughts, usage }) {
  if (finish === "stopped") return "Stopped before it had an answer.";
  if (finish === null) return "Cut off: the page was left before there was an answer.";
  const tokens = usage ? plural(usage.completion, "token") : "all tokens";
  if (finish === "length" && thoughts) return `No answer: its thoughts took all it may have, ${tokens}. Allow more under “Max tokens per answer”.`;
  if (finish === "length") return `No text within all it may have, ${tokens}. Allow more under “Max tokens per answer”.`;
  return "Empty answer: the model ended without a word.";
}

/** What is said below an answer, piece by piece. */
export function factsOf({ finish, usage, wait, span, error }, hasEnded) {
  const facts = [];
  const tokens = usage?.completion ?? 0;
  if (tokens) facts.push(plural(tokens, "token"));
  if (tokens > 1 && span > 0) facts.push(`${Math.round((1000 * (tokens - 1)) / span).toLocaleString("en")} tokens/s`);
  if (wait !== null) facts.push(`first after ${Math.round(wait).toLocaleString("en")} ms`);
  if (hasEnded && usage) {
    const cached = usage.cached ? `, ${usage.cached.toLocaleString("en")} of it cached` : "";
    facts.push(`prompt ${usage.prompt.toLocaleString("en")}${cached}`);
  }
  if (finish === "length") facts.push("cut off at max tokens");
  if (finish === "stopped") facts.push("stopped");
  if (finish === null && hasEnded && !error) facts.push("cut off: the page was left");
  return facts;
}

/** One of two answers, in words. */
export function wordsOfSide({ model, temperature }) {
  return [model, `temperature ${temperature.toFixed(2)}`].filter(Boolean).join(" · ");
}

/** Draws a turn, new or kept.  actions: {retry(), enterKey(), choose()}; the last for one of two answers. */
export class Answer {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.began = performance.now();
    this.first = null; // milliseconds of performance.now
    this.raw = this.reasoning = "";
    this.isThinking = false;
    this.hasEnded = false;
    this.frame = null;
    this.node = document.createElement("div");
    this.node.className = "message assistant";
    this.node.innerHTML =
      '<details class="thinking" hidden><summary></summary><div class="thoughts"></div></details>' +
      '<div class="text"><span class="waiting-dot"></span></div><div class="facts"></div>';
    if (actions.choose) this.node.prepend(Object.assign(document.createElement("h2"), { textContent: wordsOfSide(turn.side) }));
  }

  take({ usage, choices }) {
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      this.turn.usage = { prompt: usage.prompt_tokens, completion: usage.completion_tokens, cached };
    }
    if (choices[0]) this.add(choices[0].delta, choices[0].finish_reason);
  }

  add({ content, reasoning }, finish) {
    const { turn } = this;
    if (content || reasoning) {
      const now = performance.now();
      this.first ??= now;
      turn.wait = this.first - this.began;
      turn.span = now - this.first;
    }
    this.reasoning += reasoning ?? "";
    this.raw += content ?? "";
    turn.finish = finish ?? turn.finish;
    const { thoughts, text, isThinking } = partsOf(this.raw, this.reasoning);
    this.isThinking = isThinking;
    turn.thoughts = thoughts.trim();
    turn.content = text.trim();
    if (thoughts && !isThinking) turn.thinking ??= turn.span;
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  /** It has ended; error: {message, needsKey} or null. */
  end(error = null) {
    this.hasEnded = true;
    this.isThinking = false;
    if (error !== null) this.turn.error = error.message;
    this.needsKey = error?.needsKey ?? false;
    this.draw();
  }

  draw() {
    this.frame = null;
    const { turn, hasEnded } = this;
    if (turn.thoughts) this.drawThoughts();
    const text = this.node.querySelector(".text");
    if (turn.content || turn.thoughts || hasEnded) text.replaceChildren(...render(turn.content));
    if (hasEnded && turn.error) text.append(this.errorNote());
    else if (hasEnded && !turn.content) text.append(note("empty-answer", whyEmpty(turn)));
    const facts = factsOf(turn, hasEnded).map((fact) => Object.assign(document.createElement("span"), { textContent: fact }));
    this.node.querySelector(".facts").replaceChildren(...facts, ...(hasEnded ? this.buttons() : []));
    this.onDraw?.();
  }

  drawThoughts() {
    const { thoughts, thinking, span } = this.turn;
    const details = this.node.querySelector(".thinking");
    details.hidden = false;
    details.classList.toggle("busy", this.isThinking);
    const words = this.isThinking ? "Thinking" : `Thought for ${((thinking ?? span) / 1000).toFixed(1)} s`;
    details.querySelector("summary").textContent = words;
    details.querySelector(".thoughts").textContent = thoughts;
  }

  errorNote() {
    const node = note("error", this.turn.error);
    node.setAttribute("role", "alert");
    if (this.needsKey) node.append(" ", button("Enter the key", "act", this.actions.enterKey));
    return node;
  }

  buttons() {
    const { retry: ask, choose } = this.actions;
    const retry = button("try again", "act retry", ask);
    retry.title = choose ? "Ask for two other answers in place of these" : "Ask for another answer in place of this one";
    const others = choose && !this.turn.error ? [button("go on with this one", "act", choose), retry] : [retry];
    if (!this.turn.content) return others;
    const copy = button("copy", "act", async () => {
      await navigator.clipboard.writeText(this.turn.content);
      copy.textContent = "copied";
    });
    return [copy, ...others];
  }
}

export function button(text, className, onClick) {
  const node = Object.assign(document.createElement("button"), { type: "button", textContent: text, className });
  node.addEventListener("click", onClick);
  return node;
}

function note(className, text) {
  return Object.assign(document.createElement("p"), { className, textContent: text });
}
