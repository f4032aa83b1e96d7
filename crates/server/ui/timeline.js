// Requests over time: one lane for training, one for sampling. Gaps are the client's own time.

import { get } from "./api.js";
import { isDark } from "./app.js";
import { empty, fill, h, hideTip, perFrame, showTip } from "./dom.js";
import { clockTime, exact, integer, seconds } from "./format.js";

const LANES = ["training", "sampling"];
const LANE = 44;
const GAP = 18;
const LEFT = 74;
const COLORS = {
  light: { forward_backward: "#0b6bcb", forward: "#3b7ea1", optim_step: "#c4530a", sample: "#00795c", other: "#6b6b6b", failed: "#b3261e", queued: "#b9c4d0" },
  dark: { forward_backward: "#5cb3ff", forward: "#9fd3f2", optim_step: "#ff9d4d", sample: "#2fd2a6", other: "#b0b0b0", failed: "#ff8a80", queued: "#4c5866" },
};
const WINDOWS = { "30 s": 30, "2 min": 120, "10 min": 600, "1 h": 3600, all: Infinity };

export function timeline(id) {
  let data = null;
  let range = "all";
  const canvas = h("canvas", { class: "timeline", tabindex: "0", role: "img", pointermove: hover, pointerleave: hideTip });
  const summary = h("p", { class: "summary" });
  const table = h("div", { class: "scroll" });
  const select = h("select", { "aria-label": "Time range", change: () => { range = select.value; update(); } },
    Object.keys(WINDOWS).map((name) => h("option", { value: name }, name === "all" ? "all" : `last ${name}`)));
  select.value = range;
  const key = h("span", { class: "key" });
  const element = h("section", { "aria-label": "Requests" },
    h("div", { class: "controls" }, h("label", {}, "Range ", select), key), canvas, summary,
    h("h2", {}, "Last requests"), table);
  const draw = perFrame(paint);
  const observer = new ResizeObserver(draw);
  observer.observe(canvas);
  let boxes = [];

  const rows = (lane) => (data?.[lane] ?? []).map(([kind, seq, time, queued, compute, tokens, error]) =>
    ({ lane, kind, seq, end: time, start: time - compute * 1000, queued, compute, tokens, error }));

  function visible() {
    const all = LANES.flatMap(rows);
    const end = data.now;
    const first = all.reduce((least, row) => Math.min(least, row.start), end);
    const start = Math.max(first, end - WINDOWS[range] * 1000);
    // An old run ends at its last request, not now.
    const last = all.reduce((most, row) => Math.max(most, row.end), first);
    const to = range === "all" && end - last > 60000 ? last : end;
    return { from: start, to: Math.max(to, start + 1), all: all.filter((row) => row.end >= start) };
  }

  function paint() {
    if (!data || !canvas.clientWidth) return;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = LANES.length * (LANE + GAP) + 16;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(canvas);
    const colors = COLORS[isDark() ? "dark" : "light"];
    const { from, to, all } = visible();
    const toX = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - 4);
    boxes = [];
    context.font = `12px ${style.fontFamily}`;
    context.textBaseline = "middle";
    LANES.forEach((lane, n) => {
      const top = n * (LANE + GAP);
      context.fillStyle = style.getPropertyValue("--muted");
      context.textAlign = "left";
      context.fillText(lane, 0, top + LANE / 2);
      context.fillStyle = style.getPropertyValue("--sunken");
      context.fillRect(LEFT, top, width - LEFT - 4, LANE);
      for (const row of all.filter((other) => other.lane === lane)) {
        const begin = Math.max(from, row.start);
        const queuedFrom = Math.max(from, row.start - row.queued * 1000);
        if (row.queued > 0.001) {
          context.fillStyle = colors.queued;
          context.fillRect(toX(queuedFrom), top + LANE - 6, Math.max(1, toX(begin) - toX(queuedFrom)), 6);
        }
        context.fillStyle = row.error ? colors.failed : colors[row.kind] ?? colors.other;
        const x = toX(begin);
        const w = Math.max(1, toX(row.end) - x);
        context.fillRect(x, top + 3, w, LANE - 11);
        boxes.push({ x, y: top, w: Math.max(3, w), h: LANE, row });
      }
    });
    context.fillStyle = style.getPropertyValue("--muted");
    const bottom = LANES.length * (LANE + GAP) - GAP + 12;
    context.textAlign = "left";
    context.fillText(clockTime(from), LEFT, bottom);
    context.textAlign = "right";
    context.fillText(clockTime(to), width - 4, bottom);
  }

  function hover(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = boxes.findLast((other) => x >= other.x - 1 && x <= other.x + other.w + 1 && y >= other.y && y <= other.y + other.h);
    if (!hit) return hideTip();
    const { row } = hit;
    const rectangle = { left: event.clientX + 12, top: event.clientY, bottom: event.clientY + 8 };
    return showTip(rectangle, h("b", {}, row.kind.replaceAll("_", " "), row.seq ? ` #${row.seq}` : ""),
      h("div", {}, `executed in ${seconds(row.compute)}`), h("div", {}, `queued for ${seconds(row.queued)}`),
      row.tokens ? h("div", {}, `${integer(row.tokens)} tokens`) : null, h("div", { class: "muted" }, exact(row.end)),
      row.error && h("div", { class: "error" }, row.error));
  }

  function update() {
    const { from, all } = visible();
    const colors = COLORS[isDark() ? "dark" : "light"];
    const kinds = [...new Set(all.map((row) => row.kind))];
    const swatch = (color, text) => {
      const mark = h("span", { class: "swatch", "aria-hidden": "true" });
      mark.style.background = color;
      return h("span", { class: "entry" }, mark, text);
    };
    fill(key, kinds.map((kind) => swatch(colors[kind] ?? colors.other, kind.replaceAll("_", " "))), swatch(colors.queued, "queued"));
    const busy = union(all.map((row) => [Math.max(from, row.start), row.end]));
    // From the first to the last request: what follows is not a pause of the program.
    const end = all.reduce((most, row) => Math.max(most, row.end), from);
    const span = Math.max(1, end - from);
    const steps = rows("training").filter((row) => row.kind === "optim_step" && row.end >= from).map((row) => row.end);
    const gaps = steps.slice(1).map((time, n) => (time - steps[n]) / 1000).sort((a, b) => a - b);
    const share = Math.round((100 * busy) / span);
    const parts = [`The server worked for this run during ${share} % of ${seconds(span / 1000)}.`];
    if (gaps.length) parts.push(` A step takes ${seconds(gaps[gaps.length >> 1])} (median).`);
    if (share < 70 && all.length > 4) parts.push(" Otherwise it had no request of this run: the program can submit the next step before it reads the result of the last one.");
    if (data.queued) parts.push(` Requests that are queued or running now: ${integer(data.queued)}.`);
    summary.textContent = all.length ? parts.join("") : "";
    canvas.setAttribute("aria-label", `Timeline. ${parts.join("")}`);
    if (!all.length) {
      fill(table, empty("No finished request", "Requests appear here as soon as they are finished."));
    } else {
      const last = [...all].sort((a, b) => b.end - a.end).slice(0, 30);
      fill(table, h("table", {}, h("thead", {}, h("tr", {}, ["Request", "Finished", "Queued", "Executed", "Tokens", "Result"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, last.map((row) => h("tr", {}, h("td", {}, row.kind.replaceAll("_", " "), h("span", { class: "muted" }, row.seq ? ` #${row.seq}` : "")),
          h("td", { class: "num", title: exact(row.end) }, clockTime(row.end)), h("td", { class: "num" }, seconds(row.queued)),
          h("td", { class: "num" }, seconds(row.compute)), h("td", { class: "num" }, row.tokens ? integer(row.tokens) : "–"),
          h("td", {}, row.error ? h("span", { class: "error" }, row.error) : "ok"))))));
    }
    draw();
  }

  async function load() {
    data = await get("requests", { id });
    update();
  }

  return { element, load, refresh: () => load().catch(() => {}), redraw: update, close: () => { observer.disconnect(); hideTip(); } };
}

/** Total length of the union of intervals. */
function union(intervals) {
  let [total, end] = [0, -Infinity];
  for (const [from, to] of intervals.sort((a, b) => a[0] - b[0])) {
    if (to <= end) continue;
    total += to - Math.max(from, end);
    end = to;
  }
  return total;
}
