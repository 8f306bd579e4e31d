// The X-ray: follows /xray while somebody looks, and draws what it tells.

import { call, openSocket } from "./api.js";
import { Blocks } from "./blocks.js";
import { Area, Dots } from "./charts.js";
import { forgetColours } from "./paint.js";
import { Requests } from "./requests.js";
import { Steps } from "./steps.js";

const RETRY = 1000; // milliseconds before a lost link is sought again
const SILENCE = 1; // seconds without a frame: nothing happens
const WINDOW = 1, SHORTEST = 0.2; // seconds over which tokens are counted, at most and at least
const NUM_QUESTIONS = 4, NUM_ANSWERS = 4; // a browser holds few connections to one host
const NUM_LOAD = NUM_QUESTIONS * NUM_ANSWERS;
const BRIEFING = "You are a careful assistant. Read the question twice, think in small steps, check every step, " +
  "and then answer in one short sentence. If you do not know the answer, say so.";

const $ = (id) => document.getElementById(id);
const number = (n, digits = 0) => n.toLocaleString("en", { maximumFractionDigits: digits });
const percent = (part, whole) => (whole ? `${number((100 * part) / whole)}%` : "–");
/** Views of four numbers each. */
const views = (flat) => Array.from({ length: flat.length / 4 }, (_, i) => flat.slice(4 * i, 4 * i + 4));
const clock = () => performance.now() / 1000;

export class XRay {
  constructor() {
    this.isWatched = false;
    this.socket = null;
    this.engine = 0; // whose picture is shown
    this.numLoad = 0; // requests of ours under way
    const hover = (seqId) => this.highlight(seqId);
    this.blocks = new Blocks($("blocks"), $("block-tip"), hover);
    this.requests = new Requests($("requests"), hover);
    this.steps = new Steps($("steps"), $("step-tip"));
    this.rateChart = new Area($("rate-chart"));
    this.ttftChart = new Dots($("ttft-chart"));
    this.forget();
    $("load").addEventListener("click", () => this.makeLoad());
  }

  /** Open or close the link: the engine is not looked at for nobody. */
  setWatched(isWatched) {
    if (this.isWatched === isWatched) return;
    this.isWatched = isWatched;
    if (isWatched) {
      this.connect();
      this.lastDraw = clock();
      requestAnimationFrame(() => this.draw());
    } else {
      this.socket?.close();
      this.socket = null;
      this.say("off", "off");
    }
  }

  repaint() {
    forgetColours();
    this.blocks.isStale = this.steps.isStale = true;
    this.requests.repaint();
  }

  connect() {
    if (!this.isWatched) return;
    this.forget();
    const socket = (this.socket = openSocket("xray", "pellucid.xray"));
    this.say("off", "connecting");
    socket.addEventListener("message", (event) => socket === this.socket && this.take(JSON.parse(event.data)));
    socket.addEventListener("close", ({ reason }) => {
      if (socket !== this.socket) return;
      this.say("lost", `${reason || "no link"}; trying again`);
      setTimeout(() => this.connect(), RETRY);
    });
  }

  say(state, text) {
    $("link").dataset.state = state;
    $("link").textContent = text;
  }

  forget() {
    this.counts = []; // [seconds here, tokens sampled so far]
    this.waits = []; // seconds to the first token, of the last requests
    this.heard = null; // seconds here, of the last frame
    this.told = 0; // seconds here, when the rate was last drawn
  }

  take(sight) {
    this.offerEngines(sight.num_engines);
    for (const wait of sight.first_tokens) this.noteWait(wait);
    if (sight.engine !== this.engine) return;
    const { frame, stats } = sight;
    const now = clock();
    this.say("live", "live");
    if (frame.is_first) {
      this.forget();
      this.blocks.begin(frame.num_blocks);
      this.steps.begin();
      this.requests.begin();
    }
    this.heard = now;
    this.counts.push([now, stats.num_sampled_tokens]);
    this.blocks.change(frame.blocks.map(views), performance.now());
    this.steps.add(frame.steps.map(([id, rows]) => ({ id, rows: views(rows) })));
    this.requests.update(frame);
    if (!frame.running.some(([id]) => id === this.blocks.highlighted)) this.highlight(null);
    this.tell(frame, stats);
  }

  noteWait(wait) {
    this.waits.push(wait);
    this.waits.splice(0, this.waits.length - 50);
    this.ttftChart.add(clock(), wait);
    const sorted = [...this.waits].sort((a, b) => a - b);
    const median = sorted[sorted.length >> 1];
    $("ttft").textContent = median < 1 ? `${number(1000 * median, median < 0.1 ? 1 : 0)} ms` : `${number(median, 2)} s`;
  }

  tell(frame, stats) {
    const numBlocks = frame.num_blocks[0];
    $("counts").textContent = number(frame.num_running);
    $("counts-more").textContent = frame.num_waiting ? `${number(frame.num_waiting)} wait` : "none waits";
    $("usage").textContent = `${number(100 * stats.kv_usage, stats.kv_usage < 0.1 ? 1 : 0)}%`;
    $("usage-more").textContent = `${number(numBlocks)} blocks of ${frame.block_size[0]} tokens`;
    $("hits").textContent = percent(stats.num_cached_tokens, stats.num_prompt_tokens);
    $("hits-more").textContent = `of ${number(stats.num_prompt_tokens)} tokens`;
    $("accepted").textContent = percent(stats.num_accepted_tokens, stats.num_draft_tokens);
    $("accepted-more").textContent = stats.num_draft_tokens ? `of ${number(stats.num_draft_tokens)}` : "no drafts";
  }

  /** Tokens a second over the last window; silence is none, and null is not known yet. */
  get rate() {
    const now = clock();
    while (this.counts.length > 2 && this.counts[1][0] < now - WINDOW) this.counts.shift();
    if (this.heard === null) return null;
    if (now - this.heard > SILENCE) return 0;
    const [[since, before], [until, after]] = [this.counts[0], this.counts.at(-1)];
    return until - since < SHORTEST ? null : (after - before) / (until - since);
  }

  draw() {
    if (!this.isWatched) return;
    const now = clock();
    if (now - this.told > 0.1) {
      this.told = now;
      const rate = this.rate;
      if (rate !== null) this.rateChart.add(now, rate);
      $("rate").textContent = rate === null ? "–" : number(rate);
    }
    this.rateChart.draw(now);
    this.ttftChart.draw(now);
    this.blocks.draw(performance.now());
    this.steps.draw(now - this.lastDraw);
    this.lastDraw = now;
    requestAnimationFrame(() => this.draw());
  }

  highlight(seqId) {
    this.blocks.highlight(seqId);
    this.steps.highlight(seqId);
  }

  offerEngines(count) {
    if ($("engines").children.length === (count > 1 ? count : 0)) return;
    const buttons = Array.from({ length: count > 1 ? count : 0 }, (_, index) => {
      const button = Object.assign(document.createElement("button"), { textContent: `engine ${index}` });
      button.addEventListener("click", () => this.choose(index));
      return button;
    });
    $("engines").replaceChildren(...buttons);
    this.markEngine();
  }

  choose(index) {
    this.engine = index;
    this.rateChart.points = [];
    this.markEngine();
    this.socket?.close(); // the next link begins with the whole picture
  }

  markEngine() {
    for (const [index, button] of [...$("engines").children].entries()) {
      button.setAttribute("aria-pressed", String(index === this.engine));
    }
  }

  /** Something to look at: questions that share a beginning, each answered several times. */
  makeLoad() {
    for (let i = 0; i < NUM_QUESTIONS; i++) {
      const terms = Array.from({ length: 4 + 6 * i }, () => Math.floor(100 * Math.random()));
      const messages = [
        { role: "system", content: BRIEFING },
        { role: "user", content: `What is ${terms.join(" + ")}?` },
      ];
      this.numLoad += NUM_ANSWERS;
      call("v1/chat/completions", { body: { messages, n: NUM_ANSWERS, max_tokens: 200 + 100 * i } })
        .catch((error) => this.say("lost", error.message))
        .finally(() => this.markLoad((this.numLoad -= NUM_ANSWERS)));
    }
    this.markLoad(this.numLoad);
  }

  markLoad(count) {
    $("load").textContent = count ? `${count} under way` : `Send ${NUM_LOAD} requests`;
    $("load").disabled = count > 0;
  }
}
