// @ts-check
// Short messages at the bottom of the page.

import { byId } from "../dom.js";

/** Time for which a message is shown, in milliseconds. */
const SHOWN = 2500;

let timer = 0;

/** @param {string} text */
export function toast(text) {
  const element = byId("toast");
  element.textContent = text;
  element.classList.add("shown");
  clearTimeout(timer);
  timer = setTimeout(() => element.classList.remove("shown"), SHOWN);
}
