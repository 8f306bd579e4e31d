// Every KV block as a square.  Only those that changed are painted, so there may be tens of thousands.

import { colourOf, colours, fit } from "./paint.js";

const LARGEST = 34, SMALLEST = 2; // pixels from a square to the next
const GLOW = 500; // milliseconds in which a block that was taken is lighter
const TITLE = 20; // pixels above each of several KV groups

export class Blocks {
  constructor(canvas, tip, onHover) {
    this.canvas = canvas;
    this.tip = tip;
    this.onHover = onHover;
    this.groups = []; // {blocks: [{owner, numOwners, isCached}], top, size}
    this.fresh = new Map(); // a block's place: when it was taken
    this.stale = new Set(); // places to paint
    this.highlighted = null; // a sequence
    this.isStale = true; // all of it
    canvas.addEventListener("mousemove", (event) => this.hover(event));
    canvas.addEventListener("mouseleave", () => this.leave());
  }

  begin(numBlocks) {
    this.groups = numBlocks.map((count) => ({
      blocks: Array.from({ length: count }, () => ({ owner: -1, numOwners: 0, isCached: false })),
    }));
    this.fresh.clear();
    this.isStale = true;
  }

  change(changes, now) {
    for (const [group, list] of changes.entries()) {
      for (const [id, owner, numOwners, isCached] of list) {
        const block = this.groups[group].blocks[id - 1]; // 0 is the workers' own
        const place = `${group}:${id - 1}`;
        if (owner >= 0 && block.owner !== owner) this.fresh.set(place, now);
        const last = owner < 0 && isCached ? (block.owner < 0 ? block.last : block.owner) : undefined;
        Object.assign(block, { owner, numOwners, isCached, last });
        this.stale.add(place);
      }
    }
  }

  highlight(seqId) {
    if (this.highlighted === seqId) return;
    this.highlighted = seqId;
    this.isStale = true;
  }

  draw(now) {
    const { pen, width, height, isNew } = fit(this.canvas);
    if (isNew || this.isStale) {
      this.arrange(width, height);
      pen.clearRect(0, 0, width, height);
      for (const [group, { blocks, top }] of this.groups.entries()) {
        pen.fillStyle = colours().faint;
        pen.font = "11px system-ui, sans-serif";
        if (this.title) pen.fillText(`KV group ${group}`, 0, top - 7);
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

  /** The largest squares with which all groups fit. */
  arrange(width, height) {
    for (this.size = LARGEST; this.size > SMALLEST; this.size--) {
      if (this.heights(width).reduce((sum, each) => sum + each, 0) <= height) break;
    }
    let top = 0;
    for (const [group, tall] of this.heights(width).entries()) {
      this.groups[group].top = top;
      this.groups[group].top += this.title;
      top += tall;
    }
  }

  heights(width) {
    this.columns = Math.floor(width / this.size);
    return this.groups.map(({ blocks }) => Math.ceil(blocks.length / this.columns) * this.size + this.title);
  }

  get title() {
    return this.groups.length > 1 ? TITLE : 0;
  }

  paint(pen, group, index, now) {
    const { blocks, top } = this.groups[group];
    const block = blocks[index];
    const side = this.size - (this.size > 24 ? 5 : this.size > 11 ? 3 : this.size > 7 ? 2 : this.size > 3 ? 1 : 0);
    const x = (index % this.columns) * this.size;
    const y = top + Math.floor(index / this.columns) * this.size;
    pen.clearRect(x, y, this.size, this.size);
    pen.fillStyle = this.colour(block, now - (this.fresh.get(`${group}:${index}`) ?? -Infinity));
    pen.beginPath();
    pen.roundRect(x, y, side, side, side > 6 ? side / 4.5 : 0);
    pen.fill();
    if (block.numOwners > 1) {
      const inner = Math.max(1, Math.round(side * 0.34));
      pen.fillStyle = colours().card;
      pen.beginPath();
      pen.roundRect(x + (side - inner) / 2, y + (side - inner) / 2, inner, inner, inner / 3);
      pen.fill();
    }
  }

  colour({ owner, isCached, last }, age) {
    const isDim = this.highlighted !== null && owner !== this.highlighted;
    if (owner >= 0) return colourOf(owner, isDim ? 0.25 : 1, age < GLOW ? 0.2 * (1 - age / GLOW) : 0);
    if (!isCached) return colours().cell;
    return last === undefined ? colours().rest : colourOf(last, isDim ? 0.14 : 0.26);
  }

  hover(event) {
    const { offsetX: x, offsetY: y } = event;
    const group = this.groups.findLastIndex(({ top }) => y >= top);
    if (group < 0) return;
    const index = Math.floor((y - this.groups[group].top) / this.size) * this.columns + Math.floor(x / this.size);
    const block = x < this.columns * this.size ? this.groups[group].blocks[index] : undefined;
    if (!block) return this.leave();
    const where = this.groups.length > 1 ? `group ${group}, block ${index + 1}` : `block ${index + 1}`;
    const { owner, numOwners, isCached } = block;
    const who = numOwners > 1 ? `shared by ${numOwners} requests` : owner >= 0 ? `request #${owner}` : isCached ? "cached" : "free";
    this.tip.textContent = `${where}: ${who}`;
    this.onHover(owner >= 0 ? owner : null);
  }

  leave() {
    this.tip.textContent = "\u00a0";
    this.onHover(null);
  }
}
