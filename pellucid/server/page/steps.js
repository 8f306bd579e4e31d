// The strip of steps, the newest on the right: above how many rows each had, below how long it took.

import { number, plural, roundUp, time } from "./figures.js";
import { colours, fit, paintRow } from "./paint.js";

const WIDTH = 13, GAP = 3; // pixels of a column
const MOST = 400; // columns that are kept
const GLIDE = 0.14; // seconds in which the strip comes most of the way
const AXIS = 62, FOOT = 18, BETWEEN = 16; // pixels left of the strip, below it, and between its lanes
const EVERY = 10; // columns from a step that is named to the next
const SMALL = 4; // rows, and milliseconds, to which the axes go at least

export class Steps {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.begin();
    canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerdown", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.move(event));
  }

  begin() {
    this.steps = []; // {id, rows, numRows, seconds, number: which of all that have come}
    this.count = this.place = 0; // steps that have come; where the strip stands
    this.highlighted = null;
    this.isKnown = false;
    this.pointed = null; // a step's number
    this.newest = null; // {num, numDrawn} of the last second or so
    this.isStale = true;
    this.say();
  }

  add(steps) {
    this.isKnown = true;
    for (const step of steps) this.steps.push({ ...step, number: this.count++ });
    this.steps.splice(0, this.steps.length - MOST);
    this.isStale ||= steps.length > 0;
  }

  /** counts: {num, numDrawn} of the newest steps, or null; not all are drawn where they are many. */
  tell(counts) {
    this.newest = counts;
    this.say();
  }

  highlight(seqId) {
    this.isStale ||= this.highlighted !== seqId;
    this.highlighted = seqId;
  }

  draw(seconds) {
    const { pen, width, height, isNew } = fit(this.canvas);
    const left = this.count - this.place;
    if (!isNew && !this.isStale && left < 0.01) return;
    this.place = left < 0.01 ? this.count : this.place + left * (1 - Math.exp(-seconds / GLIDE));
    this.isStale = false;
    pen.clearRect(0, 0, width, height);
    const shown = this.steps.filter((step) => this.x(step, width) > AXIS - WIDTH);
    const bottom = height - FOOT, low = bottom - (bottom - BETWEEN) * 0.3;
    const rows = { top: BETWEEN - 4, bottom: low - BETWEEN, end: axisEnd(shown.map(({ numRows }) => numRows)), unit: "rows" };
    const took = { top: low, bottom, end: axisEnd(shown.map((step) => 1000 * step.seconds)), unit: "ms" };
    if (!this.isKnown) return;
    for (const lane of [rows, took]) paintAxis(pen, lane, width);
    pen.save();
    pen.beginPath();
    pen.rect(AXIS, 0, width - AXIS, height);
    pen.clip();
    for (const step of shown) this.paint(pen, step, this.x(step, width), rows, took);
    pen.restore();
  }

  x(step, width) {
    return width - (this.place - step.number) * (WIDTH + GAP);
  }

  paint(pen, step, x, rows, took) {
    const height = (rows.bottom - rows.top) / rows.end; // pixels of a row
    const gap = height > 3 ? 1 : 0;
    for (const [index, row] of step.rows.entries()) {
      const alpha = this.highlighted !== null && this.highlighted !== row[0] ? 0.2 : 1;
      const y = rows.bottom - (index + 1) * height;
      paintRow(pen, row, { x, y, w: WIDTH, h: Math.max(0.5, height - gap) }, alpha);
    }
    pen.fillStyle = colours().rest; // rows of which only the number is known
    const rest = (step.numRows - step.rows.length) * height;
    if (rest) pen.fillRect(x, rows.bottom - step.numRows * height, WIDTH, rest);
    const h = Math.max(1, ((took.bottom - took.top) * 1000 * step.seconds) / took.end);
    pen.fillStyle = step.number === this.pointed ? colours().ink : colours().faint;
    pen.fillRect(x, took.bottom - h, WIDTH, h);
    if (step.number % EVERY) return;
    pen.fillStyle = colours().faint;
    pen.textAlign = "center";
    pen.fillText(`step ${number(step.id)}`, x + WIDTH / 2, took.bottom + 13);
  }

  /** The step below a pointer, by its number. */
  at({ offsetX }) {
    if (offsetX < AXIS) return null;
    const back = (this.canvas.clientWidth - offsetX) / (WIDTH + GAP); // columns from the right edge
    return Math.floor(this.place - back);
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.steps.length) return;
    event.preventDefault();
    const [first, last] = [this.steps[0].number, this.steps.at(-1).number];
    this.point(Math.min(last, Math.max(first, (this.pointed ?? last + 1) + by)));
  }

  point(which) {
    this.isStale ||= which !== this.pointed;
    this.pointed = which;
    this.tip.ariaLive = which === null ? "off" : "polite";
    this.say();
  }

  say() {
    const step = this.steps.find((each) => each.number === this.pointed);
    const text = step ? wordsOf(step) : this.caption;
    if (this.tip.textContent !== text) this.tip.textContent = text;
  }

  get caption() {
    if (!this.isKnown) return "Not known.";
    const { num, numDrawn } = this.newest ?? { num: 0, numDrawn: 0 };
    const skipped = num > numDrawn ? ` Of the newest ${number(num)}, ${number(numDrawn)} are drawn.` : "";
    return `A column is a step, the newest on the right; the bar below is its time.${skipped}`;
  }
}

/** A step in words. */
export function wordsOf({ id, rows, numRows, seconds }) {
  const sum = (pick) => rows.reduce((total, row) => total + pick(row), 0);
  const drafts = sum((row) => row[2]);
  const parts = [`step ${number(id)}`, time(seconds), plural(numRows, "row")];
  const ofThese = numRows > rows.length ? ` in the first ${number(rows.length)}` : "";
  parts.push(`${plural(sum((row) => row[1]), "token")} in${ofThese}`, `${number(sum((row) => row[3]))} out${ofThese}`);
  if (drafts) parts.push(`${number(sum((row) => (row[2] ? row[3] - 1 : 0)))} of ${number(drafts)} drafts accepted`);
  return parts.join(" · ");
}

function axisEnd(values) {
  return roundUp(Math.max(SMALL, ...values));
}

/** Lines at nothing, half and all of a lane, with their values, and the unit above. */
function paintAxis(pen, { top, bottom, end, unit }, width) {
  pen.font = "11px system-ui, sans-serif";
  const isHalved = bottom - top > 60 && Number.isInteger(end / 2);
  for (const share of isHalved ? [0, 0.5, 1] : [0, 1]) {
    const y = Math.round(bottom - share * (bottom - top));
    pen.fillStyle = colours().line;
    pen.fillRect(AXIS, y, width - AXIS, 1);
    pen.fillStyle = colours().faint;
    pen.textAlign = "right";
    pen.fillText(`${number(share * end)}${share === 1 ? ` ${unit}` : ""}`, AXIS - 8, y + 4);
  }
}
