// The server: load, memory, disk and errors. The figures are those of /metrics.

import { get } from "./api.js";
import { app, fail, runLink } from "./app.js";
import { empty, fill, h } from "./dom.js";
import { age, bytes, exact, integer, number, runName, short, shortId } from "./format.js";
import { spark } from "./runs.js";

const KEPT = 120;

export function serverView(root) {
  const history = { load: [], queued: [], trained: [], sampled: [] };
  let last = null;
  let shownErrors = null;
  const tiles = h("div", { class: "tiles" });
  const upstreams = h("div", {});
  const memory = h("div", { class: "meters" });
  const all = h("details", { class: "more" });
  const errors = h("div", { class: "scroll" });
  fill(root, h("div", { class: "toolbar" }, h("h1", {}, "Server"), h("span", { class: "muted" }, `tinkex ${app.info?.version ?? ""}`)),
    tiles, upstreams, h("h2", {}, "Memory against limits"), memory, h("h2", {}, "Recent errors"), errors, all);

  function tile(label, value, note, values) {
    return h("div", { class: "tile" }, h("span", { class: "muted" }, label), h("b", {}, value), h("span", { class: "muted note" }, note ?? ""), values && spark(values, 160, 28));
  }

  function meter(label, used, limit) {
    const share = limit ? Math.min(1, used / limit) : 0;
    const bar = h("span", { class: "fill" });
    bar.style.width = `${share * 100}%`;
    return h("div", { class: "meter-row" }, h("span", {}, label),
      h("span", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": String(limit), "aria-valuenow": String(used) }, bar),
      h("span", { class: "num muted" }, `${bytes(used)} of ${bytes(limit)}`));
  }

  function update({ figures, errors: failed }) {
    const { counters, gauges, limits } = figures;
    const value = (rows, name) => rows[name]?.value ?? 0;
    let [load, trained, sampled] = [0, 0, 0];
    if (last && figures.time > last.time) {
      const elapsed = (figures.time - last.time) / 1000;
      const rate = (name) => Math.max(0, (value(counters, name) - (last.counters[name]?.value ?? 0)) / elapsed);
      load = Math.min(1, rate("busy_microseconds_total") / 1e6);
      [trained, sampled] = [rate("trained_tokens_total"), rate("sampled_tokens_total")];
      for (const [name, point] of [["load", load], ["queued", value(gauges, "queued")], ["trained", trained], ["sampled", sampled]]) {
        history[name].push(point);
        if (history[name].length > KEPT) history[name].shift();
      }
    }
    if (!last || figures.time > last.time) last = figures;
    fill(tiles,
      tile("Engine load", `${Math.round(100 * load)} %`, "time in which the worker was busy", history.load),
      tile("Queue", integer(value(gauges, "queued")), `of at most ${integer(limits.queued)} requests`, history.queued),
      tile("Training", `${short(trained)} tok/s`, `${short(value(counters, "trained_tokens_total"))} tokens since the start`, history.trained),
      tile("Sampling", `${short(sampled)} tok/s`, `${short(value(counters, "sampled_tokens_total"))} tokens since the start`, history.sampled),
      tile("Requests", short(value(counters, "jobs_total")), `${integer(value(counters, "failed_jobs_total"))} failed, ${integer(value(counters, "retries_total"))} repeated`),
      tile("Sessions", integer(value(gauges, "sessions")), "open"),
      tile("KV cache", integer(value(gauges, "cache_pages")), `pages in use; base models loaded: ${integer(value(gauges, "loaded_models"))}`),
      tile("Disk", figures.disk_free_bytes === null ? "–" : bytes(figures.disk_free_bytes), `free; payload file ${bytes(value(gauges, "payload_bytes"))}`));
    fill(upstreams, figures.upstreams?.length ? [h("h2", {}, "Upstreams"), h("ul", { class: "runs-legend" }, figures.upstreams.map((one) =>
      h("li", {}, h("span", { class: one.up ? "status training" : "status failed" }, one.up ? "● responds" : "✕ does not respond"), one.name)))] : null);
    fill(memory,
      meter("Queued requests", value(gauges, "queued_bytes"), limits.memory.queue),
      meter("Results in memory", value(gauges, "answer_bytes"), limits.memory.results),
      h("p", { class: "muted" }, `The process may use ${figures.process_bytes ? bytes(figures.process_bytes) : "an unknown amount of memory"}. Limits: ${
        Object.entries(limits.memory).map(([name, size]) => `${name.replaceAll("_", " ")} ${bytes(size)}`).join(", ")}.`));
    // A link that is replaced would lose a click.
    const newest = JSON.stringify(failed);
    if (newest !== shownErrors) fill(errors, failed.length ? h("table", {}, h("thead", {}, h("tr", {}, ["Time", "Request", "Run", "Error"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, failed.map((failure) => h("tr", {},
        h("td", { class: "num", title: exact(failure.time) }, age(failure.time)), h("td", {}, failure.kind.replaceAll("_", " ")),
        h("td", {}, failure.run ? h("a", { href: runLink(failure.run) }, runName(app.runs.get(failure.run) ?? { id: failure.run })) : "–"),
        h("td", { class: "error" }, failure.error))))) : empty("No errors", "Requests that fail are listed here."));
    shownErrors = newest;
    const open = all.open;
    fill(all, h("summary", {}, "All figures of /metrics"), h("table", {}, h("thead", {}, h("tr", {}, ["Name", "Value", "Meaning"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, [...Object.entries(counters), ...Object.entries(gauges)].map(([name, row]) => h("tr", {},
        h("td", { class: "mono" }, `tinkex_${name}`), h("td", { class: "num", "data-metric": name }, integer(row.value)), h("td", {}, row.help))))));
    all.open = open;
  }

  async function load() {
    try { update(await get("server")); } catch (error) { fail(error, root); }
  }
  return { ready: load(), server: update, reconnected: load };
}
