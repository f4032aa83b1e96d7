import assert from "node:assert/strict";
import { test } from "node:test";

import { Curves } from "../../ui/model/curves.js";
import { isExact, isSecondary, metricTitle, sortMetrics } from "../../ui/model/metrics.js";

const curve = (step, value = step.map((n) => n / 10), mean = []) => ({ step, time: step.map((n) => 1000 * n), value, mean });

test("no metric", () => {
  const curves = new Curves();
  assert.equal(curves.count, 0);
  curves.replace({});
  assert.deepEqual([curves.count, curves.last, curves.full], [0, 0, true]);
  assert.ok(curves.extend({}, 0));
});

test("new points are appended once", () => {
  const curves = new Curves();
  curves.replace({ loss: curve([1, 2]) });
  assert.equal(curves.last, 2);
  // The response contains the last known step again.
  assert.ok(curves.extend({ loss: curve([2, 3]), kl: curve([3]) }, 2));
  assert.deepEqual(curves.metrics.loss.step, [1, 2, 3]);
  assert.deepEqual(curves.metrics.loss.y, [0.1, 0.2, 0.3]);
  assert.deepEqual(curves.metrics.kl.step, [3]);
  assert.ok(curves.extend({ loss: curve([2, 3]) }, 2));
  assert.equal(curves.count, 3);
});

test("several points of one step are all kept", () => {
  const curves = new Curves();
  curves.replace({ loss: curve([1, 1]) });
  curves.extend({ loss: curve([1, 1, 1, 2]) }, 1);
  assert.deepEqual(curves.metrics.loss.step, [1, 1, 1, 2]);
});

test("values that JSON cannot represent are NaN", () => {
  const curves = new Curves();
  curves.replace({ loss: curve([1, 2], [null, 2]) });
  assert.ok(Number.isNaN(curves.metrics.loss.y[0]));
  assert.equal(curves.metrics.loss.y[1], 2);
});

test("points that the server has combined are weighted by their distance", () => {
  const curves = new Curves();
  curves.replace({ loss: curve([1, 10, 20], [1, 9, 5], [5, 5, null]) });
  assert.equal(curves.full, false);
  assert.deepEqual(curves.metrics.loss.weights, [1, 9, 10]);
  assert.ok(Number.isNaN(curves.metrics.loss.mean[2]));
  assert.ok(curves.extend({ loss: curve([20, 21], [5, 6]) }, 20));
  assert.deepEqual(curves.metrics.loss.mean.slice(3), [6]);
  assert.deepEqual(curves.metrics.loss.weights.slice(3), [1]);
});

test("combined points are no continuation", () => {
  const curves = new Curves();
  curves.replace({ loss: curve([1]) });
  assert.equal(curves.extend({ loss: curve([1, 9], [1, 2], [1, 1]) }, 1), false);
  assert.deepEqual(curves.metrics.loss.step, [1]);
});

test("100,000 points", () => {
  const curves = new Curves();
  curves.replace({ loss: curve(Array.from({ length: 100_000 }, (_, n) => n + 1)) });
  assert.ok(curves.extend({ loss: curve([100_000, 100_001]) }, 100_000));
  assert.equal(curves.count, 100_001);
});

test("the most important metrics come first, and names are sorted once", () => {
  assert.deepEqual(sortMetrics(["zeta", "tokens", "learning_rate", "alpha", "loss per token", "alpha"]),
    ["loss per token", "learning_rate", "alpha", "zeta", "tokens"]);
  assert.deepEqual(sortMetrics([]), []);
});

test("titles, secondary and exact metrics", () => {
  assert.equal(metricTitle("unclipped_grad_l2:mean"), "gradient norm");
  assert.equal(metricTitle("my_metric:max"), "my metric (max)");
  assert.ok(isSecondary("forward: kl") && isSecondary("epoch"));
  assert.ok(!isSecondary("forward: loss per token") && !isSecondary("kl:mean"));
  assert.ok(isExact("learning_rate") && !isExact("loss"));
});
