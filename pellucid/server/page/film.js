// A trace of steps, played: the pictures that an engine has left in a file, as far apart as they were taken.

const LONGEST = 2; // seconds that a picture stays at most: an engine at rest is no film

/** The pictures of a file, in order; none, if it is no trace. */
export function picturesOf(text) {
  const pictures = [];
  for (const line of text.split("\n")) {
    if (!line.startsWith('{"kind":"picture"')) continue;
    try {
      pictures.push(JSON.parse(line).sight);
    } catch {
      break; // the last line, cut off
    }
  }
  return pictures;
}

export class Film {
  /** show: takes one picture; end: is told when there are no more. */
  constructor(pictures, show, end) {
    this.pictures = pictures;
    this.show = show;
    this.end = end;
    this.next = 0;
    this.timer = 0;
    this.play();
  }

  play() {
    const sight = this.pictures[this.next++];
    this.show(sight);
    const after = this.pictures[this.next];
    if (!after) return this.end();
    const seconds = Math.min(LONGEST, Math.max(0, after.frame.seconds - sight.frame.seconds));
    this.timer = setTimeout(() => this.play(), 1000 * seconds);
  }

  stop() {
    clearTimeout(this.timer);
  }
}
