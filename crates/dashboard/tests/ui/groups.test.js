import assert from "node:assert/strict";
import { test } from "node:test";

import { filterGroups, groupSamples, sortCompletions, sortGroups } from "../../ui/model/groups.js";
import { meanLogprob, percent, surprise, visibleSpace } from "../../ui/model/tokens.js";

let nextId = 0;
const completion = (advantage = null, logprobs = [-1]) => ({ advantage, logprobs, ids: [1], text: ["a"], special: [], top: [], stop: "stop" });
const sample = (values) => ({ id: nextId++, time: 0, group: null, weights: "w", error: null, completions: [completion()], ...values });

test("no sample, no group", () => {
  assert.deepEqual(groupSamples([]), []);
  assert.deepEqual(sortGroups([], "advantage"), []);
});

test("samples of one prompt and the same weights within ten minutes are a group", () => {
  const groups = groupSamples([
    sample({ group: "1", time: 900_000 }), sample({ group: "2", time: 890_000 }), sample({ group: "1", time: 880_000 }),
    sample({ group: "1", weights: "other", time: 870_000 }), sample({ group: "1", time: 200_000 }),
  ]);
  assert.deepEqual(groups.map((group) => group.members.length), [2, 1, 1, 1]);
  assert.equal(groups[0].completions.length, 2);
});

test("samples without a recorded prompt are not grouped", () => {
  assert.equal(groupSamples([sample({}), sample({})]).length, 2);
});

test("filters select rewarded, grouped and failed samples", () => {
  const groups = groupSamples([
    sample({ completions: [completion(1)] }), sample({ completions: [completion(), completion()] }),
    sample({ error: "no", completions: [] }), sample({}),
  ]);
  assert.equal(filterGroups(groups, "").length, 4);
  assert.deepEqual(filterGroups(groups, "rewarded"), [groups[0]]);
  assert.deepEqual(filterGroups(groups, "groups"), [groups[1]]);
  assert.deepEqual(filterGroups(groups, "failed"), [groups[2]]);
});

test("groups are sorted by advantage; groups without one are last", () => {
  const groups = groupSamples([
    sample({}), sample({ completions: [completion(-1), completion(3)] }), sample({}), sample({ completions: [completion(5)] }),
  ]);
  assert.deepEqual(sortGroups(groups, "advantage"), [groups[3], groups[1], groups[0], groups[2]]);
  assert.deepEqual(sortGroups(groups, "lowest"), [groups[1], groups[3], groups[0], groups[2]]);
  assert.equal(sortGroups(groups, "newest"), groups);
});

test("the least probable group comes first", () => {
  const groups = groupSamples([
    sample({ completions: [completion(null, [-1, -3])] }), sample({ completions: [completion(null, [null, NaN])] }),
    sample({ completions: [completion(null, [-5])] }),
  ]);
  assert.deepEqual(sortGroups(groups, "logprob"), [groups[2], groups[0], groups[1]]);
});

test("completions are sorted within a group", () => {
  const low = completion(-2, [-9]);
  const high = completion(2, [-1]);
  const none = completion(null, []);
  assert.deepEqual(sortCompletions([none, low, high], "newest"), [high, low, none]);
  assert.deepEqual(sortCompletions([low, high], "lowest"), [low, high]);
  assert.deepEqual(sortCompletions([high, none, low], "logprob"), [low, high, none]);
  const plain = [completion(), completion()];
  assert.deepEqual(sortCompletions(plain, "advantage"), plain);
});

test("the mean log-probability ignores missing values", () => {
  assert.equal(meanLogprob({ logprobs: [-1, null, -3, NaN, -Infinity] }), -2);
  assert.ok(Number.isNaN(meanLogprob({})));
  assert.ok(Number.isNaN(meanLogprob({ logprobs: [] })));
});

test("surprise is between 0 and 1", () => {
  for (const [logprob, expected] of [[0, 0], [-2.5, 0.5], [-5, 1], [-99, 1], [1, 0], [NaN, 0], [null, 0], [undefined, 0], [-Infinity, 0]]) {
    assert.equal(surprise(logprob) + 0, expected, `${logprob}`);
  }
});

test("probabilities and white space as text", () => {
  assert.deepEqual([percent(0), percent(Math.log(0.5)), percent(-99)], ["100 %", "50 %", "< 0.01 %"]);
  assert.equal(visibleSpace("a b\n\t"), "a·b↵\n⇥\t");
});
