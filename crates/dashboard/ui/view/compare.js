// @ts-check
// Several runs over each other.

import { fill, h, swatch } from "../dom.js";
import { integer, number } from "../model/format.js";
import { parseIds, runLink } from "../model/route.js";
import { chartPanel } from "../part/chart_panel.js";
import { empty } from "../part/empty.js";
import { runsCrumb } from "../part/run_parts.js";
import { palette } from "../theme.js";

/** @import { OpenView } from "../types.js" */

/** Maximum number of runs. */
const MAX_RUNS = 12;

/** @type {OpenView} */
export function compareView(root, { store, router, fail }) {
  /** @type {string[]} */
  let ids = [];
  /** @type {ReturnType<typeof chartPanel> | null} */
  let panel = null;
  const legend = h("ul", { class: "runs-legend" });
  const content = h("div");
  fill(root, runsCrumb(router.lastOf("runs")), h("h1", {}, "Compare"), legend, content);

  function drawLegend() {
    fill(legend, ids.map((id, index) => {
      const run = store.run(id);
      const facts = run ? `${run.base_model ?? ""} · step ${integer(run.steps)} · loss ${number(run.loss)}` : "";
      return h("li", {}, swatch(palette(index)), store.isDeleted(id) ? h("span", {}, store.nameOf(id)) : h("a", { href: runLink(id) }, store.nameOf(id)), " ",
        h("span", { class: "muted" }, store.isDeleted(id) ? "deleted" : facts));
    }));
  }

  async function load() {
    const opened = panel;
    try {
      await Promise.all([store.completeRuns().then(drawLegend), opened?.load()]);
      if (opened === panel) drawLegend();
    } catch (error) {
      if (opened === panel) fail(error);
    }
  }

  return {
    update: (params) => {
      const wanted = [...new Set(parseIds(params.get("runs")))].slice(0, MAX_RUNS);
      if (panel && wanted.join() === ids.join()) {
        panel.update(params);
        return;
      }
      ids = wanted;
      panel?.close();
      panel = ids.length ? chartPanel(store, router, ids) : null;
      fill(content, panel ? panel.element : empty("No run selected", "Select runs in the list, then Compare."));
      drawLegend();
      load();
    },
    changes: (changes) => {
      if (![...changes.runs.map((run) => run.id), ...changes.deleted].some((id) => ids.includes(id))) return;
      drawLegend();
      panel?.refresh();
    },
    reconnected: () => {
      store.completeRuns().then(drawLegend).catch(() => {});
      panel?.refresh();
    },
    redraw: () => {
      drawLegend();
      panel?.redraw();
    },
    key: (event) => { if (event.key === "Escape") panel?.resetZoom(); },
    close: () => {
      panel?.close();
      panel = null;
    },
  };
}
