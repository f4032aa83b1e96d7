// The modules of the page: imports have no cycle and follow the layers.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { dirname, join, normalize } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const UI = fileURLToPath(new URL("../../ui/", import.meta.url));
const files = readdirSync(UI, { recursive: true }).map((file) => file.replaceAll("\\", "/")).filter((file) => file.endsWith(".js"));

/** Modules that a module imports. */
function imports(file) {
  const text = readFileSync(join(UI, file), "utf8");
  const found = [...text.matchAll(/^(?:import|export) .*?from "([^"]+)";$/gms)].map(([, path]) => path);
  return found.map((path) => normalize(join(dirname(file), path)).replaceAll("\\", "/"));
}

const graph = new Map(files.map((file) => [file, imports(file)]));

/** Layer of a module: it imports modules of its own layer and of lower ones only. */
function layer(file) {
  if (file.startsWith("model/")) return 0;
  if (file === "app.js") return 4;
  if (file.startsWith("view/")) return 3;
  if (file.startsWith("part/")) return 2;
  return 1;
}

test("every imported module exists, and app.js reaches every module", () => {
  const reached = new Set();
  const visit = (file) => {
    assert.ok(graph.has(file), `${file} does not exist`);
    if (reached.has(file)) return;
    reached.add(file);
    graph.get(file).forEach(visit);
  };
  visit("app.js");
  assert.deepEqual(files.filter((file) => !reached.has(file)), []);
});

test("no module imports itself, directly or through others", () => {
  const done = new Set();
  const visit = (file, path) => {
    assert.ok(!path.includes(file), `circular import: ${[...path, file].join(" → ")}`);
    if (done.has(file)) return;
    graph.get(file).forEach((next) => visit(next, [...path, file]));
    done.add(file);
  };
  files.forEach((file) => visit(file, []));
});

test("a module imports no higher layer", () => {
  for (const [file, imported] of graph) {
    for (const other of imported) assert.ok(layer(other) <= layer(file), `${file} imports ${other}`);
  }
});

test("views and parts get the store and the router from app.js, and no view imports another", () => {
  for (const [file, imported] of graph) {
    if (file === "app.js") continue;
    assert.ok(!imported.includes("store.js") && !imported.includes("router.js"), file);
    if (file.startsWith("view/")) assert.deepEqual(imported.filter((other) => other.startsWith("view/")), [], file);
  }
});

test("only the router reads or writes the address", () => {
  for (const file of files.filter((name) => name !== "router.js")) {
    const text = readFileSync(join(UI, file), "utf8");
    assert.ok(!/location\.hash|history\.(push|replace)State|hashchange|popstate/.test(text), file);
  }
});

test("every module is checked", () => {
  for (const file of files) assert.ok(readFileSync(join(UI, file), "utf8").startsWith("// @ts-check\n"), file);
});
