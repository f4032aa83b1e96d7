// @ts-check
// Computations on the points of a curve.

import { number } from "./format.js";

/** @import { Series } from "./types.js" */

/**
 * Exponential moving average with a correction for the start. Values that are not finite are NaN in
 * the result, and the average continues after them.
 * @param {number[]} values
 * @param {number[] | null} weights number of steps since the value before; 1 for all if null
 * @param {number} amount share of the average that a step keeps, from 0 (no smoothing) to 1
 * @returns {number[]}
 */
export function smoothed(values, weights, amount) {
  let sum = 0;
  let total = 0;
  return values.map((value, n) => {
    if (!Number.isFinite(value)) return NaN;
    const keep = amount ** (weights ? weights[n] : 1);
    sum = sum * keep + value * (1 - keep);
    total = total * keep + (1 - keep);
    return total > 0 ? sum / total : value;
  });
}

/**
 * Index of the entry of a sorted array that is nearest to a value; -1 if the array is empty.
 * @param {number[]} values
 * @param {number} value
 */
export function nearest(values, value) {
  if (!values.length) return -1;
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - values[low - 1] < values[low] - value ? low - 1 : low;
}

/**
 * Describes a curve for readers that cannot see the canvas.
 * @param {Pick<Series, "label" | "y">} series
 */
export function describe({ label, y }) {
  const finite = y.filter((value) => Number.isFinite(value));
  if (!finite.length) return `${label}: no values`;
  const least = finite.reduce((a, b) => Math.min(a, b));
  const most = finite.reduce((a, b) => Math.max(a, b));
  return `${label}: ${finite.length} points, first ${number(finite[0])}, last ${number(finite[finite.length - 1])}, `
    + `minimum ${number(least)}, maximum ${number(most)}`;
}

/**
 * Positions of a small chart without axes. Values that are not finite are left out.
 * @param {(number | null)[]} values
 * @param {number} width
 * @param {number} height
 * @returns {string} the `points` of a polyline; empty if fewer than two values are finite
 */
export function sparkPoints(values, width, height) {
  const finite = values.flatMap((value, n) => (value !== null && Number.isFinite(value) ? [{ value, n }] : []));
  if (finite.length < 2) return "";
  const min = finite.reduce((least, { value }) => Math.min(least, value), Infinity);
  const range = finite.reduce((most, { value }) => Math.max(most, value), -Infinity) - min || 1;
  return finite.map(({ value, n }) => {
    const x = 1 + (n / (values.length - 1)) * (width - 2);
    const y = height - 2 - ((value - min) / range) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  }).join(" ");
}
