// @ts-check
// The crosshair and the zoom that all charts of a view share.

/** @typedef {[number, number]} Range */

export class ChartSync {
  /**
   * Charts to draw after a change.
   * @type {Set<{ draw: () => void }>}
   */
  #charts = new Set();
  /**
   * Position of the crosshair on the horizontal axis.
   * @type {number | null}
   */
  x = null;
  /** @type {Range | null} */
  zoom = null;

  /** @param {(zoom: Range | null) => void} onZoom */
  constructor(onZoom) {
    this.onZoom = onZoom;
  }

  /** @param {{ draw: () => void }} chart */
  add(chart) {
    this.#charts.add(chart);
  }

  /** @param {{ draw: () => void }} chart */
  remove(chart) {
    this.#charts.delete(chart);
  }

  /** @param {number | null} x */
  setX(x) {
    this.x = x;
    this.redraw();
  }

  /** @param {Range | null} zoom */
  setZoom(zoom) {
    this.zoom = zoom;
    this.onZoom(zoom);
    this.redraw();
  }

  redraw() {
    for (const chart of this.#charts) chart.draw();
  }
}
