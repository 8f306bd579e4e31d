// Every KV page as a cell.  Only those that changed are painted, so there may be tens of thousands.

import { number } from "./figures.js";
import { colours, fit, paintPage } from "./paint.js";

const LARGEST = 34, SMALLEST = 3; // pixels from a cell to the next; where these do not fit, the picture scrolls
const GLOW = 500; // milliseconds in which a page that was taken is lighter
const NARROW = matchMedia("(max-width: 1080px)"); // there the picture is as tall as it needs to be
const MOST_TALL = 320, COMFORTABLE = 13; // pixels, of the picture and of its cells, there

/** How many columns of square cells, as large as all `count` of them fit. */
export function columnsFor(count, width, height) {
  const most = mostColumns(width);
  let columns = Math.min(most, Math.ceil(width / LARGEST));
  while (columns < most && heightOf(count, width, columns) > height) columns++;
  return columns;
}

export function heightOf(count, width, columns) {
  return Math.ceil(count / columns) * sizeOf(width, columns);
}

const mostColumns = (width) => Math.max(1, Math.floor(width / SMALLEST));
/** From a cell to the next; the smallest ones are all alike, for a part of a pixel more or less would be seen. */
const sizeOf = (width, columns) => (columns === mostColumns(width) ? SMALLEST : width / columns);

export class KvPages {
  /** onHover: is told a sequence's id, or null. */
  constructor(canvas, tip, onHover) {
    this.canvas = canvas;
    this.tip = tip;
    this.onHover = onHover;
    this.fresh = new Map(); // a page's index: when it was taken
    this.stale = new Set(); // indices to paint
    this.highlighted = null; // a sequence
    this.cursor = null; // the index of the page that is pointed at
    this.hovered = null; // the sequence that holds it
    this.begin(0, 0);
    new ResizeObserver(() => (this.isStale = true)).observe(canvas.closest(".card"));
    canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerdown", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** All that was shown is void.  blockSize: tokens of a page. */
  begin(numPages, blockSize) {
    this.pages = Array.from({ length: numPages }, () => ({ owner: -1, numOwners: 0, isCached: 0 }));
    this.blockSize = blockSize;
    this.numOwned = this.numShared = this.numCached = 0;
    this.fresh.clear();
    this.isStale = true;
    this.point(null);
  }

  get numFree() {
    return this.pages.length - this.numOwned - this.numCached;
  }

  change(changes, now) {
    for (const [id, owner, numOwners, isCached] of changes) {
      const page = this.pages[id - 1]; // 0 is the workers' own
      if (owner >= 0 && page.owner !== owner) this.fresh.set(id - 1, now);
      this.count(page, -1);
      Object.assign(page, { owner, numOwners, isCached });
      this.count(page, 1);
      this.stale.add(id - 1);
    }
  }

  count({ owner, numOwners, isCached }, by) {
    if (owner >= 0) this.numOwned += by;
    if (numOwners > 1) this.numShared += by;
    if (isCached) this.numCached += by;
  }

  highlight(seqId) {
    if (this.highlighted === seqId) return;
    this.highlighted = seqId;
    this.isStale = true;
  }

  draw(now) {
    if (this.isStale) this.fitHeight();
    const { pen, width, height, isNew } = fit(this.canvas);
    if (isNew || this.isStale) {
      this.arrange(width, this.canvas.parentElement.clientHeight);
      pen.clearRect(0, 0, width, height);
      for (let index = 0; index < this.pages.length; index++) this.paint(pen, index, now);
      this.isStale = false;
    } else {
      for (const index of this.fresh.keys()) this.stale.add(index);
      for (const index of this.stale) this.paint(pen, index, now);
    }
    this.stale.clear();
    for (const [index, since] of this.fresh) if (now - since > GLOW) this.fresh.delete(index);
  }

  /** The canvas is as tall as its place, or taller if cells would become too small. */
  fitHeight() {
    const stage = this.canvas.parentElement;
    const { clientWidth: width } = stage;
    const wanted = heightOf(this.pages.length, width, Math.max(1, Math.floor(width / COMFORTABLE)));
    stage.style.height = NARROW.matches ? `${Math.min(MOST_TALL, Math.max(40, Math.ceil(wanted)))}px` : "";
    const needed = () => {
      const { clientWidth, clientHeight } = stage;
      return heightOf(this.pages.length, clientWidth, columnsFor(this.pages.length, clientWidth, clientHeight));
    };
    this.canvas.style.height = "";
    if (needed() <= stage.clientHeight) return;
    this.canvas.style.height = `${Math.ceil(needed())}px`;
    this.canvas.style.height = `${Math.ceil(needed())}px`; // the bar that scrolls has made its place narrower
  }

  arrange(width, height) {
    this.columns = columnsFor(this.pages.length, width, height);
    this.size = sizeOf(width, this.columns);
  }

  /** Cells end at whole pixels, so that none is blurred. */
  cell(index) {
    const snap = (value) => Math.round(value * devicePixelRatio) / devicePixelRatio;
    const [column, row] = [index % this.columns, Math.floor(index / this.columns)];
    const x = snap(column * this.size), y = snap(row * this.size);
    return { x, y, w: snap((column + 1) * this.size) - x, h: snap((row + 1) * this.size) - y };
  }

  paint(pen, index, now) {
    const page = this.pages[index];
    const { x, y, w, h } = this.cell(index);
    const gap = this.size > 24 ? 5 : this.size > 11 ? 3 : this.size > 7 ? 2 : 1;
    const isDim = this.highlighted !== null && page.owner !== this.highlighted;
    const age = now - (this.fresh.get(index) ?? -Infinity);
    const lift = age < GLOW ? 0.2 * (1 - age / GLOW) : 0;
    pen.clearRect(x, y, w, h);
    paintPage(pen, page, { x, y, w: w - gap, h: h - gap }, isDim ? 0.25 : 1, lift);
    if (this.cursor !== index) return;
    pen.strokeStyle = colours().ink;
    pen.strokeRect(x + 0.5, y + 0.5, w - gap - 1, h - gap - 1);
  }

  /** The page below a pointer. */
  at({ offsetX: x, offsetY: y }) {
    if (x >= this.columns * this.size) return null;
    const index = Math.floor(y / this.size) * this.columns + Math.floor(x / this.size);
    return index < this.pages.length ? index : null;
  }

  move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (!(event.key in steps) || !this.pages.length) return;
    event.preventDefault();
    const next = this.cursor === null ? 0 : this.cursor + steps[event.key];
    if (this.pages[next]) this.point(next);
  }

  /** Say what is known of a page; null: of none. */
  point(index) {
    for (const each of [this.cursor, index]) if (each !== null) this.stale.add(each);
    this.cursor = index;
    this.tip.textContent = index === null ? this.caption : this.words(index);
    const owner = index === null ? -1 : this.pages[index].owner;
    const seqId = owner >= 0 ? owner : null;
    if (seqId !== this.hovered) this.onHover(seqId);
    this.hovered = seqId;
  }

  words(index) {
    const { owner, numOwners, isCached } = this.pages[index];
    const where = `page ${number(index + 1)}`;
    if (numOwners > 1) return `${where}: shared by ${number(numOwners)} requests, #${owner} the first`;
    return `${where}: ${owner >= 0 ? `request #${owner}` : isCached ? "cached, free to take" : "free"}`;
  }

  get caption() {
    if (!this.pages.length) return "Not known.";
    return `Each cell is a page with keys and values of ${this.blockSize} tokens.`;
  }
}
