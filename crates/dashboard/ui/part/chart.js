// @ts-check
// A line chart on a canvas.

import { fill, h, perFrame, swatch } from "../dom.js";
import { horizontalRange, isDrawable, ticks, verticalRange } from "../model/axis.js";
import { clockTime, number } from "../model/format.js";
import { describe, nearest, smoothed } from "../model/series.js";
import { palette } from "../theme.js";

/** @import { Series } from "../model/types.js" */
/** @import { ChartSync } from "./chart_sync.js" */

/**
 * @typedef {object} ChartOptions
 * @property {boolean} log logarithmic vertical axis
 * @property {boolean} time times instead of steps on the horizontal axis
 * @property {number} smoothing from 0 (none) to 1
 */

/**
 * Ranges and scales of one drawing.
 * @typedef {object} Frame
 * @property {number} width
 * @property {number} height
 * @property {number} plotWidth
 * @property {number} plotHeight
 * @property {[number, number]} horizontal
 * @property {[number, number]} vertical
 * @property {(x: number) => number} toX
 * @property {(y: number) => number} toY
 */

const PAD = { left: 52, right: 12, top: 8, bottom: 22 };
/** Distance that the pointer moves before a press counts as a selection, in pixels. */
const DRAG = 6;
/** Maximum number of runs in the legend of a chart. */
const LEGEND = 6;

export class LineChart {
  /** @type {Series[]} */
  #series = [];
  /** @type {ChartOptions} */
  #options = { log: false, time: false, smoothing: 0 };
  /** @type {Frame | null} */
  #frame = null;
  /**
   * Ends of the selection in pixels while the pointer is pressed.
   * @type {{ from: number, to: number } | null}
   */
  #drag = null;

  /**
   * @param {string} title
   * @param {ChartSync} sync
   * @param {boolean} isExact the metric has no noise to smooth
   */
  constructor(title, sync, isExact) {
    this.title = title;
    this.sync = sync;
    this.isExact = isExact;
    this.canvas = h("canvas", {
      tabindex: "0", role: "img", pointermove: (event) => this.#hover(event), pointerleave: () => sync.setX(null),
      pointerdown: (event) => this.#press(event), pointerup: (event) => this.#release(event),
      pointercancel: () => { this.#drag = null; }, dblclick: () => sync.setZoom(null),
      keydown: (event) => this.#key(event), blur: () => sync.setX(null),
    });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, title), this.legend, this.canvas);
    this.draw = perFrame(() => this.#paint());
    this.observer = new ResizeObserver(this.draw);
    this.observer.observe(this.canvas);
    sync.add(this);
  }

  /**
   * @param {Series[]} series
   * @param {ChartOptions} options
   */
  show(series, options) {
    this.#series = series;
    this.#options = { ...options, smoothing: this.isExact ? 0 : options.smoothing };
    this.canvas.setAttribute("aria-label", `${this.title}. ${series.map(describe).join("; ")}`);
    this.draw();
  }

  /** @param {number} smoothing */
  setSmoothing(smoothing) {
    if (!this.isExact) this.#options.smoothing = smoothing;
    this.draw();
  }

  close() {
    this.observer.disconnect();
    this.sync.remove(this);
  }

  #paint() {
    const { canvas } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    const context = canvas.getContext("2d");
    if (!width || !height || !context) return;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const frame = this.#measure(width, height);
    this.#frame = frame;
    this.#smooth();
    this.#drawAxes(context, frame);
    context.save();
    context.beginPath();
    context.rect(PAD.left, 0, frame.plotWidth, height - PAD.bottom);
    context.clip();
    this.#drawSeries(context, frame);
    this.#drawSelection(context, frame);
    this.#drawCrosshair(context, frame);
    context.restore();
    this.#drawLegend();
  }

  /**
   * @param {number} width
   * @param {number} height
   * @returns {Frame}
   */
  #measure(width, height) {
    const { log } = this.#options;
    const horizontal = horizontalRange(this.#series, this.sync.zoom);
    const vertical = verticalRange(this.#series, horizontal, log);
    const plotWidth = width - PAD.left - PAD.right;
    const plotHeight = height - PAD.top - PAD.bottom;
    /** @param {number} value */
    const scale = (value) => (log ? Math.log(value) : value);
    const bottom = scale(vertical[0]);
    const top = scale(vertical[1]);
    const [left, right] = horizontal;
    return {
      width, height, plotWidth, plotHeight, horizontal, vertical,
      toX: (x) => PAD.left + ((x - left) / (right - left)) * plotWidth,
      toY: (y) => PAD.top + plotHeight - ((scale(y) - bottom) / (top - bottom)) * plotHeight,
    };
  }

  /** Computes the smoothed values of this drawing. */
  #smooth() {
    const { smoothing } = this.#options;
    for (const series of this.#series) {
      const hasMeans = series.mean.length > 0;
      series.smooth = smoothing
        ? smoothed(hasMeans ? series.mean : series.y, hasMeans ? series.weights : null, smoothing) : null;
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   */
  #drawAxes(context, { width, height, plotWidth, plotHeight, horizontal, vertical, toX, toY }) {
    const style = getComputedStyle(this.canvas);
    const { log, time } = this.#options;
    context.font = `11px ${style.fontFamily}`;
    context.lineWidth = 1;
    context.fillStyle = style.getPropertyValue("--muted");
    context.strokeStyle = style.getPropertyValue("--line");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ticks(...vertical, Math.max(2, Math.floor(plotHeight / 30)), log)) {
      const y = Math.round(toY(value)) + 0.5;
      context.beginPath();
      context.moveTo(PAD.left, y);
      context.lineTo(width - PAD.right, y);
      context.stroke();
      context.fillText(number(value), PAD.left - 6, y);
    }
    context.textBaseline = "top";
    for (const value of ticks(...horizontal, Math.max(2, Math.floor(plotWidth / (time ? 90 : 52))), false)) {
      const x = toX(value);
      context.textAlign = x < PAD.left + 20 ? "left" : x > width - 30 ? "right" : "center";
      context.fillText(time ? clockTime(value) : number(value), x, height - PAD.bottom + 6);
    }
  }

  /**
   * Draws the raw lines, and the smoothed ones over them.
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   */
  #drawSeries(context, frame) {
    for (const series of this.#series) {
      const color = palette(series.index);
      if (series.smooth) {
        this.#drawLine(context, frame, series.x, series.y, color, { alpha: 0.3, width: 1 });
        this.#drawLine(context, frame, series.x, series.smooth, color, { alpha: 1, width: 2 });
      } else this.#drawLine(context, frame, series.x, series.y, color, { alpha: 1, width: 1.75 });
    }
  }

  /**
   * Draws a line, interrupted where a value cannot be drawn. A single point is drawn as a dot.
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   * @param {number[]} xs
   * @param {number[]} ys
   * @param {string} color
   * @param {{ alpha: number, width: number }} pen
   */
  #drawLine(context, { toX, toY }, xs, ys, color, { alpha, width }) {
    context.strokeStyle = color;
    context.globalAlpha = alpha;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.beginPath();
    let isDrawing = false;
    let count = 0;
    let last = 0;
    for (let n = 0; n < xs.length; n++) {
      if (!isDrawable(ys[n], this.#options.log)) {
        isDrawing = false;
        continue;
      }
      if (isDrawing) context.lineTo(toX(xs[n]), toY(ys[n]));
      else context.moveTo(toX(xs[n]), toY(ys[n]));
      isDrawing = true;
      count += 1;
      last = n;
    }
    context.stroke();
    if (count === 1) this.#drawDot(context, toX(xs[last]), toY(ys[last]), 3, color);
    context.globalAlpha = 1;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} x
   * @param {number} y
   * @param {number} radius
   * @param {string} color
   */
  #drawDot(context, x, y, radius, color) {
    context.fillStyle = color;
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.fill();
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   */
  #drawSelection(context, { plotHeight }) {
    if (!this.#drag) return;
    const { from, to } = this.#drag;
    if (Math.abs(to - from) <= DRAG / 2) return;
    context.fillStyle = palette(0);
    context.globalAlpha = 0.12;
    context.fillRect(Math.min(from, to), PAD.top, Math.abs(to - from), plotHeight);
    context.globalAlpha = 1;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   */
  #drawCrosshair(context, { horizontal, plotHeight, toX, toY }) {
    const { x: cross } = this.sync;
    if (cross === null || cross < horizontal[0] || cross > horizontal[1]) return;
    const x = Math.round(toX(cross)) + 0.5;
    context.strokeStyle = getComputedStyle(this.canvas).getPropertyValue("--muted");
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(x, PAD.top);
    context.lineTo(x, PAD.top + plotHeight);
    context.stroke();
    context.setLineDash([]);
    for (const series of this.#series) {
      const n = nearest(series.x, cross);
      const value = n < 0 ? NaN : (series.smooth ?? series.y)[n];
      if (!isDrawable(value, this.#options.log)) continue;
      this.#drawDot(context, toX(series.x[n]), toY(value), 3.5, palette(series.index));
    }
  }

  /** Shows the values at the crosshair, or the last ones, and which line is smoothed. */
  #drawLegend() {
    const { x: cross } = this.sync;
    const isMany = this.#series.length > 1;
    const parts = this.#series.slice(0, LEGEND).map((series) => {
      const n = cross === null ? series.x.length - 1 : nearest(series.x, cross);
      const raw = n < 0 ? NaN : series.y[n];
      const smooth = n < 0 || !series.smooth ? null : series.smooth[n];
      return h("span", { class: "entry" }, swatch(palette(series.index)), isMany && h("span", { class: "label" }, series.label),
        smooth !== null && [h("b", {}, number(smooth)), h("span", { class: "muted" }, " smoothed · raw ")],
        h(smooth === null ? "b" : "span", {}, number(raw)));
    });
    let at = "";
    if (cross !== null) at = this.#options.time ? clockTime(cross) : `step ${number(Math.round(cross))}`;
    fill(this.legend, parts, h("span", { class: "muted at" }, at));
  }

  /** @param {PointerEvent} event */
  #position(event) {
    return event.clientX - this.canvas.getBoundingClientRect().left;
  }

  /**
   * @param {number} position
   * @param {Frame} frame
   */
  #toValue(position, { horizontal: [left, right], plotWidth }) {
    return left + ((position - PAD.left) / plotWidth) * (right - left);
  }

  /** Points that the crosshair moves between. */
  get #positions() {
    return this.#series.find(({ x }) => x.length)?.x ?? [];
  }

  /**
   * Moves the crosshair to the nearest point.
   * @param {PointerEvent} event
   */
  #hover(event) {
    if (!this.#frame) return;
    const position = this.#position(event);
    if (this.#drag) this.#drag.to = position;
    const xs = this.#positions;
    if (xs.length) this.sync.setX(xs[nearest(xs, this.#toValue(position, this.#frame))]);
  }

  /** @param {PointerEvent} event */
  #press(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.canvas.setPointerCapture(event.pointerId);
    const position = this.#position(event);
    this.#drag = { from: position, to: position };
  }

  /** @param {PointerEvent} event */
  #release(event) {
    const drag = this.#drag;
    this.#drag = null;
    if (!drag || !this.#frame) return;
    const to = this.#position(event);
    if (Math.abs(to - drag.from) <= DRAG) {
      this.draw();
      return;
    }
    const start = this.#toValue(Math.min(drag.from, to), this.#frame);
    const end = this.#toValue(Math.max(drag.from, to), this.#frame);
    this.sync.setZoom([start, end]);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key === "Escape") this.sync.setZoom(null);
    /** @type {Record<string, number>} */
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    const xs = this.#positions;
    if (!move || !xs.length) return;
    event.preventDefault();
    const last = xs.length - 1;
    const from = this.sync.x === null ? last : nearest(xs, this.sync.x);
    this.sync.setX(xs[Math.max(0, Math.min(last, from + move))]);
  }
}
