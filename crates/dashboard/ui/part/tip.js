// @ts-check
// The tooltip.

import { byId, fill } from "../dom.js";

/** @import { Child } from "../types.js" */

/**
 * Shows the tooltip next to a rectangle of the window.
 * @param {{ left: number, top: number, bottom: number }} rectangle
 * @param {...Child} content
 */
export function showTip(rectangle, ...content) {
  const element = fill(byId("tip"), ...content);
  element.hidden = false;
  // At the right edge the element would be narrower than its content.
  element.style.left = "0";
  const { width, height } = element.getBoundingClientRect();
  const left = Math.max(8, Math.min(rectangle.left, innerWidth - width - 8));
  const below = rectangle.bottom + 6;
  const top = below + height > innerHeight ? Math.max(8, rectangle.top - height - 6) : below;
  element.style.left = `${left}px`;
  element.style.top = `${top}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
