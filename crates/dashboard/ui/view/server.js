// @ts-check
// The server: load, memory, disk and errors, with the figures of /metrics.

import { fill, h, tableHead } from "../dom.js";
import { age, bytes, exact, integer, short } from "../model/format.js";
import { figure, rates } from "../model/load.js";
import { runLink } from "../model/route.js";
import { empty } from "../part/empty.js";
import { spark } from "../part/run_parts.js";

/** @import { FailureDocument, FiguresDocument, ServerDocument } from "../documents.js" */
/** @import { OpenView } from "../types.js" */

/** Number of points of the small charts. */
const KEPT = 120;

/**
 * @param {string} label
 * @param {string} value
 * @param {string} note
 * @param {number[]} [values]
 */
function tile(label, value, note, values) {
  return h("div", { class: "tile" }, h("span", { class: "muted" }, label), h("b", {}, value), h("span", { class: "muted note" }, note),
    values && spark(values, 160, 28));
}

/**
 * @param {string} label
 * @param {number} used
 * @param {number} limit
 */
function meter(label, used, limit) {
  const share = limit ? Math.min(1, used / limit) : 0;
  const bar = h("span", { class: "fill" });
  bar.style.width = `${share * 100}%`;
  return h("div", { class: "meter-row" }, h("span", {}, label),
    h("span", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": limit, "aria-valuenow": used }, bar),
    h("span", { class: "num muted" }, `${bytes(used)} of ${bytes(limit)}`));
}

/** @type {OpenView} */
export function serverView(root, { store, fail }) {
  /** @type {Record<"load" | "queued" | "trained" | "sampled", number[]>} */
  const history = { load: [], queued: [], trained: [], sampled: [] };
  /** @type {FiguresDocument | null} */
  let last = null;
  let current = { load: 0, trained: 0, sampled: 0 };
  /** @type {string | null} */
  let shownErrors = null;
  const tiles = h("div", { class: "tiles" });
  const upstreams = h("div");
  const memory = h("div", { class: "meters" });
  const errors = h("div", { class: "scroll" });
  const allRows = h("tbody");
  const all = h("details", { class: "more" }, h("summary", {}, "All figures of /metrics"),
    h("table", {}, tableHead(["Name", "Value", "Meaning"]), allRows));
  fill(root, h("div", { class: "toolbar" }, h("h1", {}, "Server"), h("span", { class: "muted" }, `tinkex ${store.info.version}`)),
    tiles, upstreams, h("h2", {}, "Memory against limits"), memory, h("h2", {}, "Recent errors"), errors, all);

  /** @param {FiguresDocument} figures */
  function addToHistory(figures) {
    const now = rates(last, figures);
    if (now) {
      current = now;
      const points = { ...now, queued: figure(figures.gauges, "queued") };
      for (const name of /** @type {(keyof typeof points)[]} */ (Object.keys(points))) {
        history[name].push(points[name]);
        if (history[name].length > KEPT) history[name].shift();
      }
    }
    // Counters of a server that restarted are compared with each other.
    if (!last || now || figures.time < last.time) last = figures;
  }

  /** @param {ServerDocument} server */
  function draw({ figures, errors: failures }) {
    addToHistory(figures);
    drawTiles(figures);
    drawUpstreams(figures);
    drawMemory(figures);
    drawErrors(failures);
    fill(allRows, [...Object.entries(figures.counters), ...Object.entries(figures.gauges)].map(([name, row]) => h("tr", {},
      h("td", { class: "mono" }, `tinkex_${name}`), h("td", { class: "num", "data-metric": name }, integer(row.value)), h("td", {}, row.help))));
  }

  /** @param {FiguresDocument} figures */
  function drawTiles({ counters, gauges, limits, disk_free_bytes: free }) {
    const count = (/** @type {string} */ name) => figure(counters, name);
    const gauge = (/** @type {string} */ name) => figure(gauges, name);
    fill(tiles,
      tile("Engine load", `${Math.round(100 * current.load)} %`, "time in which the worker was busy", history.load),
      tile("Queue", integer(gauge("queued")), `of at most ${integer(limits.queued)} requests`, history.queued),
      tile("Training", `${short(current.trained)} tok/s`, `${short(count("trained_tokens_total"))} tokens since the start`, history.trained),
      tile("Sampling", `${short(current.sampled)} tok/s`, `${short(count("sampled_tokens_total"))} tokens since the start`, history.sampled),
      tile("Requests", short(count("requests_total")), `${integer(count("failed_requests_total"))} failed, ${integer(count("retries_total"))} repeated`),
      tile("Sessions", integer(gauge("sessions")), "open"),
      tile("KV cache", integer(gauge("cache_pages")), `pages in use; base models loaded: ${integer(gauge("loaded_models"))}`),
      tile("Disk", bytes(free), `free; payload file ${bytes(gauge("payload_bytes"))}`));
  }

  /** @param {FiguresDocument} figures */
  function drawUpstreams(figures) {
    const entries = figures.upstreams.map(({ name, up }) => h("li", {},
      h("span", { class: up ? "status training" : "status failed" }, up ? "● responds" : "✕ does not respond"), name));
    fill(upstreams, entries.length > 0 && [h("h2", {}, "Upstreams"), h("ul", { class: "runs-legend" }, entries)]);
  }

  /** @param {FiguresDocument} figures */
  function drawMemory({ gauges, limits, process_bytes: process }) {
    const sizes = Object.entries(limits.memory).map(([name, size]) => `${name.replaceAll("_", " ")} ${bytes(size)}`);
    fill(memory,
      meter("Queued requests", figure(gauges, "queued_bytes"), limits.memory.queue ?? 0),
      meter("Results in memory", figure(gauges, "result_bytes"), limits.memory.results ?? 0),
      h("p", { class: "muted" },
        `The process may use ${process ? bytes(process) : "an unknown amount of memory"}. Limits: ${sizes.join(", ")}.`));
  }

  /** @param {FailureDocument[]} failures */
  function drawErrors(failures) {
    // A link that is replaced would lose a click.
    const text = JSON.stringify(failures);
    if (text === shownErrors) return;
    shownErrors = text;
    fill(errors, failures.length === 0 ? empty("No errors", "Requests that fail are listed here.")
      : h("table", {}, tableHead(["Time", "Request", "Run", "Error"]),
        h("tbody", {}, failures.map(({ time, kind, run, error }) => h("tr", {},
          h("td", { class: "num", title: exact(time) }, age(time, store.now())), h("td", {}, kind.replaceAll("_", " ")),
          h("td", {}, run === null ? "–" : h("a", { href: runLink(run) }, store.nameOf(run))),
          h("td", { class: "error" }, error))))));
  }

  function update() {
    if (store.server) draw(store.server);
  }

  async function load() {
    try {
      await Promise.all([store.loadServer(), store.completeRuns()]);
      update();
    } catch (error) {
      fail(error);
    }
  }

  update();
  load();
  return { server: update, reconnected: load };
}
