import assert from "node:assert/strict";
import { test } from "node:test";

import { RUN_ORDERS, selectRuns, visibleRows } from "../../ui/model/runs.js";

const run = (id, values = {}) => ({ id, name: null, base_model: null, status: "idle", steps: 0, loss: null, created: 0, last_used: 0, storage_bytes: null, ...values });
const ids = (runs) => runs.map((one) => one.id);
const all = { text: "", status: "", order: "created" };

test("runs are searched by name, id and model, in any case", () => {
  const runs = [run("x1", { name: "Pirate" }), run("x2", { base_model: "tiny/PIRATE" }), run("pirate-3"), run("x4")];
  assert.deepEqual(ids(selectRuns(runs, { ...all, text: "pIrAtE" })), ["x1", "x2", "pirate-3"]);
  assert.deepEqual(selectRuns([], all), []);
});

test("runs are filtered by status", () => {
  assert.deepEqual(ids(selectRuns([run("a"), run("b", { status: "failed" })], { ...all, status: "failed" })), ["b"]);
});

test("every order is total, and runs without the value are last", () => {
  const runs = [run("a", { created: 1, steps: 1 }), run("b", { created: 2, loss: 3, steps: 2, storage_bytes: 1 }), run("c", { created: 3, loss: -1 })];
  assert.deepEqual(ids(selectRuns(runs, all)), ["c", "b", "a"]);
  assert.deepEqual(ids(selectRuns(runs, { ...all, order: "loss" })), ["c", "b", "a"]);
  assert.deepEqual(ids(selectRuns(runs, { ...all, order: "steps" })), ["b", "a", "c"]);
  assert.deepEqual(ids(selectRuns(runs, { ...all, order: "name" })), ["a", "b", "c"]);
  assert.deepEqual(ids(selectRuns(runs, { ...all, order: "unknown" })), ["c", "b", "a"]);
  for (const [, compare] of Object.values(RUN_ORDERS)) assert.equal(compare(runs[0], runs[0]), 0);
});

test("short lists are drawn completely, long ones around the window", () => {
  assert.deepEqual(visibleRows(0, 45, 100, 800), [0, 0]);
  assert.deepEqual(visibleRows(200, 45, -5000, 800), [0, 200]);
  assert.deepEqual(visibleRows(1000, 45, 100, 800), [0, 38]);
  assert.deepEqual(visibleRows(1000, 45, -45 * 100, 800), [90, 128]);
  // Scrolled beyond the end, as after a search that matches fewer runs.
  assert.deepEqual(visibleRows(1000, 45, -45 * 5000, 800), [962, 1000]);
});
