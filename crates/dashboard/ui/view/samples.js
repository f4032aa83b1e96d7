// @ts-check
// Samples of all models.

import { choiceList, fill, h } from "../dom.js";
import { runName } from "../model/format.js";
import { RUN_ORDERS, selectRuns } from "../model/runs.js";
import { sampleList } from "../part/sample_list.js";

/** @import { OpenView } from "../types.js" */

/** Maximum number of runs to choose from. */
const MAX_RUNS = 500;
/** Parameters that select samples. */
const FILTERS = ["run", "model", "group", "id"];

/** @type {OpenView} */
export function samplesView(root, { store, router, fail }) {
  /** @type {ReturnType<typeof sampleList> | null} */
  let list = null;
  let shownFilter = "";
  let run = "";
  const runSelect = choiceList("Run", [["", "All models"]], (value) => router.set({ run: value }, { push: true }));
  const content = h("div");
  fill(root, h("div", { class: "toolbar" }, h("h1", {}, "Samples"), h("span", { class: "grow" }), runSelect), content);

  function drawRuns() {
    const runs = selectRuns(store.runs, { text: "", status: "", order: Object.keys(RUN_ORDERS)[0] }).slice(0, MAX_RUNS);
    const isListed = !run || runs.some((one) => one.id === run);
    fill(runSelect, h("option", { value: "" }, "All models"),
      !isListed && h("option", { value: run }, store.nameOf(run)),
      runs.map((one) => h("option", { value: one.id }, runName(one))));
    runSelect.value = run;
  }

  async function load() {
    const opened = list;
    try {
      await store.completeRuns();
      drawRuns();
      await opened?.load();
    } catch (error) {
      if (opened === list) fail(error);
    }
  }

  return {
    update: (params) => {
      const filter = Object.fromEntries(FILTERS.map((name) => [name, params.get(name)]));
      const text = JSON.stringify(filter);
      if (list && text === shownFilter) {
        list.update(params);
        return;
      }
      shownFilter = text;
      run = filter.run ?? "";
      list?.close();
      list = sampleList(store, router, filter);
      fill(content, list.element);
      drawRuns();
      load();
    },
    // A training request adds advantages to samples that exist.
    changes: (changes) => { if (changes.last_sample !== null || changes.runs.length) list?.refresh(); },
    reconnected: () => list?.refresh(),
    close: () => {
      list?.close();
      list = null;
    },
  };
}
