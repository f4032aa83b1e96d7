// @ts-check
// The metrics of a run: read once, then extended.

import { get } from "../api.js";
import { byId } from "../dom.js";
import { Curves } from "../model/curves.js";

/** Width of a column of `.charts` in style.css with its gap, in pixels. */
const COLUMN = 356;

/** Number of points per metric to ask for: the minimum and the maximum of every pixel of a chart. */
function pointCount() {
  const width = byId("main").clientWidth;
  const columns = Math.max(1, Math.floor(width / COLUMN));
  return Math.min(4000, Math.max(400, Math.ceil((2 * width) / columns)));
}

export class RunMetrics {
  curves = new Curves();
  /** Number of the last request for a whole curve: the response of an earlier one is dropped. */
  #requested = 0;

  /** @param {string} id */
  constructor(id) {
    this.id = id;
  }

  /**
   * Reads the metrics of all steps, or of the steps of a range.
   * @param {[number, number] | null} zoom
   */
  async load(zoom) {
    const range = zoom ? { from: Math.max(0, Math.floor(zoom[0]) - 1), to: Math.ceil(zoom[1]) + 1 } : {};
    this.#requested += 1;
    const own = this.#requested;
    const { metrics } = await get("metrics", { id: this.id, points: pointCount(), ...range });
    if (own === this.#requested) this.curves.replace(metrics);
  }

  /** Reads the points after the last one. A forward pass has the step of the optimizer step before it. */
  async append() {
    // So many points that a chart draws several on every pixel.
    if (this.curves.count > 3 * pointCount()) {
      await this.load(null);
      return;
    }
    const from = this.curves.last;
    const { metrics } = await get("metrics", { id: this.id, points: pointCount(), from });
    if (!this.curves.extend(metrics, from)) await this.load(null);
  }
}
