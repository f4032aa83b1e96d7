// Samples and rollouts as text.

import { get } from "./api.js";
import { app, fail, runLink, setParams } from "./app.js";
import { copyButton, debounce, empty, fill, h } from "./dom.js";
import { age, exact, integer, number, runName, seconds, shortId } from "./format.js";
import { meanLogprob, shadeKey, tokenText } from "./tokens.js";

const PAGE = 40;

/** Newest samples of a run, of a model or of all. */
export function sampleList(filter, params = new URLSearchParams()) {
  const options = {
    search: params.get("q") ?? "", sort: params.get("sort") ?? "newest", whitespace: params.get("ws") === "1",
    only: params.get("only") ?? "",
  };
  let samples = [];
  let more = false;
  let total = 0;
  const own = params.size > 0 || !filter.run;
  const remember = (values) => { if (own) setParams(values); };
  const search = h("input", {
    type: "search", placeholder: "Search prompts and completions", "aria-label": "Search samples", value: options.search,
    input: debounce(250, () => { options.search = search.value; remember({ q: options.search }); load(); }),
  });
  const sort = h("select", { "aria-label": "Sort", change: () => { options.sort = sort.value; remember({ sort: options.sort }); draw(); } },
    [["newest", "Newest"], ["advantage", "Highest advantage"], ["lowest", "Lowest advantage"], ["logprob", "Least probable"]]
      .map(([value, label]) => h("option", { value }, label)));
  sort.value = options.sort;
  const only = h("select", { "aria-label": "Filter", change: () => { options.only = only.value; remember({ only: options.only }); draw(); } },
    [["", "All samples"], ["rewarded", "With advantage"], ["groups", "Groups of one prompt"], ["failed", "Failed"]]
      .map(([value, label]) => h("option", { value }, label)));
  only.value = options.only;
  const whitespace = h("label", { class: "toggle" }, h("input", { type: "checkbox", checked: options.whitespace,
    change: (event) => { options.whitespace = event.target.checked; remember({ ws: options.whitespace ? "1" : null }); draw(); } }), " Whitespace");
  const count = h("span", { class: "muted", role: "status" });
  const fresh = h("button", { type: "button", class: "fresh", hidden: true, click: () => { fresh.hidden = true; load(); } }, "Show new samples");
  const list = h("div", { class: "samples-list" }, h("p", { class: "muted loading" }, "Loading samples…"));
  const element = h("section", { "aria-label": "Samples" },
    h("div", { class: "controls" }, search, sort, only, whitespace, shadeKey(), h("span", { class: "grow" }), count), fresh, list);

  /** Samples of one prompt and the same weights within a short time are a group. */
  function groups() {
    const found = [];
    const open = new Map();
    for (const sample of samples) {
      const key = sample.group && `${sample.group} ${sample.weights}`;
      const known = key && open.get(key);
      if (known && known[0].time - sample.time < 600000) known.push(sample);
      else {
        const started = [sample];
        found.push(started);
        if (key) open.set(key, started);
      }
    }
    return found.map((members) => ({ members, completions: members.flatMap((sample) => sample.completions) }));
  }

  function draw() {
    let shown = groups();
    if (options.only === "rewarded") shown = shown.filter((one) => one.completions.some((c) => c.advantage !== null));
    if (options.only === "groups") shown = shown.filter((one) => one.completions.length > 1);
    if (options.only === "failed") shown = shown.filter((one) => one.members.some((sample) => sample.error));
    const best = (one, pick, start) => one.completions.reduce((most, c) => pick(most, c.advantage ?? start), start);
    if (options.sort === "advantage") shown.sort((a, b) => best(b, Math.max, -Infinity) - best(a, Math.max, -Infinity));
    if (options.sort === "lowest") shown.sort((a, b) => best(a, Math.min, Infinity) - best(b, Math.min, Infinity));
    if (options.sort === "logprob") {
      const least = (one) => Math.min(...one.completions.map((c) => meanLogprob(c)).filter((v) => !Number.isNaN(v)), 0);
      shown.sort((a, b) => least(a) - least(b));
    }
    count.textContent = total ? `${integer(total)} in the log` : "";
    if (!shown.length) {
      fill(list, samples.length ? empty("No sample matches", "Change the filter.") : nothing());
      return;
    }
    fill(list, shown.map(card), more && h("button", { type: "button", class: "more-button", click: loadMore }, "Older samples"));
  }

  function nothing() {
    if (options.search) return empty("No sample matches", "Change the search.");
    if (app.info?.samples === false) {
      return empty("Samples are not recorded", "The server was started with --no-sample-history or --history 0. Start it without the option:", "tinkex serve");
    }
    return empty("No samples yet", "Every completion that is sampled on this server appears here. Try:",
      "tinkex sample --local \"Once upon a time\"");
  }

  function card({ members, completions }) {
    const [first] = members;
    const run = first.run && app.runs.get(first.run);
    const tokens = completions.reduce((sum, c) => sum + c.ids.length, 0);
    const took = Math.max(...members.map((sample) => sample.compute_seconds));
    const sorted = [...completions];
    if (options.sort === "logprob") sorted.sort((a, b) => meanLogprob(a) - meanLogprob(b));
    else if (completions.some((c) => c.advantage !== null)) {
      sorted.sort((a, b) => (b.advantage ?? -Infinity) - (a.advantage ?? -Infinity));
      if (options.sort === "lowest") sorted.reverse();
    }
    // Training loops save weights for a moment and sample from them.
    const named = first.model ?? "unnamed weights";
    const model = named.startsWith("tinker://") ? named.split("/").at(-1) : named;
    const errors = members.filter((sample) => sample.error);
    return h("article", { class: "sample", "data-id": first.id },
      h("header", {},
        h("span", { class: "chip", title: first.model ?? first.weights }, model.length > 44 ? shortId(model) : model),
        first.run && h("a", { href: runLink(first.run) }, run ? runName(run) : shortId(first.run)),
        completions.length > 1 && h("span", {}, `group of ${completions.length}`),
        h("span", { class: "muted" }, `${integer(first.prompt_tokens)} + ${integer(tokens)} tokens · ${seconds(took)}`
          + (first.source === "inference" ? " · inference endpoint" : "")),
        h("span", { class: "grow" }),
        h("time", { class: "muted", title: exact(first.time) }, age(first.time)),
        first.prompt && copyButton(first.prompt.text.join("") + (completions[0]?.text.join("") ?? ""), "sample")),
      first.prompt ? h("div", { class: "prompt", tabindex: "0", role: "group", "aria-label": "Prompt" }, tokenText(first.prompt, { whitespace: options.whitespace, shade: false }))
        : h("p", { class: "muted" }, "The text of this sample is not recorded."),
      h("div", { class: completions.length > 1 ? "completions many" : "completions" }, sorted.map((completion) =>
        h("div", { class: "completion" },
          (completions.length > 1 || completion.advantage !== null || completion.stop === "cancelled") && h("div", { class: "score" },
            completion.advantage !== null && h("span", { class: completion.advantage >= 0 ? "plus" : "minus" },
              `advantage ${completion.advantage > 0 ? "+" : ""}${number(completion.advantage)}`),
            h("span", { class: "muted" }, `mean log-probability ${number(meanLogprob(completion))}`),
            completion.stop === "length" && h("span", { class: "muted" }, "cut at the limit"),
            completion.stop === "cancelled" && h("span", { class: "muted" }, "ended by the client")),
          tokenText(completion, { whitespace: options.whitespace })))),
      errors.map((sample) => h("p", { class: "error" }, sample.error)));
  }

  const query = (before) => get("samples", { ...filter, search: options.search, limit: PAGE, before });

  async function load() {
    const result = await query();
    ({ samples, more, total } = result);
    draw();
  }

  async function loadMore() {
    const result = await query(samples.at(-1)?.id);
    samples.push(...result.samples);
    more = result.more;
    draw();
  }

  return {
    element, load,
    refresh: debounce(400, () => {
      // Do not move what somebody reads: offer the new samples instead.
      if (scrollY > 200 || element.contains(document.activeElement)) fresh.hidden = false;
      else load().catch(() => {});
    }),
    redraw: draw,
    focusSearch: () => search.focus(),
  };
}

export function samplesView(root, { params }) {
  const filter = { run: params.get("run"), model: params.get("model"), group: params.get("group"), id: params.get("id") };
  const list = sampleList(filter, params);
  const runSelect = h("select", { "aria-label": "Run", change: () => setParams({ run: runSelect.value }, false) });
  fill(root, h("div", { class: "toolbar" }, h("h1", {}, "Samples"), h("span", { class: "grow" }), runSelect), list.element);

  async function load() {
    try {
      if (!app.runs.size) for (const run of (await get("runs")).runs) app.runs.set(run.id, run);
      const runs = [...app.runs.values()].sort((a, b) => (b.created ?? 0) - (a.created ?? 0)).slice(0, 500);
      fill(runSelect, h("option", { value: "" }, "All models"), runs.map((run) => h("option", { value: run.id }, runName(run))));
      runSelect.value = filter.run ?? "";
      await list.load();
    } catch (error) { fail(error, root); }
  }
  return {
    ready: load(),
    changes: (changes) => { if (changes.last_sample) list.refresh(); },
    reconnected: list.refresh,
    close: () => {},
  };
}
