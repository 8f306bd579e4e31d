// The list of requests: a bar each, from the cached beginning of the prompt to the newest token.

import { number, plural } from "./figures.js";
import { PARTS, colourOf } from "./paint.js";

const TALL = 25; // pixels of a row
const NARROW = matchMedia("(max-width: 1080px)"); // there the list is as long as it needs to be
const FEW = 8; // rows, there

/** What is cut off, in words; null: nothing.  Of those that run and those that wait, the shown ones come first. */
export function wordsOfRest(numRunning, numWaiting, numShown) {
  const running = Math.max(0, numRunning - numShown);
  const waiting = numWaiting - Math.max(0, numShown - numRunning);
  if (running + waiting <= 0) return null;
  const parts = [running && `${number(running)} running`, waiting && `${number(waiting)} waiting`];
  return `${number(running + waiting)} more: ${parts.filter(Boolean).join(", ")}`;
}

export class Requests {
  /** node: holds the rows; foot: says what is cut off, and shows it when it is pressed. */
  constructor(node, foot, onHover, onPress) {
    this.node = node;
    this.foot = foot;
    this.onHover = onHover;
    this.onPress = onPress;
    this.rows = new Map(); // by sequence
    this.longest = 64; // tokens of the longest bar
    this.end = Object.assign(document.createElement("p"), { className: "empty" });
    node.append(this.end);
    node.addEventListener("pointerleave", () => onHover(null));
    node.addEventListener("focusout", () => onHover(null));
    foot.addEventListener("click", () => this.expand(!this.isExpanded));
    this.expand(false);
    this.begin();
  }

  /** All that was shown is void, and nothing is known. */
  begin() {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.frame = null;
    this.end.hidden = false;
    this.end.textContent = "Not known.";
    this.foot.hidden = true;
  }

  expand(isExpanded) {
    this.isExpanded = isExpanded;
    this.node.classList.toggle("expanded", isExpanded);
    this.foot.setAttribute("aria-expanded", String(isExpanded));
    if (this.frame) this.update(this.frame);
  }

  update(frame) {
    this.frame = frame;
    const { running, waiting, num_running: numRunning, num_waiting: numWaiting } = frame;
    const known = [...running.map((seq) => [seq, true]), ...waiting.map((seq) => [seq, false])];
    const shown = known.slice(0, this.isExpanded ? known.length : this.numFitting);
    const longest = Math.max(64, ...shown.map(([[, , promptLen, numTokens]]) => Math.max(promptLen, numTokens)));
    this.longest += (longest - this.longest) * (longest > this.longest ? 1 : 0.1);
    this.drop(new Set(shown.map(([[id]]) => id)));
    for (const [seq, isRunning] of shown) this.set(seq, isRunning);
    this.end.hidden = shown.length > 0;
    this.end.textContent = "Nothing runs and nothing waits.";
    const rest = wordsOfRest(numRunning, numWaiting, shown.length);
    this.foot.hidden = rest === null && !this.isExpanded;
    this.foot.textContent = [rest, this.isExpanded ? "show fewer" : null].filter(Boolean).join(" · ");
  }

  get numFitting() {
    return NARROW.matches ? FEW : Math.max(1, Math.floor(this.node.clientHeight / TALL));
  }

  drop(kept) {
    for (const [id, row] of this.rows) {
      if (kept.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
  }

  set([id, , promptLen, numTokens, numComputed, numCached], isRunning) {
    const row = this.rows.get(id) ?? this.make(id);
    row.classList.toggle("waits", !isRunning);
    const [cached, prompt, fresh] = row.querySelectorAll(".track i");
    const computed = Math.min(promptLen, Math.max(numComputed, numCached));
    this.span(cached, 0, isRunning ? numCached : 0);
    this.span(prompt, isRunning ? numCached : 0, isRunning ? computed : 0);
    this.span(fresh, promptLen, numTokens);
    const numNew = numTokens - promptLen;
    const isPrefill = computed < promptLen && !numNew;
    const amount = row.querySelector(".amount");
    if (!isRunning) amount.textContent = `${number(promptLen)} waiting`;
    else if (isPrefill) amount.textContent = `${Math.floor((100 * computed) / promptLen)}% of ${number(promptLen)}`;
    else amount.textContent = `${number(promptLen)} + ${number(numNew)}`;
    row.title = `request #${id}: prompt of ${plural(promptLen, "token")}, ${number(numCached)} cached, ${number(numNew)} generated`;
  }

  span(node, from, to) {
    node.style.left = `${(100 * from) / this.longest}%`;
    node.style.width = `${(100 * (to - from)) / this.longest}%`;
  }

  make(id) {
    const row = document.createElement("div");
    row.className = "request";
    row.tabIndex = 0;
    row.setAttribute("role", "button");
    row.innerHTML =
      '<span class="chip"></span><span class="name"></span><span class="track"><i></i><i></i><i></i></span><span class="amount"></span>';
    row.querySelector(".name").textContent = `#${id}`;
    row.addEventListener("pointerenter", () => this.onHover(id));
    row.addEventListener("focus", () => this.onHover(id));
    row.addEventListener("click", () => this.onPress(id));
    row.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.onPress(id);
    });
    this.rows.set(id, row);
    this.end.before(row);
    this.colour(row, id);
    return row;
  }

  colour(row, id) {
    row.querySelector(".chip").style.background = colourOf(id);
    for (const [index, part] of row.querySelectorAll(".track i").entries()) {
      part.style.background = colourOf(id, Object.values(PARTS)[index]);
    }
  }

  repaint() {
    for (const [id, row] of this.rows) this.colour(row, id);
  }
}
