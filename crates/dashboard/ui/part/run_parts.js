// @ts-check
// Small parts of a run that several views show.

import { h, svg } from "../dom.js";
import { status } from "../model/format.js";
import { sparkPoints } from "../model/series.js";

/**
 * A small chart without axes.
 * @param {(number | null)[]} values
 */
export function spark(values, width = 96, height = 22) {
  const points = sparkPoints(values, width, height);
  if (!points) return h("span", { class: "spark" });
  return svg("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("polyline", { points }));
}

/** @param {string} name */
export function statusBadge(name) {
  const [icon, word] = status(name);
  return h("span", { class: `status ${name}` }, h("span", { "aria-hidden": "true" }, icon), ` ${word}`);
}

/**
 * The way back to the list of runs, with its search and selection.
 * @param {string} href
 */
export function runsCrumb(href) {
  return h("p", { class: "crumbs" }, h("a", { href }, "← Runs"));
}
