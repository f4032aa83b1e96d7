import assert from "node:assert/strict";
import { test } from "node:test";

import { requestWindow, summarize, unionLength } from "../../ui/model/requests.js";

const row = (kind, end, compute = 1, queued = 0) => [kind, 1, end, queued, compute, 10, null];
const data = (training, sampling = [], now = 100_000) => ({ columns: [], training, sampling, queued: 0, now });

test("a run without requests has an empty window", () => {
  const { from, to, requests } = requestWindow(data([]), "all");
  assert.deepEqual(requests, []);
  assert.ok(to > from);
  assert.equal(summarize([], from, 0), "");
});

test("the window is the chosen range before now", () => {
  const document = data([row("optim_step", 20_000), row("optim_step", 95_000)], [row("sample", 99_000)]);
  const { from, to, requests } = requestWindow(document, "30 s");
  assert.deepEqual([from, to], [70_000, 100_000]);
  assert.deepEqual(requests.map((request) => request.end), [95_000, 99_000]);
  assert.equal(requestWindow(document, "unknown").requests.length, 3);
});

test("an old run ends at its last request, not now", () => {
  const { from, to } = requestWindow(data([row("optim_step", 10_000)], [], 10_000_000), "all");
  assert.deepEqual([from, to], [9_000, 10_000]);
});

test("the summary tells the share of work, the median step and the queue", () => {
  const steps = [10, 12, 14, 16, 18].map((second) => row("optim_step", second * 1000));
  const { from, requests } = requestWindow(data(steps, [], 18_000), "all");
  const text = summarize(requests, from, 3);
  assert.match(text, /during 56 % of 9 s\. A step takes 2 s \(median\)\./);
  assert.match(text, /can submit the next step/);
  assert.match(text, /queued or running now: 3\.$/);
});

test("the length of a union counts overlaps once", () => {
  assert.equal(unionLength([]), 0);
  assert.equal(unionLength([[0, 1]]), 1);
  assert.equal(unionLength([[5, 6], [0, 2], [1, 3], [1, 2]]), 4);
  assert.equal(unionLength(Array.from({ length: 100_000 }, (_, n) => [n, n + 2])), 100_001);
});

test("a timeline of 100,000 requests", () => {
  const rows = Array.from({ length: 100_000 }, (_, n) => row("optim_step", n * 10, 0.001));
  const { from, requests } = requestWindow(data(rows, [], 1_000_000), "all");
  assert.equal(requests.length, 100_000);
  assert.match(summarize(requests, from, 0), /A step takes 10 ms/);
});
