import assert from "node:assert/strict";
import { test } from "node:test";

import { compareLink, formatIds, formatRoute, parseIds, parseRoute, playgroundLink, runLink, withParams } from "../../ui/model/route.js";

const plain = (route) => route && { ...route, params: Object.fromEntries(route.params) };

test("addresses name a view, a run and parameters", () => {
  const cases = [
    ["", { name: "runs", id: null, params: {} }], ["#", { name: "runs", id: null, params: {} }],
    ["#/", { name: "runs", id: null, params: {} }], ["#/runs", { name: "runs", id: null, params: {} }],
    ["#/runs?q=a%20b&sort=name", { name: "runs", id: null, params: { q: "a b", sort: "name" } }],
    ["#/runs/a%3Atrain%3A0?tab=samples", { name: "run", id: "a:train:0", params: { tab: "samples" } }],
    ["#/runs/%2Fhome%2Fme%2Frun", { name: "run", id: "/home/me/run", params: {} }],
    ["#/samples?q=a?b", { name: "samples", id: null, params: { q: "a?b" } }],
  ];
  for (const [hash, expected] of cases) assert.deepEqual(plain(parseRoute(hash)), expected, hash);
});

test("the target of a link within the page is not an address of a view", () => {
  assert.equal(parseRoute("#main"), null);
});

test("an incomplete escape is taken as it is", () => {
  assert.equal(parseRoute("#/runs/100%").id, "100%");
});

test("addresses are written as they are read", () => {
  for (const hash of ["#/runs", "#/runs?q=a", runLink("a:train:0"), runLink("/x y/ä,%?&#"), compareLink(["a", "b,c"]), playgroundLink("tinker://a/b")]) {
    assert.equal(formatRoute(parseRoute(hash)), hash);
  }
});

test("empty values remove a parameter, and the others stay", () => {
  const params = new URLSearchParams("a=1&b=2&c=3&d=4&e=5");
  assert.equal(withParams(params, { a: null, b: "", c: false, d: undefined, f: "x y" }).toString(), "e=5&f=x+y");
  assert.equal(params.size, 5);
});

test("ids with separators and escapes are read back", () => {
  for (const ids of [[], ["a"], ["a:train:0", "b:train:0"], ["/a,b", "/100%", "%2C"]]) {
    assert.deepEqual(parseIds(formatIds(ids)), ids);
  }
  assert.deepEqual(parseIds(null), []);
});
