// What the X-ray's figures are, and how they are written.  What is not known is a dash.

export const UNKNOWN = "–";
const WINDOW = 1; // seconds over which what happens all the time is counted
const SHORTEST = 0.2; // seconds over which it is counted at least
const LONG = 5; // seconds of silence, after which nothing is known of an engine at work
const MOST_WAITS = 50; // the last requests, of whose times the median is shown

export const number = (n, digits = 0) => n.toLocaleString("en", { maximumFractionDigits: digits });
export const percent = (part, whole) => (whole ? `${number((100 * part) / whole, part < 0.1 * whole ? 1 : 0)}%` : UNKNOWN);
export const plural = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;

/** A time: "0.42 ms", "38 ms", "1.25 s". */
export function time(seconds) {
  if (seconds >= 0.9995) return `${number(seconds, seconds < 10 ? 2 : 1)} s`;
  const ms = 1000 * seconds;
  return `${number(ms, ms < 1 ? 2 : ms < 100 ? 1 : 0)} ms`;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** The end of an axis: the next number that can be halved and read, 4, 6, 8, 10, 20, 30, 40, 60, .. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 6, 8, 10].map((digit) => digit * power).find((end) => end >= value * (1 - 1e-9));
}

/** What has been heard of an engine, as far as figures need it.  Times are seconds of one clock. */
export class Record {
  constructor() {
    this.totals = []; // {at, stats, numDrawn, isAtRest} of the last window, and one before
    this.gaps = []; // {at, num, sum, longest} of the last window
    this.waits = []; // [in queue, whole] of the last requests
    this.numFailed = null;
    this.frame = null;
    this.numDrawn = 0; // steps that have come
    this.numEngines = 1;
  }

  /** What has become of the requests of all engines. */
  hear({ waits, gaps, num_failed: numFailed }, numEngines, now) {
    this.numEngines = numEngines;
    this.waits.push(...waits);
    this.waits.splice(0, this.waits.length - MOST_WAITS);
    this.numFailed = numFailed;
    if (gaps.num) this.gaps.push({ at: now, ...gaps });
  }

  /** Of the engine that is watched. */
  take(frame, stats, now) {
    this.frame = frame;
    this.numDrawn += frame.steps.length;
    const isAtRest = frame.num_running + frame.num_waiting === 0;
    this.totals.push({ at: now, stats, numDrawn: this.numDrawn, isAtRest });
  }

  get stats() {
    return this.totals.at(-1)?.stats ?? null;
  }

  /** Seconds since the last frame; null before the first. */
  silence(now) {
    return this.totals.length ? now - this.totals.at(-1).at : null;
  }

  /** When the window ends.  An engine at rest would tell of any change at once; one at work tells when it may. */
  end(now) {
    return this.totals.at(-1).isAtRest ? now : this.totals.at(-1).at;
  }

  // {seconds, before, after}: the last second, or what has passed between two frames if that is longer.
  // Null is not known: too little has been heard, or nothing for long of an engine at work.
  window(now) {
    if (!this.totals.length || (!this.totals.at(-1).isAtRest && this.silence(now) > LONG)) return null;
    const end = this.end(now);
    while (this.totals.length > 1 && this.totals[1].at <= end - WINDOW) this.totals.shift();
    const [before, after] = [this.totals[0], this.totals.at(-1)];
    const since = before.isAtRest ? Math.max(before.at, end - WINDOW) : before.at; // at rest nothing happened until then
    return end - since < SHORTEST ? null : { seconds: end - since, before, after };
  }

  /** Output tokens a second; null is not known. */
  rate(now) {
    const window = this.window(now);
    const tokens = ({ stats }) => stats.num_sampled_tokens;
    return window && (tokens(window.after) - tokens(window.before)) / window.seconds;
  }

  /** Steps of the window: {num, numDrawn, mean, host, device}, the last three in seconds; null if there were none. */
  steps(now) {
    const { before, after } = this.window(now) ?? {};
    const num = after ? after.stats.num_steps - before.stats.num_steps : 0;
    if (!num) return null;
    const mean = (part) => (after.stats[part] - before.stats[part]) / num;
    const [host, device] = [mean("host_seconds"), mean("wait_seconds")]; // what the host does, and waits for the device
    return { num, numDrawn: after.numDrawn - before.numDrawn, mean: host + device, host, device };
  }

  /** Between two tokens of the window's streams: {mean, longest} in seconds; null if there were none. */
  gap(now) {
    const window = this.window(now);
    if (window === null) return null;
    while (this.gaps.length && this.gaps[0].at < this.end(now) - window.seconds) this.gaps.shift();
    const sum = (part) => this.gaps.reduce((total, each) => total + each[part], 0);
    return this.gaps.length ? { mean: sum("sum") / sum("num"), longest: Math.max(...this.gaps.map(({ longest }) => longest)) } : null;
  }

  /** The window in words. */
  span(now) {
    const { seconds } = this.window(now) ?? { seconds: WINDOW };
    return seconds > 1.5 * WINDOW ? `the last ${time(seconds)}` : "the last second";
  }
}

/** What drafts have saved, or cost. */
function balance(seconds) {
  return `${seconds < 0 ? "cost" : "saved"} ${time(Math.abs(seconds))}`;
}

/** Since start: what drafts, how many stood at which place, how many were chosen, and what that has saved. */
function wordsOfDrafts(stats) {
  if (!stats.num_drafts) return "no drafts since start";
  const mean = (num) => (num / stats.num_drafts).toFixed(2);
  const shares = stats.num_accepted_per_position.map((num) => percent(num, stats.num_drafts));
  while (shares.length > 1 && shares.at(-1) === percent(0, 1)) shares.pop();
  const chosen = `${mean(stats.num_draft_tokens)} a verification, by position ${shares.join(" ")}`;
  return `of ${number(stats.num_draft_tokens)} since start, by ${stats.proposer} · ${chosen} · ${balance(stats.draft_seconds_saved)}`;
}

/** {name: [figure, remark]} of all tiles; a remark names the statistic and its window. */
export function figuresOf(record, numCached, now) {
  if (record.frame === null) return null;
  const { frame, stats } = record;
  const [rate, steps, gap, last] = [record.rate(now), record.steps(now), record.gap(now), record.span(now)];
  const { waits } = record;
  const whose = record.numEngines > 1 ? ", all engines" : ""; // requests' times are not known by engine
  const ofRequests = waits.length ? `median of the last ${plural(waits.length, "request")}${whose}` : "no request seen yet";
  const waiting = frame.num_waiting ? `${number(frame.num_waiting)} waiting` : "none waiting";
  const ofPages = `now; ${number(numCached)} of ${number(frame.num_pages)} pages cached`;
  return {
    rate: [rate === null ? UNKNOWN : number(rate), `in ${last} · chart: 20\u00a0s`],
    ttft: [waits.length ? time(median(waits.map(([, whole]) => whole))) : UNKNOWN, ofRequests],
    gap: gap ? [time(gap.mean), `mean of ${last} · longest ${time(gap.longest)}${whose}`] : [UNKNOWN, `no stream in ${last}`],
    step: steps ? [time(steps.mean), `mean of ${last} · host ${time(steps.host)}, device ${time(steps.device)}`] : [UNKNOWN, `no step in ${last}`],
    counts: [`${number(frame.num_running)}`, `running now, ${waiting}`],
    queue: [waits.length ? time(median(waits.map(([inQueue]) => inQueue))) : UNKNOWN, ofRequests],
    usage: [percent(stats.kv_usage, 1), ofPages],
    hits: [percent(stats.num_cached_tokens, stats.num_prompt_tokens), `of ${number(stats.num_prompt_tokens)} tokens since start`],
    accepted: [percent(stats.num_accepted_tokens, stats.num_draft_tokens), wordsOfDrafts(stats)],
    preemptions: [number(stats.num_preemptions), `since start · ${plural(record.numFailed, "request")} failed${whose}`],
    ...tiersOf(stats.of_features ?? {}),
  };
}

/** Of host memory and the disk, where they keep KV, how full they are and what has come of it. */
function tiersOf(of) {
  const tiers = {};
  for (const name of ["host", "disk"]) {
    const count = (what) => of[`kv_tiers_${name}_${what}`] ?? 0;
    if (!count("room_now")) continue;
    const blocks = `${plural(count("blocks_loaded"), "block")} loaded, ${number(count("blocks_saved"))} saved since start`;
    tiers[name] = [percent(count("pages_now"), count("room_now")), `now; of ${number(count("room_now"))} pages · ${blocks}`];
  }
  if ("host" in tiers) tiers.tierHits = [percent(of.kv_tiers_hits, of.kv_tiers_lookups), `of ${plural(of.kv_tiers_lookups, "lookup")} since start`];
  return tiers;
}

/** An adapter in words; of all engines. */
export function wordsOfAdapter([name, numUnderWay, numEnded]) {
  return `${name}: ${number(numUnderWay)} under way, ${number(numEnded)} ended`;
}

/** An engine of several in words, as far as it has been heard. */
export function wordsOfEngine(index, stats) {
  if (!stats) return `engine ${index}`;
  const waiting = stats.num_waiting ? `, ${number(stats.num_waiting)} waiting` : "";
  return `engine ${index}: ${number(stats.num_running)} running${waiting}, KV ${percent(stats.kv_usage, 1)}`;
}
