// A run, and several runs over each other.

import { get, post } from "./api.js";
import { app, fail, runLink, setParams } from "./app.js";
import { ChartSync, LineChart, palette } from "./chart.js";
import { copyButton, debounce, empty, fill, h, toast } from "./dom.js";
import { age, bytes, exact, integer, number, runName, seconds, short, shortId, shortPath } from "./format.js";
import { statusBadge } from "./runs.js";
import { sampleList } from "./samples.js";
import { timeline } from "./timeline.js";

/**
 * Number of points per metric to ask for: the minimum and the maximum of every pixel of a chart. The
 * columns are those of `.charts` in style.css.
 */
function pointCount() {
  const width = document.getElementById("main").clientWidth;
  const columns = Math.max(1, Math.floor(width / 356));
  return Math.min(4000, Math.max(400, Math.ceil((2 * width) / columns)));
}
const TITLES = {
  "unclipped_grad_l2:mean": "gradient norm", learning_rate: "learning rate", "loss:sum": "loss, sum of the batch",
  eval_loss: "evaluation loss", tokens_per_second: "tokens/s", "forward: loss per token": "loss per token of forward passes",
};
const FIRST = [
  "loss per token", "loss", "reward", "reward_mean", "forward: loss per token", "eval_loss", "tokens/s", "tokens_per_second",
  "unclipped_grad_l2:mean", "learning_rate", "kl:mean", "entropy:mean",
];
const MORE = [
  "tokens", "loss:sum", "tokens:sum", "weight:sum", "compute seconds", "queued seconds", "epoch",
];

const EXACT = ["learning_rate", "epoch", "tokens", "tokens:sum", "weight:sum"];

function title(name) {
  return TITLES[name] ?? name.replace(/:(mean|sum|max|min)$/, (_, kind) => ` (${kind})`).replaceAll("_", " ");
}

function order(name) {
  const first = FIRST.indexOf(name);
  if (first >= 0) return first;
  return name.startsWith("forward: ") || MORE.includes(name) ? 1000 : 100;
}

/** The metrics of a run in memory: fetched once, then appended. */
class RunMetrics {
  constructor(id) {
    this.id = id;
    this.metrics = {};
    this.last = 0;
    this.full = false;
  }

  async load(zoom) {
    const range = zoom ? { from: Math.max(0, Math.floor(zoom[0]) - 1), to: Math.ceil(zoom[1]) + 1 } : {};
    const { metrics } = await get("metrics", { id: this.id, points: pointCount(), ...range });
    this.metrics = {};
    this.last = 0;
    this.add(metrics);
    this.full = Object.values(metrics).every((curve) => !curve.mean.length);
  }

  /** Reads the points after the last one. A forward pass has the step of the optimizer step before it. */
  async append() {
    const from = this.last;
    const { metrics } = await get("metrics", { id: this.id, points: pointCount(), from });
    const curves = Object.entries(metrics);
    // So many new points that the server has combined them.
    if (curves.some(([, curve]) => curve.mean.length)) return this.load();
    this.add(Object.fromEntries(curves.map(([name, curve]) => {
      const steps = (this.metrics[name]?.step ?? []).filter((step) => step >= from);
      // The minimum and the maximum of a range can be the same point.
      const known = this.metrics[name]?.mean.length ? new Set(steps).size : steps.length;
      return [name, { step: curve.step.slice(known), time: curve.time.slice(known), value: curve.value.slice(known), mean: [] }];
    })));
    return undefined;
  }

  add(metrics) {
    for (const [name, curve] of Object.entries(metrics)) {
      const known = (this.metrics[name] ??= { step: [], time: [], y: [], mean: [], weights: [] });
      const downsampled = curve.mean.length > 0;
      for (let n = 0; n < curve.step.length; n++) {
        known.step.push(curve.step[n]);
        known.time.push(curve.time[n]);
        known.y.push(curve.value[n] ?? NaN);
        if (downsampled || known.mean.length) {
          known.mean.push((downsampled ? curve.mean[n] : curve.value[n]) ?? NaN);
          known.weights.push(n > 0 ? Math.max(1, curve.step[n] - curve.step[n - 1]) : 1);
        }
      }
      const last = known.step.at(-1) ?? 0;
      if (last > this.last) this.last = last;
    }
  }

  get count() {
    return Math.max(0, ...Object.values(this.metrics).map((curve) => curve.step.length));
  }
}

/** Charts of all metrics of some runs. */
function chartPanel(ids, params) {
  const folders = app.info?.kind === "folders";
  const options = {
    log: params.get("y") === "log",
    time: params.get("x") === "time" && !folders,
    smoothing: Math.min(0.99, Math.max(0, Number(params.get("smooth") ?? 0.6))) || 0,
  };
  const runs = ids.map((id) => new RunMetrics(id));
  const charts = new Map();
  let zoomed = false;
  const sync = new ChartSync(debounce(150, async (zoom) => {
    reset.hidden = !zoom;
    const steps = zoom && !options.time ? zoom : null;
    if (runs.every((run) => run.full) || (!steps && !zoomed)) {
      // Points that arrived during the zoom.
      if (!zoom) refresh();
      return;
    }
    zoomed = Boolean(steps);
    try {
      await Promise.all(runs.map((run) => run.load(steps)));
      update();
    } catch (error) { toast(error.message); }
  }));
  const reset = h("button", { type: "button", hidden: true, click: () => sync.setZoom(null) }, "Reset zoom");
  const smoothValue = h("output", { class: "num" }, options.smoothing.toFixed(2));
  const choice = (name, label, values, current, apply) => h("span", { class: "segmented", role: "group", "aria-label": label },
    values.map((value) => h("button", {
      type: "button", "aria-pressed": String(value === current),
      click: (event) => {
        for (const button of event.target.parentNode.children) button.setAttribute("aria-pressed", String(button === event.target));
        setParams({ [name]: value });
        apply(value);
      },
    }, value)));
  const controls = h("div", { class: "controls" },
    !folders && choice("x", "Horizontal axis", ["step", "time"], options.time ? "time" : "step", (value) => {
      options.time = value === "time";
      sync.setZoom(null);
      update();
    }),
    choice("y", "Vertical axis", ["linear", "log"], options.log ? "log" : "linear", (value) => {
      options.log = value === "log";
      update();
    }),
    h("label", { class: "slider" }, "Smoothing", h("input", {
      type: "range", min: "0", max: "0.99", step: "0.01", value: options.smoothing, "aria-label": "Smoothing",
      input: (event) => {
        options.smoothing = Number(event.target.value);
        smoothValue.textContent = options.smoothing.toFixed(2);
        for (const chart of charts.values()) chart.setOptions(options);
        setParams({ smooth: options.smoothing.toFixed(2) });
      },
    }), smoothValue),
    reset,
    h("span", { class: "muted hint" }, "drag to zoom, double-click to reset"));
  const grid = h("div", { class: "charts" });
  const moreGrid = h("div", { class: "charts" });
  const more = h("details", { class: "more" }, h("summary", {}, "More metrics"), moreGrid);
  const content = h("div", {}, h("p", { class: "muted loading" }, "Loading metrics…"));
  const element = h("section", { "aria-label": "Charts" }, controls, content);

  function update() {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
    names.sort((a, b) => order(a) - order(b) || a.localeCompare(b));
    if (!names.length) {
      fill(content, app.info?.history === false
        ? empty("The history is off", "The server was started with --history 0. Start it without the option:", "tinkex serve")
        : empty("No step yet", "Curves appear after the first optimizer step."));
      return;
    }
    for (const name of names) {
      let chart = charts.get(name);
      if (!chart) {
        chart = new LineChart(title(name), sync);
        // A schedule has no noise to smooth.
        chart.exact = EXACT.includes(name);
        charts.set(name, chart);
        (order(name) >= 1000 ? moreGrid : grid).append(chart.element);
      }
      chart.setOptions(options);
      chart.setSeries(runs.flatMap((run, index) => {
        const curve = run.metrics[name];
        if (!curve) return [];
        const label = runName(app.runs.get(run.id) ?? { id: run.id });
        const { y, mean, weights } = curve;
        return [{ label, index, x: options.time ? curve.time : curve.step, y, mean, weights }];
      }));
    }
    if (!grid.isConnected) fill(content, grid, more);
    more.hidden = !moreGrid.children.length;
  }

  let running = false;
  let again = false;
  /** Appends new points; at most one request at a time. */
  async function refresh() {
    if (running) { again = true; return; }
    running = true;
    try {
      // Points that are appended while all are loaded would be replaced.
      await loading;
      do {
        again = false;
        if (sync.zoom) break;
        await Promise.all(runs.map((run) => (run.count > 3 * pointCount() ? run.load() : run.append())));
        update();
      } while (again);
    } catch { /* The next change tries again. */ } finally { running = false; }
  }

  let loading = null;
  async function load() {
    loading = Promise.all(runs.map((run) => run.load()));
    await loading;
    update();
  }

  return {
    element, load, refresh,
    redraw: () => sync.redraw(),
    close: () => { for (const chart of charts.values()) chart.close(); },
    resetZoom: () => sync.setZoom(null),
  };
}

function settingsTable(values) {
  const rows = Object.entries(values ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));
  return rows.length ? h("dl", { class: "settings" }, rows.map(([name, value]) =>
    [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, text(value))])) : null;
}

function checkpointTable(run) {
  if (!run.saved?.length) {
    return empty("No checkpoint yet", "A program saves one with save_weights or save_weights_for_sampler; tinkex train does at its end.");
  }
  const row = (saved) => {
    const downloadable = saved.kind === "sampler_weights" && app.info?.kind === "server";
    const files = h("span", { class: "files" });
    return h("tr", {},
      h("td", {}, h("span", { class: "mono" }, saved.name)),
      h("td", {}, saved.kind === "sampler_weights" ? "for sampling" : saved.kind === "weights" ? "for training" : saved.kind),
      h("td", { class: "num" }, saved.size_bytes === undefined ? `step ${integer(saved.step)}` : bytes(saved.size_bytes)),
      h("td", { class: "num", title: exact(saved.created) }, saved.created ? age(saved.created) : "–"),
      h("td", { class: "num", title: exact(saved.expires) }, saved.expires ? `in ${seconds((saved.expires - Date.now()) / 1000)}` : "never"),
      h("td", { class: "actions" },
        h("span", { class: "mono muted path", title: saved.path }, shortPath(saved.path)), copyButton(saved.path, "path"),
        downloadable && h("button", { type: "button", click: async (event) => {
          event.target.disabled = true;
          try {
            const { urls } = await post("download", { path: saved.path });
            fill(files, Object.entries(urls).map(([name, url]) => [" ", h("a", { href: new URL(url).pathname, download: name }, name)]));
          } catch (error) { toast(error.message); event.target.disabled = false; }
        } }, "Download"),
        app.info?.views.includes("playground") && saved.kind !== "external_weights"
          && h("a", { class: "button", href: `#/playground?${new URLSearchParams({ model: saved.path })}` }, "Try"),
        files));
  };
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Name", "Kind", "Size", "Saved", "Expires", "Path"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, run.saved.map(row))));
}

export function runView(root, { id, params }) {
  const folders = app.info?.kind === "folders";
  const tabs = folders ? ["charts", "checkpoints", "settings"] : ["charts", "samples", "checkpoints", "requests", "settings"];
  let tab = tabs.includes(params.get("tab")) ? params.get("tab") : "charts";
  let run = app.runs.get(id) ?? { id, status: "", losses: [] };
  let panel = null;
  const header = h("div", { class: "run-header" });
  const tabBar = h("div", { class: "tabs", role: "tablist", "aria-label": "Parts of the run" });
  const content = h("div", { class: "panel", role: "tabpanel" });
  fill(root, h("p", { class: "crumbs" }, h("a", { href: "#/runs" }, "← Runs")), header, tabBar, content);

  // These elements stay: a click on one that is replaced would be lost.
  const heading = h("h1");
  const facts = h("span", { class: "contents" });
  const problemLine = h("p", { class: "error" });
  fill(header, heading,
    h("p", { class: "facts" }, facts, h("span", { class: "fact mono", title: id }, shortId(id), copyButton(id, "id"))), problemLine);

  function drawHeader() {
    const fact = (label, value, name) => h("span", { class: "fact", title: name }, h("span", { class: "muted" }, label), " ", value);
    fill(heading, runName(run), " ", run.status && statusBadge(run.status));
    fill(facts,
      run.base_model && fact("base model", run.base_model),
      run.rank && fact("rank", run.rank),
      fact("steps", integer(run.steps ?? 0) + (run.total_steps ? `/${integer(run.total_steps)}` : "")),
      fact("loss per token", number(run.loss)),
      run.tokens_per_second && fact("speed", `${short(run.tokens_per_second)} tok/s`),
      run.tokens ? fact("tokens", short(run.tokens)) : null,
      run.created && fact("started", age(run.created), exact(run.created)));
    problemLine.textContent = run.error ?? "";
    problemLine.hidden = !run.error;
  }

  function drawTabs() {
    fill(tabBar, tabs.map((name) => h("button", {
      type: "button", role: "tab", "aria-selected": String(name === tab), tabindex: name === tab ? "0" : "-1",
      click: () => { tab = name; setParams({ tab: name === "charts" ? null : name }); open(); },
      keydown: (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!move) return;
        tab = tabs[(tabs.indexOf(name) + move + tabs.length) % tabs.length];
        setParams({ tab: tab === "charts" ? null : tab });
        open();
        tabBar.querySelector("[aria-selected=true]").focus();
        event.stopPropagation();
      },
    }, name[0].toUpperCase() + name.slice(1))));
  }

  async function open() {
    drawTabs();
    panel?.close?.();
    panel = null;
    try {
      if (tab === "charts") {
        panel = chartPanel([id], params);
        fill(content, panel.element);
        await panel.load();
      } else if (tab === "samples") {
        panel = sampleList({ run: id });
        fill(content, panel.element);
        await panel.load();
      } else if (tab === "requests") {
        panel = timeline(id);
        fill(content, panel.element);
        await panel.load();
      } else if (tab === "checkpoints") {
        fill(content, checkpointTable(run));
        panel = { refresh: debounce(1000, () => reload(true)) };
      } else {
        fill(content, h("h2", {}, "Hyperparameters"), settingsTable(run.settings) ?? h("p", { class: "muted" }, "None."),
          h("h2", {}, "Metadata"), settingsTable(run.metadata) ?? h("p", { class: "muted" }, "The program has set none."),
          settingsTable(run.session_metadata) && [h("h2", {}, "Metadata of the session"), settingsTable(run.session_metadata)],
          run.tags?.length ? h("p", {}, "Tags: ", run.tags.join(", ")) : null);
      }
    } catch (error) { fail(error, content); }
  }

  async function reload(redraw) {
    run = await get("run", { id });
    app.runs.set(id, { ...app.runs.get(id), ...run });
    drawHeader();
    if (redraw && tab === "checkpoints") fill(content, checkpointTable(run));
  }

  async function load() {
    try {
      // Charts, samples and requests do not need the settings of the run: read both at once.
      const needed = tab === "checkpoints" || tab === "settings";
      const loaded = reload(false);
      if (needed) await loaded;
      await Promise.all([loaded, open()]);
    } catch (error) { fail(error, root); }
  }
  drawHeader();
  drawTabs();
  const clock = setInterval(drawHeader, 10000);
  return {
    ready: load(),
    changes: (changes) => {
      const changed = changes.runs?.find((other) => other.id === id);
      if (changed) { run = { ...run, ...changed }; drawHeader(); }
      if (changed || tab === "samples") panel?.refresh?.();
    },
    reconnected: () => { reload(true).catch(() => {}); panel?.refresh?.(); },
    redraw: () => panel?.redraw?.(),
    key: (event) => { if (event.key === "Escape") panel?.resetZoom?.(); },
    close: () => { clearInterval(clock); panel?.close?.(); },
  };
}

export function compareView(root, { params }) {
  const ids = (params.get("runs") ?? "").split(",").filter(Boolean).slice(0, 12);
  const panel = chartPanel(ids, params);
  const legend = h("ul", { class: "runs-legend" });
  fill(root, h("p", { class: "crumbs" }, h("a", { href: "#/runs" }, "← Runs")), h("h1", {}, "Compare"), legend, panel.element);

  function drawLegend() {
    fill(legend, ids.map((id, index) => {
      const run = app.runs.get(id) ?? { id };
      const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = palette(index);
      return h("li", {}, swatch, h("a", { href: runLink(id) }, runName(run)), " ",
        h("span", { class: "muted" }, `${run.base_model ?? ""} · step ${integer(run.steps ?? 0)} · loss ${number(run.loss)}`));
    }));
  }

  async function load() {
    try {
      if (!app.runs.size) for (const run of (await get("runs")).runs) app.runs.set(run.id, run);
      drawLegend();
      await panel.load();
    } catch (error) { fail(error, root); }
  }
  return {
    ready: load(),
    changes: (changes) => {
      if (changes.runs?.some((run) => ids.includes(run.id))) { drawLegend(); panel.refresh(); }
    },
    reconnected: panel.refresh,
    redraw: () => { drawLegend(); panel.redraw(); },
    key: (event) => { if (event.key === "Escape") panel.resetZoom(); },
    close: panel.close,
  };
}
