// A request's own page: its life from the queue to its last token, as far as somebody has looked on.

import { median, number, plural, roundUp, time } from "./figures.js";
import { colourOf, colours, fit } from "./paint.js";

const MOST_LIVES = 256; // that are kept, the oldest ended ones go
const MOST_STEPS = 4000; // of a life
const AXIS = 54, FOOT = 20, TOP = 18, LOW = 44; // pixels left of the chart, below and above its lanes, and of the lower one
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
    return this.steps.filter(isChunk);
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
    ["Steps", `${number(life.steps.length + life.numSkipped)}, with ${plural(chunks.length, "prompt chunk")}`],
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

/** Above tokens with KV over time, chunks pale and the queue dashed; below what each step yielded, and its drafts. */
function paint(canvas, life, now) {
  const { pen, width, height } = fit(canvas);
  pen.clearRect(0, 0, width, height);
  const [from, to] = [life.since, Math.max(life.since + 0.01, life.end ?? now)];
  const x = (at) => AXIS + ((width - AXIS - 8) * (at - from)) / (to - from);
  const bottom = height - FOOT;
  const start = life.seq?.[5] ?? 0; // tokens that were cached
  const kv = { top: TOP, bottom: bottom - LOW - TOP, end: roundUp(Math.max(8, life.steps.reduce((sum, step) => sum + stayed(step), start))), unit: "tokens" };
  const out = { top: bottom - LOW, bottom, end: roundUp(Math.max(4, ...life.steps.map(made))), unit: "a step" };
  for (const lane of [kv, out]) paintLane(pen, lane, width);
  paintTimes(pen, x, from, to, bottom);
  paintQueue(pen, x(from), x(life.ran ?? to), heightIn(kv, start));
  let tokens = start;
  for (const step of life.steps) {
    const [left, right] = [x(step.at - step.seconds), x(step.at)];
    const w = Math.max(1, right - left - 0.5);
    tokens += stayed(step);
    pen.fillStyle = colourOf(life.id, isChunk(step) ? 0.45 : 1);
    fillDown(pen, right - w, w, kv, tokens);
    pen.fillStyle = colourOf(life.id, 0.3); // drafts that did not stand
    fillDown(pen, right - w, w, out, made(step));
    pen.fillStyle = colourOf(life.id);
    fillDown(pen, right - w, w, out, step.numNew);
  }
}

const isChunk = ({ numQuery, numDraft }) => numQuery - numDraft > 1;

/** Tokens of a step that stay. */
const stayed = ({ numQuery, numDraft, numNew }) => (numDraft ? numNew : numQuery);

/** What a step yielded, or might have. */
const made = ({ numDraft, numNew }) => (numDraft ? numDraft + 1 : numNew);

const heightIn = ({ top, bottom, end }, value) => bottom - ((bottom - top) * value) / end;

function fillDown(pen, x, w, lane, value) {
  const y = heightIn(lane, value);
  pen.fillRect(x, y, w, lane.bottom - y);
}

function paintQueue(pen, left, right, y) {
  pen.strokeStyle = colours().faint;
  pen.setLineDash([4, 4]);
  pen.beginPath();
  pen.moveTo(left, y);
  pen.lineTo(right, y);
  pen.stroke();
  pen.setLineDash([]);
}

function paintLane(pen, lane, width) {
  pen.font = "11px system-ui, sans-serif";
  for (const share of lane.bottom - lane.top > 60 ? [0, 0.5, 1] : [0, 1]) {
    const y = Math.round(heightIn(lane, share * lane.end));
    pen.fillStyle = colours().line;
    pen.fillRect(AXIS, y, width - AXIS, 1);
    pen.fillStyle = colours().faint;
    pen.textAlign = "right";
    pen.fillText(number(share * lane.end), AXIS - 8, y + 4);
  }
  pen.textAlign = "left";
  pen.fillText(lane.unit, AXIS + 4, lane.top - 4);
}

function paintTimes(pen, x, from, to, bottom) {
  for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
    pen.textAlign = align;
    pen.fillText(time(share * (to - from)), x(from + share * (to - from)), bottom + 14);
  }
}
