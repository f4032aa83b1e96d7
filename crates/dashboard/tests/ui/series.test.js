import assert from "node:assert/strict";
import { test } from "node:test";

import { describe, nearest, smoothed, sparkPoints } from "../../ui/model/series.js";

test("smoothing of nothing, of one value and of a constant changes nothing", () => {
  assert.deepEqual(smoothed([], null, 0.6), []);
  assert.deepEqual(smoothed([5], null, 0.6), [5]);
  for (const value of smoothed([3, 3, 3, 3], null, 0.9)) assert.ok(Math.abs(value - 3) < 1e-12);
});

test("an amount of 0 returns the values", () => {
  assert.deepEqual(smoothed([1, 9, -4], null, 0), [1, 9, -4]);
});

test("the first value counts fully, later ones less", () => {
  const [first, second] = smoothed([0, 10], null, 0.5);
  assert.equal(first, 0);
  assert.ok(Math.abs(second - 10 * (0.5 / 0.75)) < 1e-12);
});

test("gaps stay gaps and the average continues after them", () => {
  const [a, b, c, d] = smoothed([1, NaN, Infinity, 1], null, 0.6);
  assert.equal(a, 1);
  assert.ok(Number.isNaN(b) && Number.isNaN(c));
  assert.ok(Math.abs(d - 1) < 1e-12);
});

test("a weight of n smooths as n equal values do", () => {
  const single = smoothed([0, 8, 8, 8], null, 0.7);
  const combined = smoothed([0, 8], [1, 3], 0.7);
  assert.ok(Math.abs(single.at(-1) - combined.at(-1)) < 1e-12);
});

test("the average stays between the extremes", () => {
  const values = Array.from({ length: 100_000 }, (_, n) => Math.sin(n * n));
  const result = smoothed(values, null, 0.99);
  assert.equal(result.length, values.length);
  assert.ok(result.every((value) => value >= -1 && value <= 1));
});

test("nearest finds the closest entry", () => {
  const values = [1, 2, 4, 8];
  for (const [value, index] of [[-5, 0], [1, 0], [1.4, 0], [1.6, 1], [3, 2], [5.9, 2], [6.1, 3], [99, 3]]) {
    assert.equal(nearest(values, value), index, `${value}`);
  }
});

test("nearest of nothing is -1, and of one entry that entry", () => {
  assert.equal(nearest([], 3), -1);
  assert.equal(nearest([7], -3), 0);
  assert.equal(nearest([7], NaN), 0);
});

test("nearest with repeated entries and among 100,000", () => {
  assert.equal(nearest([1, 1, 1], 1), 0);
  const values = Array.from({ length: 100_000 }, (_, n) => 2 * n);
  for (const n of [0, 1, 50_000, 99_999]) assert.equal(nearest(values, 2 * n + 0.5), n);
});

test("a curve is described with its extremes, without values that are not finite", () => {
  assert.equal(describe({ label: "a", y: [2, NaN, 1, 3] }), "a: 3 points, first 2, last 3, minimum 1, maximum 3");
  assert.equal(describe({ label: "a", y: [] }), "a: no values");
  assert.equal(describe({ label: "a", y: [NaN] }), "a: no values");
  assert.match(describe({ label: "a", y: Array.from({ length: 200_000 }, (_, n) => n) }), /^a: 200000 points/);
});

test("a small chart leaves values out that are not finite", () => {
  assert.equal(sparkPoints([], 96, 22), "");
  assert.equal(sparkPoints([1], 96, 22), "");
  assert.equal(sparkPoints([1, null, NaN], 96, 22), "");
  assert.equal(sparkPoints([0, 1], 96, 22), "1.0,20.0 95.0,2.0");
  assert.equal(sparkPoints([0, null, 1], 96, 22), "1.0,20.0 95.0,2.0");
  assert.equal(sparkPoints([-2, -2], 96, 22), "1.0,20.0 95.0,20.0");
});
