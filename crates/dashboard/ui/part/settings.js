// @ts-check
// The settings of a run and what its program has said about it.

import { fill, h } from "../dom.js";

/** @import { Store } from "../store.js" */
/** @import { Panel } from "../types.js" */

/**
 * @param {Store} store
 * @param {string} id
 * @returns {Panel}
 */
export function settingsPanel(store, id) {
  const element = h("div", {}, h("p", { class: "muted loading" }, "Loading settings…"));

  function draw() {
    const run = store.details(id);
    if (!run) return;
    const session = settingsTable(run.session_metadata);
    fill(element, h("h2", {}, "Hyperparameters"), settingsTable(run.settings) ?? h("p", { class: "muted" }, "None."),
      h("h2", {}, "Metadata"), settingsTable(run.metadata) ?? h("p", { class: "muted" }, "The program has set none."),
      session && [h("h2", {}, "Metadata of the session"), session],
      run.tags.length > 0 && h("p", {}, "Tags: ", run.tags.join(", ")));
  }

  return {
    element,
    load: async () => {
      draw();
      await store.loadRun(id);
      draw();
    },
  };
}

/**
 * Names and values; null if no value is set.
 * @param {Record<string, unknown>} values
 */
function settingsTable(values) {
  const rows = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (!rows.length) return null;
  return h("dl", { class: "settings" }, rows.map(([name, value]) => [
    h("dt", {}, name.replaceAll("_", " ")),
    h("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value)),
  ]));
}
