import assert from "node:assert/strict";
import { test } from "node:test";

import { horizontalRange, ticks, verticalRange } from "../../ui/model/axis.js";

const close = (found, expected) => {
  assert.equal(found.length, expected.length, `${found}`);
  found.forEach((value, n) => assert.ok(Math.abs(value - expected[n]) <= 1e-9 * Math.max(1, Math.abs(expected[n])), `${found}`));
};

test("linear ticks are at round numbers within the range", () => {
  close(ticks(0, 10, 5, false), [0, 2, 4, 6, 8, 10]);
  close(ticks(-1, 1, 4, false), [-1, -0.5, 0, 0.5, 1]);
  close(ticks(0.1, 0.35, 5, false), [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]);
});

test("zero is exactly zero", () => {
  assert.ok(ticks(-0.3, 0.3, 6, false).includes(0));
});

test("a range of one value has a tick, and a wrong range has none", () => {
  close(ticks(5, 5, 4, false), [5]);
  for (const [min, max] of [[NaN, 1], [0, NaN], [-Infinity, 1], [0, Infinity], [2, 1]]) {
    assert.deepEqual(ticks(min, max, 4, false), []);
    assert.deepEqual(ticks(min, max, 4, true), []);
  }
});

test("a step that is smaller than the precision of the values ends", () => {
  assert.ok(ticks(1e17, 1e17 + 16, 4, false).length <= 100);
  assert.ok(ticks(1.7e308, 1.75e308, 4, false).length <= 100);
});

test("the number of ticks is close to the request for every magnitude", () => {
  for (let power = -12; power <= 12; power++) {
    for (const count of [2, 5, 10]) {
      const found = ticks(0, 3 * 10 ** power, count, false).length;
      assert.ok(found >= 2 && found <= count + 1, `${power} ${count} ${found}`);
    }
  }
});

test("logarithmic ticks are powers of ten, with 2 and 5 for few decades", () => {
  close(ticks(1, 100, 5, true), [1, 2, 5, 10, 20, 50, 100]);
  close(ticks(1e-3, 1e3, 10, true), [1e-3, 1e-2, 0.1, 1, 10, 100, 1e3]);
  assert.ok(ticks(1e-30, 1e30, 5, true).length <= 7);
});

test("a logarithmic axis without a power of ten has linear ticks", () => {
  assert.ok(ticks(3, 4, 5, true).length >= 2);
  assert.ok(ticks(0.31, 0.33, 5, true).length >= 2);
});

test("a logarithmic axis has no tick at or below zero", () => {
  assert.deepEqual(ticks(0, 10, 5, true), []);
  assert.deepEqual(ticks(-5, 10, 5, true), []);
});

test("the horizontal range covers all series, or is the zoom", () => {
  assert.deepEqual(horizontalRange([{ x: [3, 4] }, { x: [] }, { x: [1, 2] }], null), [1, 4]);
  assert.deepEqual(horizontalRange([{ x: [3, 4] }], [3.2, 3.4]), [3.2, 3.4]);
});

test("the horizontal range of nothing or of one point is not empty", () => {
  assert.deepEqual(horizontalRange([], null), [0, 1]);
  assert.deepEqual(horizontalRange([{ x: [] }], null), [0, 1]);
  assert.deepEqual(horizontalRange([{ x: [7] }], null), [6.5, 7.5]);
});

test("the vertical range has a margin, but does not start below zero for positive values", () => {
  assert.deepEqual(verticalRange([{ x: [1, 2], y: [0, 10] }], [1, 2], false), [0, 10.5]);
  assert.deepEqual(verticalRange([{ x: [1, 2], y: [-10, 10] }], [1, 2], false), [-11, 11]);
});

test("the vertical range ignores points outside, gaps, and what a logarithmic axis cannot show", () => {
  const series = [{ x: [1, 2, 3, 4], y: [1000, NaN, 4, Infinity] }];
  assert.deepEqual(verticalRange(series, [2, 4], false), [3.8, 4.2]);
  const [low, high] = verticalRange([{ x: [1, 2, 3], y: [-5, 0, 10] }, { x: [1], y: [0.1] }], [1, 3], true);
  assert.deepEqual([low, high], [0.1, 10]);
});

test("the vertical range of nothing can be drawn", () => {
  for (const y of [[], [NaN], [Infinity]]) {
    assert.deepEqual(verticalRange([{ x: y.map((_, n) => n), y }], [0, 1], false), [0, 1]);
    assert.deepEqual(verticalRange([{ x: y.map((_, n) => n), y }], [0, 1], true), [0.1, 1]);
  }
  assert.deepEqual(verticalRange([{ x: [0], y: [-3] }], [0, 1], true), [0.1, 1]);
});

test("the vertical range of one value is not empty", () => {
  for (const value of [0, 1, -1, 1e-9, 1e9]) {
    const [low, high] = verticalRange([{ x: [0], y: [value] }], [0, 1], false);
    assert.ok(low < value && value < high);
  }
  const [low, high] = verticalRange([{ x: [0], y: [2] }], [0, 1], true);
  assert.ok(low > 0 && low < 2 && high > 2);
});

test("ranges of 100,000 points", () => {
  const x = Array.from({ length: 100_000 }, (_, n) => n);
  const y = x.map((n) => Math.sin(n));
  const range = horizontalRange([{ x }], null);
  assert.deepEqual(range, [0, 99_999]);
  const [low, high] = verticalRange([{ x, y }], range, false);
  assert.ok(low < -1 && high > 1);
});
