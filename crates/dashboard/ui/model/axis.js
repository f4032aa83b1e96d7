// @ts-check
// Ranges and ticks of chart axes.

/** @import { Series } from "./types.js" */

/** Maximum number of ticks, whatever the range is. */
const MAX_TICKS = 100;

/**
 * Ticks at round numbers between two finite ends.
 * @param {number} min
 * @param {number} max
 * @param {number} count number of ticks to aim at
 * @param {boolean} log
 * @returns {number[]}
 */
export function ticks(min, max, count, log) {
  if (!Number.isFinite(min) || !Number.isFinite(max) || min > max) return [];
  if (!log) return linearTicks(min, max, count);
  if (min <= 0) return [];
  const found = powerTicks(min, max, count);
  // Less than one decade may contain no power of ten.
  return found.length < 2 ? linearTicks(min, max, count) : found;
}

/**
 * @param {number} min
 * @param {number} max
 * @param {number} count
 */
function linearTicks(min, max, count) {
  const raw = (max - min) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = ([1, 2, 5].find((digit) => digit * power >= raw) ?? 10) * power;
  const found = [];
  // Multiplied, not added up: at 1e17 the sum of a value and a small step is the value itself.
  const first = Math.ceil(min / step);
  for (let n = 0; n < MAX_TICKS; n++) {
    const value = (first + n) * step;
    if (value > max + step * 1e-9) break;
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return found;
}

/**
 * @param {number} min
 * @param {number} max
 * @param {number} count
 */
function powerTicks(min, max, count) {
  const found = [];
  const first = Math.floor(Math.log10(min));
  const last = Math.ceil(Math.log10(max));
  const step = Math.max(1, Math.ceil((last - first) / count));
  const digits = last - first <= 2 ? [1, 2, 5] : [1];
  for (let power = first; power <= last; power += step) {
    for (const digit of digits) {
      const value = digit * 10 ** power;
      if (value >= min && value <= max) found.push(value);
    }
  }
  return found;
}

/**
 * Whether a value can be drawn on an axis.
 * @param {number} value
 * @param {boolean} log
 */
export function isDrawable(value, log) {
  return Number.isFinite(value) && (!log || value > 0);
}

/**
 * Horizontal range of some series. The points of a series are sorted by `x`.
 * @param {Pick<Series, "x">[]} series
 * @param {[number, number] | null} zoom
 * @returns {[number, number]}
 */
export function horizontalRange(series, zoom) {
  let min = Infinity;
  let max = -Infinity;
  for (const { x } of series) {
    if (!x.length) continue;
    min = Math.min(min, x[0]);
    max = Math.max(max, x[x.length - 1]);
  }
  if (zoom) [min, max] = zoom;
  if (!Number.isFinite(min) || !Number.isFinite(max)) return [0, 1];
  return min === max ? [min - 0.5, max + 0.5] : [min, max];
}

/**
 * Vertical range of the points of some series between two ends.
 * @param {Pick<Series, "x" | "y">[]} series
 * @param {[number, number]} horizontal
 * @param {boolean} log
 * @returns {[number, number]}
 */
export function verticalRange(series, [from, to], log) {
  let min = Infinity;
  let max = -Infinity;
  for (const { x, y } of series) {
    for (let n = 0; n < x.length; n++) {
      const value = y[n];
      if (x[n] < from || x[n] > to || !isDrawable(value, log)) continue;
      if (value < min) min = value;
      if (value > max) max = value;
    }
  }
  if (!Number.isFinite(min)) return log ? [0.1, 1] : [0, 1];
  if (min === max) {
    const margin = Math.abs(min) * 0.05 || 0.5;
    return log ? [min / 1.1, max * 1.1] : [min - margin, max + margin];
  }
  if (log) return [min, max];
  const margin = (max - min) * 0.05;
  // An axis of values that are never negative starts at 0 rather than below.
  return [min >= 0 && min - margin < 0 ? 0 : min - margin, max + margin];
}
