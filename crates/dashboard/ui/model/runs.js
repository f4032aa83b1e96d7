// @ts-check
// The list of runs: search, order, and the rows that are visible.

import { runName } from "./format.js";

/** @import { RunDocument } from "../documents.js" */

/** @typedef {(a: RunDocument, b: RunDocument) => number} RunOrder */

/**
 * Label and comparison of every order.
 * @type {Record<string, [string, RunOrder]>}
 */
export const RUN_ORDERS = {
  created: ["Newest", (a, b) => (b.created ?? 0) - (a.created ?? 0)],
  used: ["Last used", (a, b) => (b.last_used ?? 0) - (a.last_used ?? 0)],
  name: ["Name", (a, b) => runName(a).localeCompare(runName(b))],
  loss: ["Lowest loss", (a, b) => (a.loss ?? Number.MAX_VALUE) - (b.loss ?? Number.MAX_VALUE)],
  steps: ["Most steps", (a, b) => b.steps - a.steps],
  storage: ["Largest storage", (a, b) => (b.storage_bytes ?? 0) - (a.storage_bytes ?? 0)],
};

/**
 * Returns the runs that match a search, in order.
 * @param {Iterable<RunDocument>} runs
 * @param {{ text: string, status: string, order: string }} search
 */
export function selectRuns(runs, { text, status, order }) {
  const wanted = text.toLowerCase();
  /** @param {RunDocument} run */
  const matches = (run) => (!status || run.status === status)
    && (!wanted || [run.name, run.id, run.base_model].some((part) => part?.toLowerCase().includes(wanted)));
  const [, compare] = RUN_ORDERS[order] ?? RUN_ORDERS.created;
  return [...runs].filter(matches).sort(compare);
}

/** Number of rows up to which all of them are in the document. */
const ALL_ROWS = 200;

/**
 * Range of the rows to draw: those in the window and some before and after.
 * @param {number} count number of rows
 * @param {number} height of a row
 * @param {number} top position of the first row, relative to the window
 * @param {number} windowHeight
 * @returns {[number, number]} first, and one after the last
 */
export function visibleRows(count, height, top, windowHeight) {
  if (count <= ALL_ROWS) return [0, count];
  const shown = Math.ceil(windowHeight / height) + 20;
  const first = Math.max(0, Math.min(count - shown, Math.floor(-top / height) - 10));
  return [first, Math.min(count, first + shown)];
}
