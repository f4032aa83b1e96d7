// @ts-check
// Copying to the clipboard.

import { h, svg } from "../dom.js";
import { toast } from "./toast.js";

/**
 * Copies a text to the clipboard.
 * @param {string} text
 * @param {string} message shown afterwards
 */
export async function copy(text, message) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not on localhost or HTTPS have no clipboard.
    const area = h("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(message);
}

/**
 * @param {string} text
 * @param {string} label names the text
 */
export function copyButton(text, label) {
  return h("button", {
    class: "icon small", type: "button", title: `Copy ${label}`, "aria-label": `Copy ${label}`,
    click: (event) => {
      event.preventDefault();
      event.stopPropagation();
      copy(text, `Copied ${label}`);
    },
  }, copyIcon());
}

/** Two sheets, one behind the other. */
function copyIcon() {
  return svg("svg", { width: 14, height: 14, viewBox: "0 0 16 16", "aria-hidden": "true", class: "glyph" },
    svg("rect", { x: 5.5, y: 5.5, width: 8, height: 8, rx: 1.5 }),
    svg("path", { d: "M10.5 3.5v-.5a1.5 1.5 0 0 0-1.5-1.5H4A1.5 1.5 0 0 0 2.5 3v5A1.5 1.5 0 0 0 4 9.5h.5" }));
}
