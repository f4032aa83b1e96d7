// @ts-check
// The checkpoints of a run.

import { errorText, post } from "../api.js";
import { debounce, fill, h, tableHead } from "../dom.js";
import { age, bytes, exact, integer, seconds, shortPath } from "../model/format.js";
import { playgroundLink } from "../model/route.js";
import { copyButton } from "./copy.js";
import { empty } from "./empty.js";
import { toast } from "./toast.js";

/** @import { CheckpointDocument } from "../documents.js" */
/** @import { Store } from "../store.js" */
/** @import { Panel } from "../types.js" */

/** @type {Record<string, string>} */
const KINDS = { sampler_weights: "for sampling", weights: "for training" };

/**
 * @param {Store} store
 * @param {string} id
 * @returns {Panel}
 */
export function checkpointPanel(store, id) {
  const element = h("div", {}, h("p", { class: "muted loading" }, "Loading checkpoints…"));

  function draw() {
    const saved = store.details(id)?.saved;
    if (!saved) return;
    fill(element, saved.length ? checkpointTable(store, saved)
      : empty("No checkpoint yet", "A program saves one with save_weights or save_weights_for_sampler; tinkex train does at its end."));
  }

  async function load() {
    draw();
    await store.loadRun(id);
    draw();
  }

  return { element, load, refresh: debounce(1000, () => { load().catch(() => {}); }) };
}

/**
 * @param {Store} store
 * @param {CheckpointDocument[]} saved
 */
function checkpointTable(store, saved) {
  return h("div", { class: "scroll" }, h("table", {},
    tableHead(["Name", "Kind", "Size", "Saved", "Expires", "Path"]),
    h("tbody", {}, saved.map((checkpoint) => checkpointRow(store, checkpoint)))));
}

/**
 * @param {Store} store
 * @param {CheckpointDocument} checkpoint
 */
function checkpointRow(store, { name, kind, path, step, size_bytes: size, created, expires }) {
  const files = h("span", { class: "files" });
  const isDownloadable = kind === "sampler_weights" && !store.isFolders;
  const isPlayable = kind !== "external_weights" && store.info.views.includes("playground");
  const download = h("button", { type: "button", click: async () => {
    download.disabled = true;
    try {
      const { urls } = await post("download", { path });
      fill(files, Object.entries(urls).map(([file, url]) => [" ", h("a", { href: new URL(url).pathname, download: file }, file)]));
    } catch (error) {
      toast(errorText(error));
      download.disabled = false;
    }
  } }, "Download");
  return h("tr", {},
    h("td", {}, h("span", { class: "mono" }, name)),
    h("td", {}, KINDS[kind] ?? kind),
    // A run folder knows the step of a checkpoint, a server its size.
    h("td", { class: "num" }, size === null ? `step ${integer(step)}` : bytes(size)),
    h("td", { class: "num", title: exact(created) }, age(created, store.now())),
    h("td", { class: "num", title: exact(expires) }, expires ? `in ${seconds(Math.max(0, expires - store.now()) / 1000)}` : "never"),
    h("td", { class: "actions" },
      h("span", { class: "mono muted path", title: path }, shortPath(path)), copyButton(path, "path"),
      isDownloadable && download,
      isPlayable && h("a", { class: "button", href: playgroundLink(path) }, "Try"),
      files));
}
