// @ts-check
// Empty states.

import { h } from "../dom.js";
import { copyButton } from "./copy.js";

/**
 * Says what is missing, and shows the command that changes it.
 * @param {string} title
 * @param {string} [text]
 * @param {string} [command]
 */
export function empty(title, text, command) {
  return h("div", { class: "empty" },
    h("h2", {}, title),
    text && h("p", {}, text),
    command && h("div", { class: "command" }, h("code", {}, command), copyButton(command, "command")));
}
