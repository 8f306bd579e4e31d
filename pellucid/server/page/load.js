// Something to look at: questions that share a beginning, each answered several times, until they end or are stopped.

import { call } from "./api.js";

const NUM_QUESTIONS = 4, NUM_ANSWERS = 4; // a browser holds few connections to one host
const BRIEFING = "You are a careful assistant. Read the question twice, think in small steps, check every step, " +
  "and then answer in one short sentence. If you do not know the answer, say so.";

export class Load {
  /** onFault: is told why requests have failed. */
  constructor(start, stop, onFault) {
    this.start = start;
    this.stop = stop;
    this.onFault = onFault;
    this.stopper = null;
    this.count = 0; // under way
    start.addEventListener("click", () => this.send());
    stop.addEventListener("click", () => this.stopper?.abort());
    this.tell();
  }

  send() {
    this.stopper = new AbortController();
    for (let i = 0; i < NUM_QUESTIONS; i++) this.ask(i);
  }

  async ask(index) {
    this.count += NUM_ANSWERS;
    this.tell();
    try {
      const reply = await call("v1/chat/completions", { body: question(index), signal: this.stopper.signal });
      await reply.body.pipeTo(new WritableStream()); // read to its end, and dropped
    } catch (error) {
      if (error.name !== "AbortError") this.onFault(error);
    }
    this.count -= NUM_ANSWERS;
    this.tell();
  }

  tell() {
    this.start.textContent = this.count ? `${this.count} under way` : `Send ${NUM_QUESTIONS * NUM_ANSWERS} requests`;
    this.start.disabled = this.count > 0;
    this.stop.hidden = this.count === 0;
  }
}

function question(index) {
  const terms = Array.from({ length: 4 + 6 * index }, () => Math.floor(100 * Math.random()));
  const messages = [
    { role: "system", content: BRIEFING },
    { role: "user", content: `What is ${terms.join(" + ")}?` },
  ];
  return { messages, n: NUM_ANSWERS, max_tokens: 200 + 100 * index, stream: true };
}
