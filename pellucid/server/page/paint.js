// What the canvases share: sharp pixels, the page's colours, and how KV pages and rows look, in pictures and legends.

const GOLDEN = 137.508; // degrees: neighbours look unlike
const NAMES = ["card", "ink", "soft", "faint", "line", "cell", "rest", "accent"];

let palette = null;

/** The page's colours, as they are now. */
export function colours() {
  if (palette === null) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    palette = Object.fromEntries(NAMES.map((name) => [name, read(name)]));
    palette.lightness = Number(read("lightness"));
    palette.chroma = Number(read("chroma"));
  }
  return palette;
}

/** Light has become dark, or the reverse. */
export function forgetColours() {
  palette = null;
}

/** A sequence's colour.  lift: how much lighter than usual. */
export function colourOf(seqId, alpha = 1, lift = 0) {
  const { lightness, chroma } = colours();
  return `oklch(${lightness + lift} ${chroma} ${(195 + seqId * GOLDEN) % 360} / ${alpha})`;
}

/** Parts of a request's bar: how strong its colour is. */
export const PARTS = { cached: 0.28, prompt: 0.55, generated: 1 };

/** Fit a canvas to its place; returns its context in CSS pixels, and whether the size is new. */
export function fit(canvas) {
  const ratio = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const isNew = canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio);
  if (isNew) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { pen, width, height, isNew };
}

export function fillRounded(pen, x, y, w, h, radius) {
  pen.beginPath();
  pen.roundRect(x, y, w, h, radius);
  pen.fill();
}

/** A KV page: its owner's colour, with a hole if it has several; grey if it is cached, pale if it is free. */
export function paintPage(pen, { owner, numOwners, isCached }, { x, y, w, h }, alpha = 1, lift = 0) {
  const { cell, rest, card } = colours();
  const side = Math.min(w, h);
  pen.fillStyle = owner >= 0 ? colourOf(owner, alpha, lift) : isCached ? rest : cell;
  fillRounded(pen, x, y, w, h, side > 6 ? side / 4.5 : 0);
  if (numOwners < 2) return;
  const hole = Math.max(1, Math.round(side * 0.34));
  pen.fillStyle = card;
  fillRounded(pen, x + (w - hole) / 2, y + (h - hole) / 2, hole, hole, hole / 3);
}

/** A row of a step: full for a decode, an outline for a prompt's chunk, and side by side what is verified. */
export function paintRow(pen, [seqId, numQuery, numDraft, numNew], { x, y, w, h }, alpha = 1) {
  if (numDraft) paintVerification(pen, seqId, numQuery, numNew, { x, y, w, h }, alpha);
  else if (numQuery > 1) {
    const edge = Math.min(1.5, h / 4);
    pen.fillStyle = colourOf(seqId, alpha);
    pen.fillRect(x, y, w, h);
    pen.clearRect(x + edge, y + edge, w - 2 * edge, h - 2 * edge);
    pen.fillStyle = colourOf(seqId, 0.3 * alpha);
    pen.fillRect(x + edge, y + edge, w - 2 * edge, h - 2 * edge);
  } else {
    pen.fillStyle = colourOf(seqId, alpha);
    pen.fillRect(x, y, w, h);
  }
}

/** The token that a step yields anyway, then its drafts: lighter if they stood, and pale if not. */
function paintVerification(pen, seqId, numQuery, numNew, { x, y, w, h }, alpha) {
  const part = w / numQuery;
  for (let i = 0; i < numQuery; i++) {
    const isIn = i < numNew;
    pen.fillStyle = colourOf(seqId, isIn ? alpha : 0.22 * alpha, isIn && i ? 0.14 : 0);
    pen.fillRect(x + i * part, y, Math.max(0.6, part - (part > 2.5 ? 0.8 : 0)), h);
  }
}

const FREE = { owner: -1, numOwners: 0, isCached: 0 };
const SAMPLES = {
  // Several squares: each request has a colour of its own.
  owned: (pen) => [0, 1, 2].forEach((owner) => paintPage(pen, { ...FREE, owner }, { x: 13 * owner, y: 0, w: 11, h: 11 })),
  shared: (pen) => paintPage(pen, { ...FREE, owner: 0, numOwners: 2 }, { x: 0, y: 0, w: 11, h: 11 }),
  cached: (pen) => paintPage(pen, { ...FREE, isCached: 1 }, { x: 0, y: 0, w: 11, h: 11 }),
  free: (pen) => paintPage(pen, FREE, { x: 0, y: 0, w: 11, h: 11 }),
  chunk: (pen) => paintRow(pen, [0, 64, 0, 0], { x: 0, y: 1, w: 13, h: 9 }),
  decode: (pen) => paintRow(pen, [0, 1, 0, 1], { x: 0, y: 1, w: 13, h: 9 }),
  verified: (pen) => paintRow(pen, [0, 4, 3, 3], { x: 0, y: 1, w: 26, h: 9 }),
};

/** Paint the legends as the pictures are painted. */
export function paintLegends() {
  for (const canvas of document.querySelectorAll("canvas.swatch")) {
    const { pen, width, height } = fit(canvas);
    pen.clearRect(0, 0, width, height);
    SAMPLES[canvas.dataset.of](pen);
  }
  for (const part of document.querySelectorAll("i.swatch")) part.style.background = colourOf(0, PARTS[part.dataset.of]);
}
