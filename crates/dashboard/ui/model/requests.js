// @ts-check
// The requests of a run over time.

import { integer, seconds } from "./format.js";

/** @import { RequestsDocument } from "../documents.js" */

/** @typedef {"training" | "sampling"} Lane */
/** @typedef {RequestsDocument["training"][number]} RequestRow */

/**
 * A finished request. Times are milliseconds, durations are seconds.
 * @typedef {object} RequestTime
 * @property {Lane} lane
 * @property {string} kind
 * @property {number} seq
 * @property {number} start
 * @property {number} end
 * @property {number} queued
 * @property {number} compute
 * @property {number} tokens
 * @property {string | null} error
 */

/** @type {Lane[]} */
export const LANES = ["training", "sampling"];

/**
 * Seconds of each range that a reader can choose.
 * @type {Record<string, number>}
 */
export const WINDOWS = { "30 s": 30, "2 min": 120, "10 min": 600, "1 h": 3600, all: Infinity };

/** Time without a request after which a run is shown until its last request, in milliseconds. */
const ENDED_AFTER = 60_000;

/**
 * @param {Lane} lane
 * @param {RequestRow} row
 * @returns {RequestTime}
 */
function requestTime(lane, [kind, seq, time, queued, compute, tokens, error]) {
  return { lane, kind, seq, end: time, start: time - compute * 1000, queued, compute, tokens, error };
}

/**
 * Returns the requests within a range, and the ends of the range in milliseconds.
 * @param {RequestsDocument} document
 * @param {string} range a key of `WINDOWS`
 */
export function requestWindow(document, range) {
  const all = LANES.flatMap((lane) => document[lane].map((row) => requestTime(lane, row)));
  const first = all.reduce((least, request) => Math.min(least, request.start), document.now);
  const from = Math.max(first, document.now - (WINDOWS[range] ?? Infinity) * 1000);
  const last = all.reduce((most, request) => Math.max(most, request.end), first);
  const hasEnded = document.now - last > ENDED_AFTER;
  const to = range === "all" && hasEnded ? last : document.now;
  return { from, to: Math.max(to, from + 1), requests: all.filter((request) => request.end >= from) };
}

/**
 * Says how long the server worked for a run and how long a step takes.
 * @param {RequestTime[]} requests
 * @param {number} from
 * @param {number} queued
 */
export function summarize(requests, from, queued) {
  if (!requests.length) return "";
  const busy = unionLength(requests.map((request) => [Math.max(from, request.start), request.end]));
  // Until the last request: the time after it is not a pause of the program.
  const end = requests.reduce((most, request) => Math.max(most, request.end), from);
  const span = Math.max(1, end - from);
  const share = Math.round((100 * busy) / span);
  const parts = [`The server worked for this run during ${share} % of ${seconds(span / 1000)}.`];
  const step = medianStep(requests);
  if (step !== null) parts.push(`A step takes ${seconds(step)} (median).`);
  if (share < 70 && requests.length > 4) {
    parts.push("Otherwise it had no request of this run: the program can submit the next step before it reads the result of the last one.");
  }
  if (queued) parts.push(`Requests that are queued or running now: ${integer(queued)}.`);
  return parts.join(" ");
}

/**
 * Median time between optimizer steps in seconds; null for fewer than two steps.
 * @param {RequestTime[]} requests
 */
function medianStep(requests) {
  const ends = requests.filter((request) => request.kind === "optim_step").map((request) => request.end);
  const gaps = ends.slice(1).map((time, n) => (time - ends[n]) / 1000).sort((a, b) => a - b);
  return gaps.length ? gaps[gaps.length >> 1] : null;
}

/**
 * Total length of the union of intervals.
 * @param {[number, number][]} intervals
 */
export function unionLength(intervals) {
  let total = 0;
  let end = -Infinity;
  for (const [from, to] of [...intervals].sort((a, b) => a[0] - b[0])) {
    if (to <= end) continue;
    total += to - Math.max(from, end);
    end = to;
  }
  return total;
}
