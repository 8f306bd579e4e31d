// The X-ray: follows /xray while somebody looks, and draws what it tells.  Without a link nothing is known.

import { KEY_CHANGED, findFault, openSocket, setKey, wordsOf } from "./api.js";
import { Film, picturesOf } from "./film.js";
import { KvPages } from "./kv_pages.js";
import { Area, Dots } from "./charts.js";
import { Record, UNKNOWN, figuresOf, number, time, wordsOfAdapter, wordsOfEngine } from "./figures.js";
import { LifePage, Lives } from "./lives.js";
import { Load } from "./load.js";
import { forgetColours, paintLegends } from "./paint.js";
import { Requests } from "./requests.js";
import { Steps } from "./steps.js";

const RETRY = 1000; // milliseconds before a lost link is sought again
const SILENCE = 5; // seconds without a word, after which the server is asked whether it lives
const QUIET = 2; // seconds without a word while requests run, after which that is said
const MOST_ADAPTERS = 24; // that are named
const OPTIONAL = new Set(["host", "disk", "tierHits"]); // tiles that are there where an engine has such tiers
const DIED = 1011, FULL = 1013; // why the server closes the link
const REFUSAL = "The server answers, but refuses to be watched from this address: --allowed-origins names those that may.";

const $ = (id) => document.getElementById(id);
/** Views of four numbers each. */
const views = (flat) => Array.from({ length: flat.length / 4 }, (_, i) => flat.slice(4 * i, 4 * i + 4));
const clock = () => performance.now() / 1000;

export class XRay {
  constructor() {
    this.isWatched = false;
    this.socket = null;
    this.retry = 0; // a timer
    this.engine = 0; // whose picture is shown
    this.death = ""; // what was said of the engine's
    this.film = null; // that is shown instead of an engine
    this.filmWords = "";
    const hover = (seqId) => this.highlight(seqId);
    this.life = new LifePage($("life"));
    this.requests = new Requests($("requests"), $("requests-rest"), hover, (seqId) => this.life.open(seqId));
    this.steps = new Steps($("steps"), $("step-tip"));
    this.pages = new KvPages($("pages"), $("page-tip"), hover);
    this.rateChart = new Area($("rate-chart"));
    this.ttftChart = new Dots($("ttft-chart"));
    this.load = new Load($("load"), $("stop-load"), (error) => ($("load-fault").textContent = wordsOf(error)));
    $("load").addEventListener("click", () => ($("load-fault").textContent = ""));
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      setKey($("xray-key").value.trim());
    });
    $("open-trace").addEventListener("click", () => (this.film ? this.endFilm() : $("trace-file").click()));
    $("trace-file").addEventListener("change", () => this.play($("trace-file").files[0]));
    document.addEventListener(KEY_CHANGED, () => this.isWatched && this.connect());
    this.forget();
  }

  /** Open or close the link: the engine is not looked at for nobody. */
  setWatched(isWatched) {
    if (this.isWatched === isWatched) return;
    this.isWatched = isWatched;
    if (isWatched) {
      paintLegends();
      this.connect();
      this.lastDraw = clock();
      requestAnimationFrame(() => this.draw());
    } else {
      this.stopFilm();
      this.disconnect();
      this.say("off", "off");
    }
  }

  repaint() {
    forgetColours();
    paintLegends();
    this.pages.isStale = this.steps.isStale = true;
    this.requests.repaint();
  }

  // The link

  disconnect() {
    clearTimeout(this.retry);
    const { socket } = this;
    this.socket = null; // so that nobody listens to its end
    socket?.close();
    this.forget();
  }

  connect() {
    this.disconnect();
    const socket = (this.socket = openSocket("xray", "pellucid.xray"));
    if ($("notice").hidden) this.say("off", "connecting");
    socket.addEventListener("message", (event) => socket === this.socket && this.take(JSON.parse(event.data)));
    socket.addEventListener("close", (end) => socket === this.socket && this.lose(end));
  }

  /** The link has ended: say why, and seek it again. */
  async lose({ code, reason }) {
    this.disconnect();
    if (code === DIED) this.complain({ state: "dead", text: `The engine has died: ${reason}.` });
    else if (code === FULL) this.complain({ state: "lost", text: `The server says: ${reason}.` });
    else this.complain((await findFault()) ?? { state: "lost", text: REFUSAL });
  }

  /** Whoever has been silent for long may be gone without a word. */
  async check() {
    const { socket } = this;
    this.checked = clock();
    const fault = await findFault();
    if (fault === null || socket !== this.socket) return;
    this.disconnect();
    this.complain(fault);
  }

  /** Nothing is known: say so, and why, until there is a link again. */
  complain({ state, text }) {
    if (!this.isWatched || this.socket || this.film) return;
    this.retry = setTimeout(() => this.connect(), RETRY);
    if (state === "dead") this.death = text; // still worth a word when the server has ended, too
    const words = state === "lost" && this.death ? `${this.death} ${text}` : text;
    this.say(state, { key: "key needed", dead: "dead", lost: "no link" }[state]);
    set($("notice-text"), state === "key" ? words : `${words} Nothing is known of it now; trying again.`);
    $("key-form").hidden = state !== "key";
    $("notice").hidden = false;
  }

  say(state, text) {
    $("link").dataset.state = state;
    $("link").textContent = text;
    $("notice").hidden = state === "live" || state === "off";
  }

  // A film in its stead

  async play(file) {
    $("trace-file").value = ""; // so that the same file may be chosen again
    if (!file) return;
    const pictures = picturesOf(await file.text());
    this.stopFilm();
    $("load-fault").textContent = pictures.length ? "" : `${file.name} has no pictures: it is no file of --trace-steps.`;
    if (!pictures.length) return;
    this.disconnect();
    this.engine = 0;
    this.filmWords = `playing ${file.name}`;
    $("open-trace").textContent = "Back to the engine";
    const end = () => (this.filmWords = `${file.name}, to its end`);
    this.film = new Film(pictures, (sight) => this.take(sight), end);
  }

  endFilm() {
    this.stopFilm();
    this.connect();
  }

  stopFilm() {
    this.film?.stop();
    this.film = null;
    $("open-trace").textContent = "Open a trace";
  }

  // What it tells

  forget() {
    this.record = new Record();
    this.heard = []; // of each engine, its newest statistics
    this.adapters = [];
    this.lives = new Lives();
    this.told = this.checked = 0; // seconds here, when figures were last drawn, and the server last asked
    this.rateChart.forget();
    this.ttftChart.forget();
    this.pages.begin(0, 0);
    this.steps.begin();
    this.requests.begin();
    this.tell();
  }

  take({ engine, num_engines: numEngines, stats, requests, frame }) {
    const now = clock();
    this.offerEngines(numEngines);
    this.heard[engine] = stats;
    this.adapters = requests.adapters ?? []; // none in a trace
    this.record.hear(requests, numEngines, now);
    for (const [, whole] of requests.waits) this.ttftChart.add(now, whole);
    // A frame that was under way when this link began tells of changes to what is not known here.
    if (engine !== this.engine || !(frame.is_first || this.record.frame)) return;
    if (frame.is_first) {
      this.pages.begin(frame.num_pages, frame.block_size);
      this.steps.begin();
    }
    this.record.take(frame, stats, now);
    this.pages.change(views(frame.pages), performance.now());
    const steps = frame.steps.map(([id, rows, numRows, seconds]) => ({ id, rows: views(rows), numRows, seconds }));
    this.steps.add(steps);
    this.lives.take(frame, steps);
    this.requests.update(frame);
    if (!frame.running.some(([id]) => id === this.pages.highlighted)) this.highlight(null);
    if (!frame.is_first) return;
    this.death = "";
    this.tell();
  }

  /** Write all figures, or that they are not known. */
  tell() {
    const now = clock();
    const figures = figuresOf(this.record, this.pages.numCached, now);
    for (const tile of document.querySelectorAll(".tile")) {
      const [figure, remark] = figures?.[tile.dataset.figure] ?? [UNKNOWN, "not known"];
      set(tile.querySelector("b"), figure);
      set(tile.querySelector("small"), remark);
      if (OPTIONAL.has(tile.dataset.figure)) tile.hidden = !figures?.[tile.dataset.figure];
    }
    for (const [index, button] of [...$("engines").children].entries()) set(button, wordsOfEngine(index, this.heard[index]));
    this.tellAdapters();
    const { numOwned, numShared, numCached, numFree } = this.pages;
    const counts = { owned: numOwned - numShared, shared: numShared, cached: numCached, free: numFree };
    for (const [name, count] of Object.entries(counts)) set($(`num-${name}`), figures ? number(count) : UNKNOWN);
    this.steps.tell(this.record.steps(now));
    if (figures) this.say("live", this.film ? this.filmWords : this.pulse(now));
  }

  tellAdapters() {
    const words = this.adapters.slice(0, MOST_ADAPTERS).map(wordsOfAdapter);
    const rest = this.adapters.length - words.length;
    if (rest > 0) words.push(`and ${number(rest)} more`);
    $("adapters").hidden = words.length === 0;
    const list = $("adapters").querySelector("ul");
    while (list.children.length > words.length) list.lastChild.remove();
    while (list.children.length < words.length) list.append(document.createElement("li"));
    for (const [index, each] of words.entries()) set(list.children[index], each);
  }

  pulse(now) {
    const silence = this.record.silence(now);
    return silence > QUIET && this.record.frame.num_running ? `live, but nothing heard for ${time(Math.floor(silence))}` : "live";
  }

  draw() {
    if (!this.isWatched) return;
    const now = clock();
    if (now - this.told > 0.1) {
      this.told = now;
      const rate = this.record.rate(now);
      if (rate !== null) this.rateChart.add(now, rate);
      this.tell();
    }
    if (this.record.frame && !this.film && now - Math.max(this.checked, this.record.totals.at(-1).at) > SILENCE) this.check();
    this.rateChart.draw(now);
    this.ttftChart.draw(now);
    this.pages.draw(performance.now());
    this.steps.draw(now - this.lastDraw);
    this.life.draw(this.lives);
    this.lastDraw = now;
    requestAnimationFrame(() => this.draw());
  }

  highlight(seqId) {
    this.pages.highlight(seqId);
    this.steps.highlight(seqId);
  }

  offerEngines(count) {
    if ($("engines").children.length === (count > 1 ? count : 0)) return;
    const buttons = Array.from({ length: count > 1 ? count : 0 }, (_, index) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: wordsOfEngine(index) });
      button.addEventListener("click", () => this.choose(index));
      return button;
    });
    $("engines").replaceChildren(...buttons);
    this.markEngine();
  }

  choose(index) {
    this.engine = index;
    this.markEngine();
    this.connect(); // the next link begins with the whole picture
  }

  markEngine() {
    for (const [index, button] of [...$("engines").children].entries()) {
      button.setAttribute("aria-pressed", String(index === this.engine));
    }
  }
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
