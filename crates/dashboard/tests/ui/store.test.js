import assert from "node:assert/strict";
import { test } from "node:test";

import { NotFound } from "../../ui/api.js";
import { Store } from "../../ui/store.js";

const run = (id, last_used = 0, values = {}) => ({ id, name: id, last_used, steps: 0, ...values });
const changes = (runs, deleted = []) => ({ runs, deleted, last_sample: null });
const ids = (store) => [...store.runs].map((one) => one.id).sort();

/** A store whose requests are answered by the test, in any order. */
function controlled() {
  const requests = [];
  const store = new Store((name, params) => new Promise((resolve, reject) => { requests.push({ name, params, resolve, reject }); }));
  return { store, requests };
}

test("one run does not make the list complete", async () => {
  const { store, requests } = controlled();
  const loading = store.loadRun("a");
  requests[0].resolve(run("a"));
  await loading;
  assert.deepEqual([ids(store), store.isComplete], [["a"], false]);
  const listing = store.completeRuns();
  requests[1].resolve({ runs: [run("a"), run("b")] });
  await listing;
  assert.deepEqual([ids(store), store.isComplete], [["a", "b"], true]);
  await store.completeRuns();
  assert.equal(requests.length, 2);
});

test("simultaneous readers share a request", async () => {
  const { store, requests } = controlled();
  const all = Promise.all([store.reloadRuns(), store.reloadRuns(), store.loadRun("a"), store.loadRun("a")]);
  assert.deepEqual(requests.map(({ name }) => name), ["runs", "run"]);
  requests[0].resolve({ runs: [] });
  requests[1].resolve(run("a"));
  await all;
});

test("a change that arrives during a request is not replaced by the older response", async () => {
  const { store, requests } = controlled();
  const listing = store.reloadRuns();
  store.apply(changes([run("a", 2), run("new", 2)], ["gone"]));
  requests[0].resolve({ runs: [run("a", 1), run("gone", 1)] });
  await listing;
  assert.deepEqual(ids(store), ["a", "new"]);
  assert.equal(store.run("a").last_used, 2);
  assert.ok(store.isDeleted("gone"));
});

test("a response that is newer than a change stays", async () => {
  const { store, requests } = controlled();
  const listing = store.reloadRuns();
  store.apply(changes([run("a", 1)]));
  requests[0].resolve({ runs: [run("a", 2)] });
  await listing;
  assert.equal(store.run("a").last_used, 2);
});

test("runs that a list does not have were deleted", async () => {
  const { store, requests } = controlled();
  store.apply(changes([run("a"), run("b")]));
  const listing = store.reloadRuns();
  requests[0].resolve({ runs: [run("b")] });
  await listing;
  assert.deepEqual([ids(store), store.isDeleted("a"), store.isDeleted("b")], [["b"], true, false]);
});

test("a run that does not exist any more is deleted, and other errors delete nothing", async () => {
  const { store, requests } = controlled();
  store.apply(changes([run("a"), run("b")]));
  const missing = store.loadRun("a");
  requests[0].reject(new NotFound("no run"));
  await assert.rejects(missing, NotFound);
  const failed = store.loadRun("b");
  requests[1].reject(new Error("no connection"));
  await assert.rejects(failed, /no connection/);
  assert.deepEqual([ids(store), store.isDeleted("a"), store.isDeleted("b")], [["b"], true, false]);
});

test("a run that appears again is not deleted", () => {
  const { store } = controlled();
  store.apply(changes([run("a")]));
  store.apply(changes([], ["a"]));
  assert.ok(store.isDeleted("a"));
  store.apply(changes([run("a")]));
  assert.ok(!store.isDeleted("a"));
});

test("details have the current values of the run", async () => {
  const { store, requests } = controlled();
  assert.equal(store.details("a"), null);
  const loading = store.loadRun("a");
  requests[0].resolve(run("a", 1, { steps: 1, saved: [] }));
  await loading;
  store.apply(changes([run("a", 2, { steps: 2 })]));
  assert.equal(store.details("a").steps, 2);
  assert.deepEqual(store.details("a").saved, []);
  store.apply(changes([], ["a"]));
  assert.equal(store.details("a"), null);
});

test("a failed list can be read again", async () => {
  const { store, requests } = controlled();
  const failed = store.reloadRuns();
  requests[0].reject(new Error("no connection"));
  await assert.rejects(failed);
  assert.equal(store.isComplete, false);
  const listing = store.reloadRuns();
  requests[1].resolve({ runs: [] });
  await listing;
  assert.equal(store.isComplete, true);
  store.invalidate();
  assert.equal(store.isComplete, false);
});

test("times are those of the server", async () => {
  const { store, requests } = controlled();
  assert.throws(() => store.info);
  const loading = store.loadInfo();
  requests[0].resolve({ kind: "server", time: Date.now() + 3_600_000 });
  await loading;
  assert.ok(Math.abs(store.now() - Date.now() - 3_600_000) < 5000);
  store.applyServer({ figures: { time: Date.now() - 1000 }, errors: [] });
  assert.ok(store.now() < Date.now());
});

test("a run without a document is named by its id", () => {
  const { store } = controlled();
  assert.equal(store.nameOf("a"), "a");
});
