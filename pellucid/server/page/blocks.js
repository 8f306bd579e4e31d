// Every KV block as a cell.  Only those that changed are painted, so there may be tens of thousands.

import { number } from "./figures.js";
import { colours, fit, paintBlock } from "./paint.js";

const LARGEST = 34, SMALLEST = 3; // pixels from a cell to the next; where these do not fit, the picture scrolls
const GLOW = 500; // milliseconds in which a block that was taken is lighter
const TITLE = 20; // pixels above each of several KV groups
const NARROW = matchMedia("(max-width: 1080px)"); // there the picture is as tall as it needs to be
const MOST_TALL = 320, COMFORTABLE = 13; // pixels, of the picture and of its cells, there

/** How many columns of square cells, as large as all fit; counts: blocks of each KV group. */
export function columnsFor(counts, width, height) {
  const most = mostColumns(width);
  let columns = Math.min(most, Math.ceil(width / LARGEST));
  while (columns < most && heightOf(counts, width, columns) > height) columns++;
  return columns;
}

export function heightOf(counts, width, columns) {
  const size = sizeOf(width, columns);
  return counts.reduce((sum, count) => sum + Math.ceil(count / columns) * size + titleOf(counts), 0);
}

const mostColumns = (width) => Math.max(1, Math.floor(width / SMALLEST));
/** From a cell to the next; the smallest ones are all alike, for a part of a pixel more or less would be seen. */
const sizeOf = (width, columns) => (columns === mostColumns(width) ? SMALLEST : width / columns);
const titleOf = (counts) => (counts.length > 1 ? TITLE : 0);

export class Blocks {
  /** onHover: is told a sequence's id, or null. */
  constructor(canvas, tip, onHover) {
    this.canvas = canvas;
    this.tip = tip;
    this.onHover = onHover;
    this.fresh = new Map(); // a block's place: when it was taken
    this.stale = new Set(); // places to paint
    this.highlighted = null; // a sequence
    this.cursor = null; // {group, index}: the block that is pointed at
    this.hovered = null; // the sequence that holds it
    this.begin([], []);
    new ResizeObserver(() => (this.isStale = true)).observe(canvas.closest(".card"));
    canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerdown", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** All that was shown is void.  Both: per KV group. */
  begin(numBlocks, blockSizes) {
    this.groups = numBlocks.map((count) => ({
      blocks: Array.from({ length: count }, () => ({ owner: -1, numOwners: 0, isCached: 0 })),
      top: 0,
    }));
    this.blockSizes = blockSizes;
    this.numOwned = this.numShared = this.numCached = 0;
    this.fresh.clear();
    this.isStale = true;
    this.point(null);
  }

  get counts() {
    return this.groups.map(({ blocks }) => blocks.length);
  }

  get numFree() {
    return this.counts.reduce((sum, count) => sum + count, 0) - this.numOwned - this.numCached;
  }

  change(changes, now) {
    for (const [group, list] of changes.entries()) {
      for (const [id, owner, numOwners, isCached] of list) {
        const block = this.groups[group].blocks[id - 1]; // 0 is the workers' own
        const place = `${group}:${id - 1}`;
        if (owner >= 0 && block.owner !== owner) this.fresh.set(place, now);
        this.count(block, -1);
        Object.assign(block, { owner, numOwners, isCached });
        this.count(block, 1);
        this.stale.add(place);
      }
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
      for (const [group, { blocks, top }] of this.groups.entries()) {
        pen.fillStyle = colours().faint;
        pen.font = "11px system-ui, sans-serif";
        const title = `KV group ${group}: blocks of ${this.blockSizes[group]} tokens`;
        if (titleOf(this.counts)) pen.fillText(title, 0, top - 7);
        for (let index = 0; index < blocks.length; index++) this.paint(pen, group, index, now);
      }
      this.isStale = false;
    } else {
      for (const place of this.fresh.keys()) this.stale.add(place);
      for (const place of this.stale) this.paint(pen, ...place.split(":").map(Number), now);
    }
    this.stale.clear();
    for (const [place, since] of this.fresh) if (now - since > GLOW) this.fresh.delete(place);
  }

  /** The canvas is as tall as its place, or taller if cells would become too small. */
  fitHeight() {
    const stage = this.canvas.parentElement;
    const { clientWidth: width } = stage;
    const wanted = heightOf(this.counts, width, Math.max(1, Math.floor(width / COMFORTABLE)));
    stage.style.height = NARROW.matches ? `${Math.min(MOST_TALL, Math.max(40, Math.ceil(wanted)))}px` : "";
    const needed = () => heightOf(this.counts, stage.clientWidth, columnsFor(this.counts, stage.clientWidth, stage.clientHeight));
    this.canvas.style.height = "";
    if (needed() <= stage.clientHeight) return;
    this.canvas.style.height = `${Math.ceil(needed())}px`;
    this.canvas.style.height = `${Math.ceil(needed())}px`; // the bar that scrolls has made its place narrower
  }

  arrange(width, height) {
    this.columns = columnsFor(this.counts, width, height);
    this.size = sizeOf(width, this.columns);
    let top = 0;
    for (const group of this.groups) {
      group.top = top + titleOf(this.counts);
      top = group.top + Math.ceil(group.blocks.length / this.columns) * this.size;
    }
  }

  /** Cells end at whole pixels, so that none is blurred. */
  cell(group, index) {
    const snap = (value) => Math.round(value * devicePixelRatio) / devicePixelRatio;
    const [column, row] = [index % this.columns, Math.floor(index / this.columns)];
    const { top } = this.groups[group];
    const x = snap(column * this.size), y = snap(top + row * this.size);
    return { x, y, w: snap((column + 1) * this.size) - x, h: snap(top + (row + 1) * this.size) - y };
  }

  paint(pen, group, index, now) {
    const block = this.groups[group].blocks[index];
    const { x, y, w, h } = this.cell(group, index);
    const gap = this.size > 24 ? 5 : this.size > 11 ? 3 : this.size > 7 ? 2 : 1;
    const isDim = this.highlighted !== null && block.owner !== this.highlighted;
    const age = now - (this.fresh.get(`${group}:${index}`) ?? -Infinity);
    const lift = age < GLOW ? 0.2 * (1 - age / GLOW) : 0;
    pen.clearRect(x, y, w, h);
    paintBlock(pen, block, { x, y, w: w - gap, h: h - gap }, isDim ? 0.25 : 1, lift);
    if (this.cursor?.group !== group || this.cursor.index !== index) return;
    pen.strokeStyle = colours().ink;
    pen.strokeRect(x + 0.5, y + 0.5, w - gap - 1, h - gap - 1);
  }

  /** The block below a pointer. */
  at({ offsetX: x, offsetY: y }) {
    const group = this.groups.findLastIndex(({ top }) => y >= top);
    if (group < 0 || x >= this.columns * this.size) return null;
    const index = Math.floor((y - this.groups[group].top) / this.size) * this.columns + Math.floor(x / this.size);
    return index < this.groups[group].blocks.length ? { group, index } : null;
  }

  move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (!(event.key in steps) || !this.groups.length) return;
    event.preventDefault();
    const { group, index } = this.cursor ?? { group: 0, index: -steps[event.key] };
    const next = index + steps[event.key];
    if (this.groups[group].blocks[next]) this.point({ group, index: next });
  }

  /** Say what is known of a block; null: of none. */
  point(place) {
    for (const each of [this.cursor, place]) if (each) this.stale.add(`${each.group}:${each.index}`);
    this.cursor = place;
    this.tip.textContent = place ? this.words(place) : this.caption;
    const owner = place ? this.groups[place.group].blocks[place.index].owner : -1;
    const seqId = owner >= 0 ? owner : null;
    if (seqId !== this.hovered) this.onHover(seqId);
    this.hovered = seqId;
  }

  words({ group, index }) {
    const { owner, numOwners, isCached } = this.groups[group].blocks[index];
    const where = `${this.groups.length > 1 ? `KV group ${group}, ` : ""}block ${number(index + 1)}`;
    if (numOwners > 1) return `${where}: shared by ${number(numOwners)} requests, #${owner} the first`;
    return `${where}: ${owner >= 0 ? `request #${owner}` : isCached ? "cached, free to take" : "free"}`;
  }

  get caption() {
    if (!this.groups.length) return "Not known.";
    const sizes = [...new Set(this.blockSizes)].join(" or ");
    return `Each cell is a block with the keys and values of ${sizes} tokens.`;
  }
}
