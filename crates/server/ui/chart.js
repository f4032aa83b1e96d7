// Line charts on a canvas. All charts of a view share one crosshair and one zoom.

import { isDark } from "./app.js";
import { fill, h, perFrame } from "./dom.js";
import { DARK, LIGHT, clockTime, number } from "./format.js";

const PAD = { left: 52, right: 12, top: 8, bottom: 22 };

export function palette(index) {
  const colors = isDark() ? DARK : LIGHT;
  return colors[index % colors.length];
}

/** Position of the crosshair and zoomed range, shared by several charts. */
export class ChartSync {
  constructor(onZoom) {
    this.charts = new Set();
    this.x = null;
    this.zoom = null;
    this.onZoom = onZoom;
  }

  setX(x) {
    this.x = x;
    for (const chart of this.charts) chart.draw();
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.onZoom?.(zoom);
    for (const chart of this.charts) chart.draw();
  }

  redraw() {
    for (const chart of this.charts) chart.draw();
  }
}

/** Ticks at round numbers. */
function ticks(min, max, count, log) {
  if (log) {
    const found = [];
    const first = Math.floor(Math.log10(min));
    const last = Math.ceil(Math.log10(max));
    const step = Math.max(1, Math.ceil((last - first) / count));
    for (let power = first; power <= last; power += step) {
      for (const digit of last - first <= 2 ? [1, 2, 5] : [1]) {
        const value = digit * 10 ** power;
        if (value >= min && value <= max) found.push(value);
      }
    }
    return found;
  }
  const raw = (max - min) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((digit) => digit * power >= raw) * power;
  const found = [];
  for (let value = Math.ceil(min / step) * step; value <= max + step * 1e-9; value += step) {
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return found;
}

/** Exponential moving average with a correction for the start. */
export function smoothed(values, weights, amount) {
  let sum = 0;
  let total = 0;
  return values.map((value, n) => {
    if (!Number.isFinite(value)) return NaN;
    const keep = amount ** (weights ? weights[n] : 1);
    sum = sum * keep + value * (1 - keep);
    total = total * keep + (1 - keep);
    return total > 0 ? sum / total : value;
  });
}

/** Index of the entry of a sorted array that is nearest to a value. */
function nearest(values, value) {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - values[low - 1] < values[low] - value ? low - 1 : low;
}

export class LineChart {
  /** `sync` is the crosshair and zoom that the chart shares with others. */
  constructor(title, sync) {
    this.title = title;
    this.sync = sync;
    this.series = [];
    this.log = false;
    this.time = false;
    this.smoothing = 0;
    this.canvas = h("canvas", {
      tabindex: "0", role: "img", pointermove: (event) => this.hover(event), pointerleave: () => sync.setX(null),
      pointerdown: (event) => this.press(event), pointerup: (event) => this.release(event),
      pointercancel: () => { this.drag = null; }, dblclick: () => sync.setZoom(null),
      keydown: (event) => this.key(event), blur: () => sync.setX(null),
    });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, title), this.legend, this.canvas);
    this.draw = perFrame(() => this.paint());
    this.observer = new ResizeObserver(this.draw);
    this.observer.observe(this.canvas);
    sync.charts.add(this);
  }

  /** Series: `{label, index, x, y, mean}`; `mean` are the means of downsampled ranges. */
  setSeries(series) {
    this.series = series;
    this.describe();
    this.draw();
  }

  setOptions({ log, time, smoothing }) {
    Object.assign(this, { log, time, smoothing });
    this.draw();
  }

  describe() {
    const parts = this.series.map(({ label, y }) => {
      const finite = y.filter((value) => Number.isFinite(value));
      if (!finite.length) return `${label}: no values`;
      return `${label}: ${finite.length} points, first ${number(finite[0])}, last ${number(finite.at(-1))}, `
        + `minimum ${number(finite.reduce((a, b) => Math.min(a, b)))}, maximum ${number(finite.reduce((a, b) => Math.max(a, b)))}`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}. ${parts.join("; ")}`);
  }

  /** Ranges of the axes. */
  ranges() {
    let [x0, x1] = [Infinity, -Infinity];
    for (const { x } of this.series) {
      if (x.length) [x0, x1] = [Math.min(x0, x[0]), Math.max(x1, x.at(-1))];
    }
    if (this.sync.zoom) [x0, x1] = this.sync.zoom;
    if (!Number.isFinite(x0)) [x0, x1] = [0, 1];
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    let [y0, y1] = [Infinity, -Infinity];
    for (const { x, y } of this.series) {
      for (let n = 0; n < x.length; n++) {
        const value = y[n];
        if (x[n] < x0 || x[n] > x1 || !Number.isFinite(value) || (this.log && value <= 0)) continue;
        if (value < y0) y0 = value;
        if (value > y1) y1 = value;
      }
    }
    if (!Number.isFinite(y0)) [y0, y1] = this.log ? [0.1, 1] : [0, 1];
    if (y0 === y1) {
      const margin = Math.abs(y0) * 0.05 || 0.5;
      [y0, y1] = this.log ? [y0 / 1.1, y1 * 1.1] : [y0 - margin, y1 + margin];
    } else if (!this.log) {
      const margin = (y1 - y0) * 0.05;
      [y0, y1] = [y0 >= 0 && y0 - margin < 0 ? 0 : y0 - margin, y1 + margin];
    }
    return { x0, x1, y0, y1 };
  }

  paint() {
    const { canvas } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const [ink, line] = [style.getPropertyValue("--muted"), style.getPropertyValue("--line")];
    const range = this.ranges();
    const { x0, x1, y0, y1 } = range;
    const scaleY = this.log ? Math.log : (value) => value;
    const [bottom, top] = [scaleY(y0), scaleY(y1)];
    const plotWidth = width - PAD.left - PAD.right;
    const plotHeight = height - PAD.top - PAD.bottom;
    const toX = (x) => PAD.left + ((x - x0) / (x1 - x0)) * plotWidth;
    const toY = (y) => PAD.top + plotHeight - ((scaleY(y) - bottom) / (top - bottom)) * plotHeight;
    this.frame = { toX, range, plotWidth };

    context.font = `11px ${style.fontFamily}`;
    context.lineWidth = 1;
    context.fillStyle = ink;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.strokeStyle = line;
    for (const value of ticks(y0, y1, Math.max(2, Math.floor(plotHeight / 30)), this.log)) {
      const y = Math.round(toY(value)) + 0.5;
      context.beginPath();
      context.moveTo(PAD.left, y);
      context.lineTo(width - PAD.right, y);
      context.stroke();
      context.fillText(number(value), PAD.left - 6, y);
    }
    context.textBaseline = "top";
    const labels = ticks(x0, x1, Math.max(2, Math.floor(plotWidth / (this.time ? 90 : 52))), false);
    for (const value of labels) {
      const x = toX(value);
      context.textAlign = x < PAD.left + 20 ? "left" : x > width - 30 ? "right" : "center";
      context.fillText(this.time ? clockTime(value) : number(value), x, height - PAD.bottom + 6);
    }

    context.save();
    context.beginPath();
    context.rect(PAD.left, 0, plotWidth, height - PAD.bottom);
    context.clip();
    for (const series of this.series) {
      const color = palette(series.index);
      const amount = this.exact ? 0 : this.smoothing;
      this.stroke(context, series.x, series.y, toX, toY, color, amount ? 0.3 : 1, amount ? 1 : 1.75);
      if (amount) {
        const values = series.mean?.length ? series.mean : series.y;
        const weights = series.mean?.length ? series.weights : null;
        series.smooth = smoothed(values, weights, amount);
        this.stroke(context, series.x, series.smooth, toX, toY, color, 1, 2);
      } else series.smooth = null;
    }
    if (this.drag && Math.abs(this.drag.to - this.drag.from) > 3) {
      context.fillStyle = palette(0);
      context.globalAlpha = 0.12;
      context.fillRect(Math.min(this.drag.from, this.drag.to), PAD.top, Math.abs(this.drag.to - this.drag.from), plotHeight);
      context.globalAlpha = 1;
    }
    const { x: cross } = this.sync;
    if (cross !== null && cross >= x0 && cross <= x1) {
      context.strokeStyle = ink;
      context.lineWidth = 1;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(Math.round(toX(cross)) + 0.5, PAD.top);
      context.lineTo(Math.round(toX(cross)) + 0.5, PAD.top + plotHeight);
      context.stroke();
      context.setLineDash([]);
      for (const series of this.series) {
        const n = series.x.length ? nearest(series.x, cross) : -1;
        const value = n < 0 ? NaN : (series.smooth ?? series.y)[n];
        if (!Number.isFinite(value)) continue;
        context.fillStyle = palette(series.index);
        context.beginPath();
        context.arc(toX(series.x[n]), toY(value), 3.5, 0, 7);
        context.fill();
      }
    }
    context.restore();
    this.drawLegend(cross);
  }

  stroke(context, xs, ys, toX, toY, color, alpha, width) {
    context.strokeStyle = color;
    context.globalAlpha = alpha;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.beginPath();
    let pen = false;
    let count = 0;
    for (let n = 0; n < xs.length; n++) {
      const value = ys[n];
      if (!Number.isFinite(value) || (this.log && value <= 0)) { pen = false; continue; }
      const [x, y] = [toX(xs[n]), toY(value)];
      if (pen) context.lineTo(x, y);
      else context.moveTo(x, y);
      pen = true;
      count += 1;
    }
    context.stroke();
    if (count === 1) {
      const n = ys.findIndex((value) => Number.isFinite(value));
      context.fillStyle = color;
      context.beginPath();
      context.arc(toX(xs[n]), toY(ys[n]), 3, 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  /** Values at the crosshair, or the last ones. The legend says which line is smoothed. */
  drawLegend(cross) {
    const many = this.series.length > 1;
    const parts = this.series.slice(0, 6).map((series) => {
      const n = !series.x.length ? -1 : cross === null ? series.x.length - 1 : nearest(series.x, cross);
      const raw = n < 0 ? NaN : series.y[n];
      const smooth = n < 0 || !series.smooth ? null : series.smooth[n];
      const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = palette(series.index);
      return h("span", { class: "entry" }, swatch, many && h("span", { class: "label" }, series.label),
        smooth !== null && [h("b", {}, number(smooth)), h("span", { class: "muted" }, " smoothed · raw ")],
        h(smooth === null ? "b" : "span", {}, number(raw)));
    });
    const at = cross === null ? "" : this.time ? clockTime(cross) : `step ${number(Math.round(cross))}`;
    fill(this.legend, parts, h("span", { class: "muted at" }, at));
  }

  position(event) {
    return event.clientX - this.canvas.getBoundingClientRect().left;
  }

  toValue(position) {
    const { range: { x0, x1 }, plotWidth } = this.frame;
    return x0 + ((position - PAD.left) / plotWidth) * (x1 - x0);
  }

  /** Moves the crosshair to the nearest point. */
  hover(event) {
    if (!this.frame) return;
    const position = this.position(event);
    if (this.drag) this.drag.to = position;
    const series = this.series.find(({ x }) => x.length);
    if (!series) return;
    this.sync.setX(series.x[nearest(series.x, this.toValue(position))]);
  }

  press(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.canvas.setPointerCapture(event.pointerId);
    const position = this.position(event);
    this.drag = { from: position, to: position };
  }

  release(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag) return;
    drag.to = this.position(event);
    if (Math.abs(drag.to - drag.from) > 6) {
      const ends = [this.toValue(drag.from), this.toValue(drag.to)].sort((a, b) => a - b);
      this.sync.setZoom(ends);
    } else this.draw();
  }

  key(event) {
    const series = this.series.find(({ x }) => x.length);
    if (event.key === "Escape") this.sync.setZoom(null);
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!move || !series) return;
    event.preventDefault();
    const last = series.x.length - 1;
    const from = this.sync.x === null ? last : nearest(series.x, this.sync.x);
    this.sync.setX(series.x[Math.max(0, Math.min(last, from + move))]);
  }

  close() {
    this.observer.disconnect();
    this.sync.charts.delete(this);
  }
}
