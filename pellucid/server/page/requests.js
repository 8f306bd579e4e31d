// The list of requests: a bar each, from the cached beginning of the prompt to the newest token.

import { colourOf } from "./paint.js";

const MOST = 40; // rows that are shown

export class Requests {
  constructor(node, onHover) {
    this.node = node;
    this.onHover = onHover;
    this.rows = new Map(); // by sequence
    this.longest = 64; // tokens of the longest bar
    this.end = document.createElement("div");
    node.addEventListener("mouseleave", () => onHover(null));
    this.begin();
  }

  begin() {
    this.rows.clear();
    this.node.replaceChildren(this.end);
    this.update({ running: [], waiting: [], num_running: 0, num_waiting: 0 });
  }

  update({ running, waiting, num_running, num_waiting }) {
    const shown = [...running.map((seq) => [seq, true]), ...waiting.map((seq) => [seq, false])].slice(0, MOST);
    const longest = Math.max(64, ...shown.map(([[, , promptLen, numTokens]]) => Math.max(promptLen, numTokens)));
    this.longest += (longest - this.longest) * (longest > this.longest ? 1 : 0.1);
    const gone = new Set(this.rows.keys());
    for (const [seq, isRunning] of shown) {
      gone.delete(seq[0]);
      this.set(seq, isRunning);
    }
    for (const id of gone) {
      this.rows.get(id).remove();
      this.rows.delete(id);
    }
    const numMore = num_running + num_waiting - shown.length;
    this.end.className = shown.length ? "more" : "empty";
    this.end.textContent = shown.length ? (numMore > 0 ? `and ${numMore} more` : "") : "Nothing runs and nothing waits.";
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
    const amount = row.querySelector(".amount");
    if (!isRunning) amount.textContent = `${promptLen.toLocaleString("en")} wait`;
    else if (computed < promptLen && !numNew) amount.textContent = `${Math.floor((100 * computed) / promptLen)}% of ${promptLen.toLocaleString("en")}`;
    else amount.textContent = `${promptLen.toLocaleString("en")} + ${numNew.toLocaleString("en")}`;
  }

  span(node, from, to) {
    node.style.left = `${(100 * from) / this.longest}%`;
    node.style.width = `${(100 * (to - from)) / this.longest}%`;
  }

  make(id) {
    const row = document.createElement("div");
    row.className = "request";
    row.innerHTML =
      '<span class="chip"></span><span class="name"></span><span class="track"><i></i><i></i><i></i></span><span class="amount"></span>';
    row.querySelector(".name").textContent = `#${id}`;
    row.addEventListener("mouseenter", () => this.onHover(id));
    this.rows.set(id, row);
    this.end.before(row);
    this.colour(row, id);
    return row;
  }

  colour(row, id) {
    row.querySelector(".chip").style.background = colourOf(id);
    for (const [index, part] of row.querySelectorAll(".track i").entries()) {
      part.style.background = colourOf(id, [0.2, 0.45, 1][index]);
    }
  }

  repaint() {
    for (const [id, row] of this.rows) this.colour(row, id);
  }
}
