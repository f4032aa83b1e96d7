import assert from "node:assert/strict";
import { test } from "node:test";

import { age, bytes, clockTime, exact, integer, number, runName, seconds, short, shortId, shortPath, status, stepCount } from "../../ui/model/format.js";

test("numbers have three significant digits", () => {
  const cases = [
    [0, "0"], [-0, "0"], [1, "1"], [0.12345, "0.123"], [-0.5, "-0.5"], [999.4, "999"], [1234.5, "1,235"], [-1234567, "-1,234,567"],
    [1e7, "1.00e7"], [0.0001234, "1.23e-4"], [null, "–"], [undefined, "–"], [NaN, "–"], [Infinity, "∞"], [-Infinity, "−∞"],
  ];
  for (const [value, text] of cases) assert.equal(number(value), text);
});

test("short numbers, sizes and durations have units", () => {
  assert.deepEqual([17_500, 1.2e6, 3e9, 0, -2000, NaN].map(short), ["17.5k", "1.2M", "3G", "0", "-2k", "–"]);
  assert.deepEqual([0, 1023, 1024, 5 * 2 ** 20, 2 ** 31, null].map(bytes), ["0 B", "1023 B", "1 KiB", "5 MiB", "2 GiB", "–"]);
  assert.deepEqual([0, 1e-6, 0.25, 1.5, 119, 120, 7200, null, NaN].map(seconds),
    ["0 µs", "1 µs", "250 ms", "1.5 s", "119 s", "2 min", "2 h", "–", "–"]);
  assert.deepEqual([1234, 0, null].map(integer), ["1,234", "0", "–"]);
});

test("ages are in words, also if the clocks differ", () => {
  const now = 1e12;
  const cases = [[0, "just now"], [-5000, "just now"], [30e3, "30 s ago"], [600e3, "10 min ago"], [7200e3, "2 h ago"], [864e6, "10 days ago"]];
  for (const [since, text] of cases) assert.equal(age(now - since, now), text);
  assert.equal(age(null, now), "–");
});

test("ids and paths are shortened in the middle", () => {
  assert.equal(shortId("short"), "short");
  assert.equal(shortId("0123456789abcdefghijklmn"), "01234567…ghijklmn");
  assert.equal(shortPath("tinker://7a10c3d2-1111-2222:train:0/weights/final"), "tinker://7a10c3d2…/weights/final");
  assert.equal(shortPath("/a/folder"), "/a/folder");
});

test("a run without a name is named by its id", () => {
  assert.equal(runName({ id: "a", name: "b" }), "b");
  assert.equal(runName({ id: "a", name: null }), "a");
  assert.equal(stepCount({ steps: 5, total_steps: 1000 }), "5/1,000");
  assert.equal(stepCount({}), "0");
  assert.deepEqual([status("idle"), status("other")], [["◐", "idle"], ["○", "other"]]);
});

test("times of day have 24 hours, and no time is empty", () => {
  assert.match(clockTime(new Date(2026, 0, 2, 15, 4, 5).getTime()), /^15\D04\D05$/);
  assert.equal(exact(null), "");
  assert.match(exact(new Date(2026, 0, 2).getTime()), /2026/);
});
