// @ts-check
// The requests of a run over time: one lane for training, one for sampling. Gaps are the client's own
// time.

import { get } from "../api.js";
import { LatestRequest, choiceList, fill, h, perFrame, swatch, tableHead } from "../dom.js";
import { clockTime, exact, integer, seconds } from "../model/format.js";
import { LANES, WINDOWS, requestWindow, summarize } from "../model/requests.js";
import { isDark } from "../theme.js";
import { empty } from "./empty.js";
import { hideTip, showTip } from "./tip.js";

/** @import { RequestsDocument } from "../documents.js" */
/** @import { RequestTime } from "../model/requests.js" */
/** @import { Router } from "../router.js" */
/** @import { Panel } from "../types.js" */

/** Height of a lane, gap after it and width of its label, in pixels. */
const LANE = 44;
const GAP = 18;
const LEFT = 74;
/** Number of requests in the table. */
const LISTED = 30;
/** @type {Record<string, string>} */
const LIGHT = {
  forward_backward: "#0b6bcb", forward: "#3b7ea1", optim_step: "#c4530a", sample: "#00795c", other: "#6b6b6b", failed: "#b3261e", queued: "#b9c4d0",
};
/** @type {Record<string, string>} */
const DARK = {
  forward_backward: "#5cb3ff", forward: "#9fd3f2", optim_step: "#ff9d4d", sample: "#2fd2a6", other: "#b0b0b0", failed: "#ff8a80", queued: "#4c5866",
};

/** @param {string} name */
function color(name) {
  const colors = isDark() ? DARK : LIGHT;
  return colors[name] ?? colors.other;
}

/** @param {string} kind */
const words = (kind) => kind.replaceAll("_", " ");

/**
 * @param {Router} router
 * @param {string} id
 * @returns {Panel}
 */
export function timeline(router, id) {
  /** @type {RequestsDocument | null} */
  let data = null;
  let range = "all";
  /**
   * Rectangles of the last drawing.
   * @type {{ x: number, y: number, width: number, request: RequestTime }[]}
   */
  let boxes = [];
  const latest = new LatestRequest();
  const canvas = h("canvas", { class: "timeline", tabindex: "0", role: "img", pointermove: hover, pointerleave: hideTip });
  const summary = h("p", { class: "summary" });
  const table = h("div", { class: "scroll" }, h("p", { class: "muted loading" }, "Loading requests…"));
  const select = choiceList("Time range", Object.keys(WINDOWS).map((name) => [name, name === "all" ? "all" : `last ${name}`]),
    (value) => router.set({ range: value === "all" ? null : value }));
  const key = h("span", { class: "key" });
  const element = h("section", { "aria-label": "Requests" },
    h("div", { class: "controls" }, h("label", {}, "Range ", select), key), canvas, summary,
    h("h2", {}, "Last requests"), table);
  const draw = perFrame(paint);
  const observer = new ResizeObserver(draw);
  observer.observe(canvas);

  function paint() {
    const context = canvas.getContext("2d");
    if (!data || !canvas.clientWidth || !context) return;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = LANES.length * (LANE + GAP) + 16;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(canvas);
    const { from, to, requests } = requestWindow(data, range);
    /** @param {number} time */
    const toX = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - 4);
    boxes = [];
    context.font = `12px ${style.fontFamily}`;
    context.textBaseline = "middle";
    context.textAlign = "left";
    LANES.forEach((lane, n) => {
      const top = n * (LANE + GAP);
      context.fillStyle = style.getPropertyValue("--muted");
      context.fillText(lane, 0, top + LANE / 2);
      context.fillStyle = style.getPropertyValue("--sunken");
      context.fillRect(LEFT, top, width - LEFT - 4, LANE);
      for (const request of requests) {
        if (request.lane === lane) drawRequest(context, request, top, from, toX);
      }
    });
    context.fillStyle = style.getPropertyValue("--muted");
    const bottom = LANES.length * (LANE + GAP) - GAP + 12;
    context.fillText(clockTime(from), LEFT, bottom);
    context.textAlign = "right";
    context.fillText(clockTime(to), width - 4, bottom);
  }

  /**
   * Draws the time of execution, and the time in the queue as a thin bar before it.
   * @param {CanvasRenderingContext2D} context
   * @param {RequestTime} request
   * @param {number} top
   * @param {number} from
   * @param {(time: number) => number} toX
   */
  function drawRequest(context, request, top, from, toX) {
    const x = toX(Math.max(from, request.start));
    if (request.queued > 0.001) {
      const queued = toX(Math.max(from, request.start - request.queued * 1000));
      context.fillStyle = color("queued");
      context.fillRect(queued, top + LANE - 6, Math.max(1, x - queued), 6);
    }
    context.fillStyle = color(request.error ? "failed" : request.kind);
    const width = Math.max(1, toX(request.end) - x);
    context.fillRect(x, top + 3, width, LANE - 11);
    boxes.push({ x, y: top, width: Math.max(3, width), request });
  }

  /** @param {PointerEvent} event */
  function hover(event) {
    const outline = canvas.getBoundingClientRect();
    const x = event.clientX - outline.left;
    const y = event.clientY - outline.top;
    const hit = boxes.findLast((box) => x >= box.x - 1 && x <= box.x + box.width + 1 && y >= box.y && y <= box.y + LANE);
    if (!hit) {
      hideTip();
      return;
    }
    const { request } = hit;
    const rectangle = { left: event.clientX + 12, top: event.clientY, bottom: event.clientY + 8 };
    showTip(rectangle, h("b", {}, words(request.kind), request.seq ? ` #${request.seq}` : ""),
      h("div", {}, `executed in ${seconds(request.compute)}`), h("div", {}, `queued for ${seconds(request.queued)}`),
      request.tokens ? h("div", {}, `${integer(request.tokens)} tokens`) : null, h("div", { class: "muted" }, exact(request.end)),
      request.error && h("div", { class: "error" }, request.error));
  }

  function redraw() {
    if (!data) return;
    const { from, requests } = requestWindow(data, range);
    const kinds = [...new Set(requests.map((request) => request.kind))];
    /** @param {string} name */
    const entry = (name) => h("span", { class: "entry" }, swatch(color(name)), words(name));
    fill(key, kinds.map(entry), entry("queued"));
    const text = summarize(requests, from, data.queued);
    summary.textContent = text;
    canvas.setAttribute("aria-label", `Timeline. ${text}`);
    fill(table, requests.length ? requestTable(requests)
      : empty("No finished request", "Requests appear here as soon as they are finished."));
    draw();
  }

  /** @param {RequestTime[]} requests */
  function requestTable(requests) {
    const newest = [...requests].sort((a, b) => b.end - a.end).slice(0, LISTED);
    return h("table", {}, tableHead(["Request", "Finished", "Queued", "Executed", "Tokens", "Result"]),
      h("tbody", {}, newest.map((request) => h("tr", {},
        h("td", {}, words(request.kind), h("span", { class: "muted" }, request.seq ? ` #${request.seq}` : "")),
        h("td", { class: "num", title: exact(request.end) }, clockTime(request.end)), h("td", { class: "num" }, seconds(request.queued)),
        h("td", { class: "num" }, seconds(request.compute)), h("td", { class: "num" }, request.tokens ? integer(request.tokens) : "–"),
        h("td", {}, request.error ? h("span", { class: "error" }, request.error) : "ok")))));
  }

  /** @param {URLSearchParams} params */
  function update(params) {
    const wanted = params.get("range") ?? "all";
    range = wanted in WINDOWS ? wanted : "all";
    select.value = range;
    redraw();
  }

  async function load() {
    await latest.run(get("requests", { id }), (document) => {
      data = document;
      redraw();
    });
  }

  update(router.params);
  return {
    element, update, load, redraw,
    refresh: () => { load().catch(() => {}); },
    close: () => {
      latest.cancel();
      observer.disconnect();
      hideTip();
    },
  };
}
