// @ts-check
// The charts of all metrics of some runs.

import { NotFound, errorText } from "../api.js";
import { debounce, fill, h } from "../dom.js";
import { isExact, isSecondary, metricTitle, sortMetrics } from "../model/metrics.js";
import { LineChart } from "./chart.js";
import { ChartSync } from "./chart_sync.js";
import { empty } from "./empty.js";
import { RunMetrics } from "./run_metrics.js";
import { toast } from "./toast.js";

/** @import { Router } from "../router.js" */
/** @import { Store } from "../store.js" */
/** @import { Panel } from "../types.js" */

const DEFAULT_SMOOTHING = 0.6;

/**
 * Reads the options of charts from the address.
 * @param {URLSearchParams} params
 * @param {boolean} hasTimes
 */
function chartOptions(params, hasTimes) {
  const smoothing = Number(params.get("smooth") ?? DEFAULT_SMOOTHING);
  return {
    log: params.get("y") === "log",
    time: params.get("x") === "time" && hasTimes,
    smoothing: Number.isFinite(smoothing) ? Math.min(0.99, Math.max(0, smoothing)) : DEFAULT_SMOOTHING,
  };
}

/**
 * @param {Store} store
 * @param {Router} router
 * @param {string[]} ids
 * @returns {Panel & Required<Pick<Panel, "update" | "load" | "refresh" | "redraw" | "resetZoom" | "close">>}
 */
export function chartPanel(store, router, ids) {
  // Run folders have no times.
  const hasTimes = !store.isFolders;
  const runs = ids.map((id) => new RunMetrics(id));
  /** @type {Map<string, LineChart>} */
  const charts = new Map();
  let options = chartOptions(router.params, hasTimes);
  let isClosed = false;
  /** Whether the memory has the points of a zoomed range only. */
  let isPartial = false;
  /** @type {Promise<unknown> | null} */
  let loading = null;

  const sync = new ChartSync(debounce(150, zoomed));
  const reset = h("button", { type: "button", hidden: true, click: () => sync.setZoom(null) }, "Reset zoom");
  const horizontal = segmented("x", "Horizontal axis", ["step", "time"]);
  const vertical = segmented("y", "Vertical axis", ["linear", "log"]);
  const smoothing = h("input", {
    type: "range", min: "0", max: "0.99", step: "0.01", "aria-label": "Smoothing",
    // While the slider moves, the address stays: browsers limit how often it may change.
    input: () => setSmoothing(Number(smoothing.value)),
    change: () => router.set({ smooth: Number(smoothing.value) === DEFAULT_SMOOTHING ? null : smoothing.value }),
  });
  const smoothingText = h("output", { class: "num" });
  const controls = h("div", { class: "controls" },
    hasTimes && horizontal.element, vertical.element,
    h("label", { class: "slider" }, "Smoothing", smoothing, smoothingText),
    reset, h("span", { class: "muted hint" }, "drag to zoom, double-click to reset"));
  const grid = h("div", { class: "charts" });
  const moreGrid = h("div", { class: "charts" });
  const more = h("details", { class: "more" }, h("summary", {}, "More metrics"), moreGrid);
  const content = h("div", {}, h("p", { class: "muted loading" }, "Loading metrics…"));
  const element = h("section", { "aria-label": "Charts" }, controls, content);

  /**
   * Buttons of which one is pressed. The first value is the default, which the address leaves out.
   * @param {string} name
   * @param {string} label
   * @param {string[]} values
   */
  function segmented(name, label, values) {
    const buttons = values.map((value, n) => h("button", {
      type: "button", click: () => router.set({ [name]: n === 0 ? null : value }),
    }, value));
    return {
      element: h("span", { class: "segmented", role: "group", "aria-label": label }, buttons),
      /** @param {string} current */
      press: (current) => buttons.forEach((button, n) => button.setAttribute("aria-pressed", String(values[n] === current))),
    };
  }

  /** @param {number} value */
  function setSmoothing(value) {
    options.smoothing = value;
    smoothingText.textContent = value.toFixed(2);
    for (const chart of charts.values()) chart.setSmoothing(value);
  }

  /** @param {URLSearchParams} params */
  function update(params) {
    const before = options;
    options = chartOptions(params, hasTimes);
    horizontal.press(options.time ? "time" : "step");
    vertical.press(options.log ? "log" : "linear");
    smoothing.value = String(options.smoothing);
    smoothingText.textContent = options.smoothing.toFixed(2);
    if (before.time !== options.time) sync.setZoom(null);
    if (charts.size) draw();
  }

  function draw() {
    const names = sortMetrics(runs.flatMap((run) => Object.keys(run.curves.metrics)));
    if (!names.length) {
      fill(content, store.info.history
        ? empty("No step yet", "Curves appear after the first optimizer step.")
        : empty("The history is off", "The server was started with --history 0. Start it without the option:", "tinkex serve"));
      return;
    }
    for (const name of names) chartOf(name).show(seriesOf(name), options);
    if (!grid.isConnected) fill(content, grid, more);
    more.hidden = !moreGrid.children.length;
  }

  /** @param {string} name */
  function chartOf(name) {
    let chart = charts.get(name);
    if (!chart) {
      chart = new LineChart(metricTitle(name), sync, isExact(name));
      charts.set(name, chart);
      (isSecondary(name) ? moreGrid : grid).append(chart.element);
    }
    return chart;
  }

  /** @param {string} name */
  function seriesOf(name) {
    return runs.flatMap((run, index) => {
      const curve = run.curves.metrics[name];
      if (!curve) return [];
      const { y, mean, weights } = curve;
      return [{ label: store.nameOf(run.id), index, x: options.time ? curve.time : curve.step, y, mean, weights }];
    });
  }

  /**
   * Reads the metrics of every run. A run that was deleted does not hide the others.
   * @param {(run: RunMetrics) => Promise<void>} read
   */
  async function readAll(read) {
    const present = runs.filter((run) => !store.isDeleted(run.id));
    await Promise.all(present.map(async (run) => {
      try {
        await read(run);
      } catch (error) {
        if (!(error instanceof NotFound)) throw error;
        store.markDeleted(run.id);
        if (runs.length === 1) throw error;
      }
    }));
  }

  /** @param {[number, number] | null} zoom */
  async function zoomed(zoom) {
    if (isClosed) return;
    reset.hidden = !zoom;
    // The server selects points by step.
    const steps = zoom && !options.time ? zoom : null;
    if (runs.every((run) => run.curves.full && !isPartial) || (!steps && !isPartial)) {
      // Points may have arrived during the zoom.
      if (!zoom) refresh();
      return;
    }
    isPartial = steps !== null;
    try {
      await readAll((run) => run.load(steps));
      if (!isClosed) draw();
    } catch (error) {
      toast(errorText(error));
    }
  }

  let isRefreshing = false;
  let isOutdated = false;

  /** Appends new points; at most one request per run at a time. */
  async function refresh() {
    if (isRefreshing) {
      isOutdated = true;
      return;
    }
    isRefreshing = true;
    try {
      // Points that are appended while all are read would be replaced.
      await loading;
      do {
        isOutdated = false;
        if (sync.zoom || isClosed) break;
        await readAll((run) => run.append());
        if (!isClosed) draw();
      } while (isOutdated);
    } catch {
      // The next change tries again.
    } finally {
      isRefreshing = false;
    }
  }

  async function load() {
    loading = readAll((run) => run.load(null));
    await loading;
    if (!isClosed) draw();
  }

  update(router.params);
  return {
    element, update, load, refresh,
    redraw: () => sync.redraw(),
    resetZoom: () => sync.setZoom(null),
    close: () => {
      isClosed = true;
      for (const chart of charts.values()) chart.close();
    },
  };
}
