// @ts-check
// Rates of the server, computed from its counters.

/** @import { FigureDocument, FiguresDocument } from "../documents.js" */

/**
 * Value of a figure; 0 if the server does not report it.
 * @param {Record<string, FigureDocument>} rows
 * @param {string} name
 */
export function figure(rows, name) {
  return rows[name]?.value ?? 0;
}

/**
 * Share of time in which the worker was busy, and tokens per second, between two readings. Null if
 * the second reading is not newer.
 * @param {FiguresDocument | null} before
 * @param {FiguresDocument} figures
 */
export function rates(before, figures) {
  if (!before || figures.time <= before.time) return null;
  const elapsed = (figures.time - before.time) / 1000;
  // Counters start at 0 when the server restarts.
  /** @param {string} name */
  const rate = (name) => Math.max(0, figure(figures.counters, name) - figure(before.counters, name)) / elapsed;
  return {
    load: Math.min(1, rate("busy_microseconds_total") / 1e6),
    trained: rate("trained_tokens_total"),
    sampled: rate("sampled_tokens_total"),
  };
}
