// A request's own page: its life from the queue to its last token, as far as somebody has looked on.

import { median, number, plural, roundUp, time } from "./figures.js";
import { colourOf, colours, fit } from "./paint.js";

const MOST_LIVES = 256; // that are kept, the oldest ended ones go
const MOST_STEPS = 4000; // of a life
const AXIS = 54, FOOT = 20, TOP = 16; // pixels left of the chart, below and above it
const MOST_CHUNKS = 12; // that are listed

/** What has been seen of one request.  Times are seconds of the engine's clock. */
export class Life {
  constructor(id, seconds, isWhole) {
    this.id = id;
    this.since = seconds; // when it was seen first
    this.isWhole = isWhole; // seen from its beginning
    this.ran = null; // when its first step had begun
    this.first = null; // when its first token came
    this.end = null; // when it was gone
    this.isWaiting = true;
    this.numPreempted = 0;
    this.steps = []; // {at, seconds, id, numQuery, numDraft, numNew}
    this.numSkipped = 0; // steps that were not kept
    this.seq = null;
  }

  see(seq, isRunning) {
    if (!isRunning && !this.isWaiting) this.numPreempted++;
    this.isWaiting = !isRunning;
    this.seq = seq;
  }

  step(step) {
    this.ran ??= step.at - step.seconds;
    if (step.numNew) this.first ??= step.at;
    this.steps.push(step);
    if (this.steps.length <= MOST_STEPS) return;
    this.steps.shift();
    this.numSkipped++;
  }

  get chunks() {
    return this.steps.filter(({ numQuery, numDraft }) => numQuery - numDraft > 1);
  }

  get gaps() {
    const tokens = this.steps.filter(({ numNew }) => numNew);
    return tokens.slice(1).map(({ at }, i) => at - tokens[i].at);
  }

  get state() {
    return this.end !== null ? "has ended" : this.isWaiting ? "waits" : "runs";
  }
}

/** The lives of an engine's requests. */
export class Lives {
  constructor() {
    this.lives = new Map();
    this.seconds = 0; // of the newest frame
    this.blockSize = 1;
  }

  take(frame, steps) {
    const since = frame.is_first ? frame.seconds : this.seconds; // who is new has come after the frame before
    const life = (id) => this.life(id, since, !frame.is_first);
    this.seconds = frame.seconds;
    this.blockSize = frame.block_size;
    for (const seq of frame.waiting) life(seq[0]).see(seq, false);
    for (const seq of frame.running) life(seq[0]).see(seq, true);
    let at = frame.seconds;
    const found = [];
    for (const step of steps.toReversed()) {
      found.push({ ...step, at });
      at -= step.seconds;
    }
    for (const step of found.reverse()) {
      for (const [id, numQuery, numDraft, numNew] of step.rows) {
        life(id).step({ at: step.at, seconds: step.seconds, id: step.id, numQuery, numDraft, numNew });
      }
    }
    const isAll = frame.num_running <= frame.running.length && frame.num_waiting <= frame.waiting.length;
    const there = new Set([...frame.waiting, ...frame.running].map(([id]) => id));
    for (const life of this.lives.values()) if (isAll && life.end === null && !there.has(life.id)) life.end = frame.seconds;
    this.forgetOldest();
  }

  life(id, since, isWhole) {
    if (!this.lives.has(id)) this.lives.set(id, new Life(id, since, isWhole));
    const life = this.lives.get(id);
    life.end = null;
    return life;
  }

  forgetOldest() {
    for (const [id, life] of this.lives) {
      if (this.lives.size <= MOST_LIVES) return;
      if (life.end !== null) this.lives.delete(id);
    }
  }
}

/** A life in words: [what, how much] of each fact. */
export function factsOf(life, now, blockSize) {
  const [, , promptLen, numTokens, numComputed, numCached, limit] = life.seq ?? [0, 0, 0, 0, 0, 0, 0];
  const sum = (pick) => life.steps.reduce((total, step) => total + pick(step), 0);
  const { gaps, chunks } = life;
  const drafts = sum((step) => step.numDraft);
  const accepted = sum((step) => (step.numDraft ? step.numNew - 1 : 0));
  const until = life.end ?? now;
  const inQueue = life.isWhole || life.isWaiting ? time(Math.max(0, (life.ran ?? until) - life.since)) : "it was there before you";
  const first = life.first === null ? "none yet" : life.isWhole ? `after ${time(life.first - life.since)}` : "it was there before you";
  return [
    ["Prompt", `${plural(promptLen, "token")}, ${number(numCached)} from the cache`],
    ["Answer", `${plural(Math.max(0, numTokens - promptLen), "token")}, at most ${number(Math.max(0, limit - promptLen))}`],
    ["In the queue", inQueue],
    ["First token", first],
    ["Between tokens", gaps.length ? `median ${time(median(gaps))}, longest ${time(Math.max(...gaps))}` : "–"],
    ["Steps", `${number(life.steps.length + life.numSkipped)}, ${number(chunks.length)} of them prompt chunks`],
    ["Drafts", drafts ? `${number(accepted)} of ${number(drafts)} accepted` : "none"],
    ["KV", life.end === null && !life.isWaiting ? plural(Math.ceil(numComputed / blockSize), "block") : "none now"],
    ["Preempted", life.numPreempted ? plural(life.numPreempted, "time") : "never"],
    ["Seen for", time(Math.max(0, until - life.since))],
  ];
}

/** The page of one request, a dialog over the X-ray. */
export class LifePage {
  constructor(dialog) {
    this.dialog = dialog;
    this.canvas = dialog.querySelector("canvas");
    this.id = null;
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    dialog.addEventListener("close", () => (this.id = null));
  }

  open(id) {
    this.id = id;
    this.dialog.showModal();
  }

  draw(lives) {
    const life = this.id === null ? null : lives.lives.get(this.id);
    if (!life) return;
    write(this.dialog.querySelector("h2"), `Request #${life.id} ${life.state}`);
    const facts = factsOf(life, lives.seconds, lives.blockSize);
    const list = this.dialog.querySelector("dl");
    if (list.children.length !== 2 * facts.length) {
      list.replaceChildren(...facts.flatMap(() => ["dt", "dd"].map((tag) => document.createElement(tag))));
    }
    for (const [i, words] of facts.flat().entries()) write(list.children[i], words);
    write(this.dialog.querySelector(".chunks"), wordsOfChunks(life));
    paint(this.canvas, life, lives.seconds);
  }
}

/** Its prompt's chunks, in words. */
export function wordsOfChunks({ chunks }) {
  if (!chunks.length) return "No prompt chunk was seen.";
  const rest = chunks.length - MOST_CHUNKS;
  const named = chunks.slice(0, MOST_CHUNKS).map(({ id, numQuery, seconds }) => `${number(numQuery)} in step ${number(id)} (${time(seconds)})`);
  return `Prompt chunks, in tokens: ${named.join(" · ")}${rest > 0 ? ` · and ${number(rest)} more` : ""}`;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Tokens with KV over time: a prompt's chunks pale, what was decoded full; the queue before is a dashed line. */
function paint(canvas, life, now) {
  const { pen, width, height } = fit(canvas);
  pen.clearRect(0, 0, width, height);
  const [from, to] = [life.since, Math.max(life.since + 0.01, life.end ?? now)];
  const bottom = height - FOOT;
  const start = life.seq?.[5] ?? 0; // tokens that were cached
  const total = life.steps.reduce((sum, step) => sum + stayed(step), start);
  const most = roundUp(Math.max(8, total));
  const x = (at) => AXIS + ((width - AXIS - 8) * (at - from)) / (to - from);
  const y = (tokens) => bottom - ((bottom - TOP) * tokens) / most;
  axes(pen, { width, bottom, y, most, x, from, to });
  pen.strokeStyle = colours().faint;
  pen.setLineDash([4, 4]);
  pen.beginPath();
  pen.moveTo(x(from), y(start));
  pen.lineTo(x(life.ran ?? to), y(start));
  pen.stroke();
  pen.setLineDash([]);
  let tokens = start;
  for (const step of life.steps) {
    const [left, right] = [x(step.at - step.seconds), x(step.at)];
    const isChunk = step.numQuery - step.numDraft > 1;
    const w = Math.max(1.5, right - left);
    tokens += stayed(step);
    pen.fillStyle = colourOf(life.id, isChunk ? 0.45 : 1);
    pen.fillRect(right - w, y(tokens), w, bottom - y(tokens));
    if (!step.numDraft) continue;
    pen.fillStyle = colourOf(life.id, 0.22); // drafts that did not stand
    const rejected = step.numDraft + 1 - step.numNew;
    pen.fillRect(right - w, y(tokens + rejected), w, y(tokens) - y(tokens + rejected));
  }
}

/** Tokens of a step that stay. */
function stayed({ numQuery, numDraft, numNew }) {
  return numDraft ? numNew : numQuery;
}

function axes(pen, { width, bottom, y, most, x, from, to }) {
  pen.font = "11px system-ui, sans-serif";
  for (const share of [0, 0.5, 1]) {
    pen.fillStyle = colours().line;
    pen.fillRect(AXIS, Math.round(y(share * most)), width - AXIS, 1);
    pen.fillStyle = colours().faint;
    pen.textAlign = "right";
    pen.fillText(`${number(share * most)}`, AXIS - 8, y(share * most) + 4);
  }
  pen.textAlign = "left";
  pen.fillText("tokens", AXIS + 4, 12);
  for (const share of [0, 0.5, 1]) {
    pen.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
    pen.fillText(time(share * (to - from)), x(from + share * (to - from)), bottom + 14);
  }
}
