// The strip of steps: a column each, its rows stacked, the newest on the right.

import { colourOf, colours, fit } from "./paint.js";

const WIDTH = 13, GAP = 3; // pixels of a column
const MOST = 400; // columns that are kept
const GLIDE = 0.14; // seconds in which the strip comes most of the way

export class Steps {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.begin();
    canvas.addEventListener("mousemove", (event) => this.hover(event));
    canvas.addEventListener("mouseleave", () => (this.tip.textContent = "\u00a0"));
  }

  begin() {
    this.steps = []; // {id, rows}
    this.count = this.place = 0; // steps that have come; where the strip stands
    this.highlighted = null;
    this.isStale = true;
  }

  add(steps) {
    for (const { id, rows } of steps) this.steps.push({ id, rows, height: rows.reduce((h, row) => h + tall(row), 0) });
    this.count += steps.length;
    this.steps.splice(0, this.steps.length - MOST);
    this.isStale ||= steps.length > 0;
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
    pen.fillStyle = colours().line;
    pen.fillRect(0, height - 1, width, 1);
    for (const [index, step] of this.steps.entries()) {
      const x = width - (this.place - (this.count - this.steps.length + index)) * (WIDTH + GAP);
      if (x > -WIDTH && x < width) this.paint(pen, step, x, height - 2);
    }
  }

  /** Rows from the bottom, all of them smaller where they are too many. */
  paint(pen, step, x, height) {
    const scale = Math.min(1, height / step.height);
    let y = height;
    for (const row of step.rows) {
      const [seqId, numQuery, numDraft, numNew] = row;
      const h = tall(row) * scale;
      y -= h;
      const alpha = this.highlighted !== null && this.highlighted !== seqId ? 0.2 : 1;
      const gap = h > 3 ? 1 : 0;
      if (numDraft) this.paintVerification(pen, row, x, y, h - gap, alpha);
      else {
        pen.fillStyle = colourOf(seqId, numQuery > 1 && !numNew ? 0.72 * alpha : alpha);
        pen.beginPath();
        pen.roundRect(x, y, WIDTH, Math.max(0.5, h - gap), numQuery > 1 ? 3 : 1.5);
        pen.fill();
      }
    }
  }

  /** The token that a step yields anyway, then its drafts side by side: full if they stood. */
  paintVerification(pen, [seqId, numQuery, , numNew], x, y, h, alpha) {
    const w = WIDTH / numQuery;
    for (let i = 0; i < numQuery; i++) {
      const isIn = i < numNew;
      pen.fillStyle = colourOf(seqId, isIn ? alpha : 0.22 * alpha, isIn && i ? 0.14 : 0);
      pen.fillRect(x + i * w, y, Math.max(0.6, w - (w > 2.5 ? 0.8 : 0)), h);
    }
  }

  hover(event) {
    const back = (this.canvas.clientWidth - event.offsetX) / (WIDTH + GAP); // columns from the right edge
    const step = this.steps[Math.floor(this.place - back) - (this.count - this.steps.length)];
    if (!step) {
      this.tip.textContent = "\u00a0";
      return;
    }
    const sum = (pick) => step.rows.reduce((total, row) => total + pick(row), 0);
    const drafts = sum((row) => row[2]);
    const accepted = sum((row) => (row[2] ? row[3] - 1 : 0));
    const parts = [`step ${step.id}`, `${step.rows.length} rows`, `${sum((row) => row[1])} tokens in`, `${sum((row) => row[3])} out`];
    if (drafts) parts.push(`${accepted} of ${drafts} drafts accepted`);
    this.tip.textContent = parts.join(" · ");
  }
}

/** Pixels of a row: many tokens are taller than few, but not by as much as they are more. */
function tall([, numQuery, numDraft]) {
  return numDraft ? 10 : 7 + 7 * Math.log2(numQuery);
}
