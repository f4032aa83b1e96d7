// @ts-check
// The metrics of one run in memory: replaced by a whole document, or extended by new points.

/** @import { CurveDocument } from "../documents.js" */
/** @import { Curve } from "./types.js" */

export class Curves {
  constructor() {
    /** @type {Record<string, Curve>} */
    this.metrics = {};
    /** Largest step of all metrics. */
    this.last = 0;
    /** Whether every point of the run is in memory, none of them combined by the server. */
    this.full = false;
  }

  /** Number of points of the longest curve. */
  get count() {
    return Object.values(this.metrics).reduce((most, curve) => Math.max(most, curve.step.length), 0);
  }

  /**
   * Replaces all points.
   * @param {Record<string, CurveDocument>} metrics
   */
  replace(metrics) {
    this.metrics = {};
    this.last = 0;
    this.full = Object.values(metrics).every((curve) => !curve.mean.length);
    for (const [name, curve] of Object.entries(metrics)) this.#push(name, curve, 0);
  }

  /**
   * Adds the points from step `from` on that are not known. Returns false if the server has combined
   * points: the document is then not a continuation, and the caller has to replace all points.
   * @param {Record<string, CurveDocument>} metrics
   * @param {number} from
   */
  extend(metrics, from) {
    const curves = Object.entries(metrics);
    if (curves.some(([, curve]) => curve.mean.length)) return false;
    for (const [name, curve] of curves) this.#push(name, curve, this.#known(name, from));
    return true;
  }

  /**
   * Number of points of a metric from step `from` on that are in memory.
   * @param {string} name
   * @param {number} from
   */
  #known(name, from) {
    const curve = this.metrics[name];
    if (!curve) return 0;
    const steps = curve.step.filter((step) => step >= from);
    // The minimum and the maximum of a range can be the same point.
    return curve.mean.length ? new Set(steps).size : steps.length;
  }

  /**
   * Adds the points of a metric except for the first `skipped`.
   * @param {string} name
   * @param {CurveDocument} curve
   * @param {number} skipped
   */
  #push(name, curve, skipped) {
    const known = (this.metrics[name] ??= { step: [], time: [], y: [], mean: [], weights: [] });
    const combined = curve.mean.length > 0;
    for (let n = skipped; n < curve.step.length; n++) {
      const step = curve.step[n];
      const before = known.step[known.step.length - 1];
      known.step.push(step);
      known.time.push(curve.time[n]);
      known.y.push(curve.value[n] ?? NaN);
      // A curve has a mean for every point or for none.
      if (combined || known.mean.length) {
        known.mean.push((combined ? curve.mean[n] : curve.value[n]) ?? NaN);
        known.weights.push(before === undefined ? 1 : Math.max(1, step - before));
      }
      if (step > this.last) this.last = step;
    }
  }
}
