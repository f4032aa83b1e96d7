// @ts-check
// The newest samples of a run, of a model or of all.

import { errorText, get } from "../api.js";
import { LatestRequest, choiceList, debounce, fill, h } from "../dom.js";
import { integer } from "../model/format.js";
import { filterGroups, groupSamples, sortGroups } from "../model/groups.js";
import { empty } from "./empty.js";
import { sampleCard } from "./sample_card.js";
import { toast } from "./toast.js";
import { shadeKey } from "./tokens.js";

/** @import { SampleDocument } from "../documents.js" */
/** @import { Router } from "../router.js" */
/** @import { Store } from "../store.js" */
/** @import { Panel } from "../types.js" */

/** Number of samples per request. */
const PAGE = 40;

/**
 * @param {Store} store
 * @param {Router} router
 * @param {Record<string, string | null>} filter parameters of the document `samples`
 * @returns {Panel & Required<Pick<Panel, "update" | "load" | "refresh" | "redraw" | "close">>}
 */
export function sampleList(store, router, filter) {
  /** @type {SampleDocument[]} */
  let samples = [];
  let hasMore = false;
  let total = 0;
  let isLoaded = false;
  let options = readOptions(router.params);
  const latest = new LatestRequest();

  const search = h("input", {
    type: "search", placeholder: "Search prompts and completions", "aria-label": "Search samples",
    // The list may have been closed since the key was pressed: the address is another one then.
    input: debounce(250, () => { if (search.isConnected) router.set({ q: search.value }); }),
  });
  const order = choiceList("Sort", [["newest", "Newest"], ["advantage", "Highest advantage"], ["lowest", "Lowest advantage"],
    ["logprob", "Least probable"]], (value) => router.set({ sort: value === "newest" ? null : value }));
  const only = choiceList("Filter", [["", "All samples"], ["rewarded", "With advantage"], ["groups", "Groups of one prompt"],
    ["failed", "Failed"]], (value) => router.set({ only: value }));
  const whitespace = h("input", { type: "checkbox", change: () => router.set({ ws: whitespace.checked ? "1" : null }) });
  const count = h("span", { class: "muted", role: "status" });
  const fresh = h("button", { type: "button", class: "fresh", hidden: true, click: () => { loadOrSay(); } }, "Show new samples");
  const list = h("div", { class: "samples-list" }, h("p", { class: "muted loading" }, "Loading samples…"));
  const element = h("section", { "aria-label": "Samples" },
    h("div", { class: "controls" }, search, order, only, h("label", { class: "toggle" }, whitespace, " Whitespace"), shadeKey(),
      h("span", { class: "grow" }), count), fresh, list);

  /** @param {URLSearchParams} params */
  function readOptions(params) {
    return {
      search: params.get("q") ?? "", order: params.get("sort") ?? "newest", only: params.get("only") ?? "",
      whitespace: params.get("ws") === "1",
    };
  }

  function showOptions() {
    // A text that is being typed is ahead of the address.
    if (document.activeElement !== search) search.value = options.search;
    order.value = options.order;
    only.value = options.only;
    whitespace.checked = options.whitespace;
  }

  function draw() {
    if (!isLoaded) return;
    const shown = sortGroups(filterGroups(groupSamples(samples), options.only), options.order);
    count.textContent = total ? `${integer(total)} in the log` : "";
    if (!shown.length) {
      fill(list, samples.length ? empty("No sample matches", "Change the filter.") : nothing(),
        hasMore && olderButton());
      return;
    }
    fill(list, shown.map((group) => sampleCard(store, group, options)), hasMore && olderButton());
  }

  function olderButton() {
    return h("button", { type: "button", class: "more-button", click: () => { loadMore(); } }, "Older samples");
  }

  function nothing() {
    if (options.search) return empty("No sample matches", "Change the search.");
    if (!store.info.samples) {
      return empty("Samples are not recorded", "The server was started with --no-sample-history or --history 0. Start it without the option:", "tinkex serve");
    }
    return empty("No samples yet", "Every completion that is sampled on this server appears here. Try:",
      "tinkex sample --local \"Once upon a time\"");
  }

  /** @param {number} [before] */
  const query = (before) => get("samples", { ...filter, search: options.search, limit: PAGE, before });

  async function load() {
    await latest.run(query(), (result) => {
      samples = result.samples;
      hasMore = result.more;
      total = result.total;
      isLoaded = true;
      fresh.hidden = true;
      draw();
    });
  }

  function loadOrSay() {
    load().catch((error) => toast(errorText(error)));
  }

  async function loadMore() {
    try {
      await latest.run(query(samples[samples.length - 1]?.id), (result) => {
        samples = [...samples, ...result.samples];
        hasMore = result.more;
        draw();
      });
    } catch (error) {
      toast(errorText(error));
    }
  }

  showOptions();
  return {
    element, load,
    update: (params) => {
      const before = options;
      options = readOptions(params);
      showOptions();
      if (before.search !== options.search) loadOrSay();
      else draw();
    },
    refresh: debounce(400, () => {
      // Do not move what somebody reads: offer the new samples instead.
      if (scrollY > 200 || element.contains(document.activeElement)) fresh.hidden = false;
      else load().catch(() => {});
    }),
    redraw: draw,
    close: () => latest.cancel(),
  };
}
