// @ts-check
// Keyboard shortcuts.

import { h } from "./dom.js";

const SHORTCUTS = [
  ["/", "Search"], ["j, k", "Next, previous row"], ["Enter", "Open the row"], ["x", "Select the row"],
  ["c", "Compare the selected runs"], ["g r", "Runs"], ["g s", "Samples"], ["g p", "Playground"],
  ["g v", "Server"], ["←, →", "Move the crosshair of a focused chart, or the token of a focused sample"],
  ["Esc", "Reset the zoom, close"], ["?", "This help"],
];

/** Time for which `g` waits for the second key, in milliseconds. */
const PREFIX_TIME = 1000;

/** Elements that need the keys themselves. */
const TYPING = "input:not([type=checkbox]):not([type=range]), textarea, select, dialog";

/**
 * @typedef {object} KeyActions
 * @property {(key: string) => boolean} open opens the view with a key; false if no view has it
 * @property {() => void} escape
 * @property {() => boolean} search moves the focus to the search field; false if the view has none
 * @property {(event: KeyboardEvent) => void} other
 */

/** @param {KeyActions} actions */
export function startKeyboard(actions) {
  let hasPrefix = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target instanceof HTMLElement ? event.target : document.body;
    const isTyping = target.closest(TYPING) !== null;
    if (event.key === "Escape") {
      actions.escape();
      if (isTyping) target.blur();
    }
    if (isTyping) return;
    if (hasPrefix) {
      hasPrefix = false;
      if (actions.open(event.key)) event.preventDefault();
    } else if (event.key === "g") {
      hasPrefix = true;
      setTimeout(() => { hasPrefix = false; }, PREFIX_TIME);
    } else if (event.key === "?") showHelp();
    else if (event.key === "/") {
      if (actions.search()) event.preventDefault();
    } else actions.other(event);
  });
}

export function showHelp() {
  const dialog = h("dialog", { class: "help", "aria-labelledby": "help-title", close: () => dialog.remove() },
    h("h2", { id: "help-title" }, "Keyboard"),
    h("dl", {}, SHORTCUTS.map(([keys, text]) => [
      h("dt", {}, keys.split(" ").map((key, n) => [n ? " " : "", h("kbd", {}, key.replace(",", ""))])),
      h("dd", {}, text)])),
    h("form", { method: "dialog" }, h("button", { class: "primary" }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
