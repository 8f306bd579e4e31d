// What the canvases share: sharp pixels, the page's colours, and one colour for each sequence.

const GOLDEN = 137.508; // degrees: neighbours look unlike

let palette = null;

/** The page's colours, as they are now. */
export function colours() {
  if (palette === null) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    palette = Object.fromEntries(["card", "ink", "soft", "faint", "line", "cell", "rest", "accent"].map((n) => [n, read(n)]));
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
