// @ts-check
// Elements. Every value from the server is inserted as text.

import { errorText } from "./api.js";

/** @import { Attributes, Child } from "./types.js" */

/**
 * Returns an element of index.html.
 * @param {string} id
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no element ${id}`);
  return element;
}

/**
 * Creates an element. Attributes with a function are listeners.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  append(element, children);
  return element;
}

/**
 * Creates an SVG element.
 * @param {string} tag
 * @param {Attributes} attributes
 * @param {...Child} children
 */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAttributes(element, attributes);
  append(element, children);
  return element;
}

/**
 * @param {Element} element
 * @param {Attributes} attributes
 */
function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "value" || name === "checked" || name === "disabled") Object.assign(element, { [name]: value });
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/**
 * @param {Element} element
 * @param {Child[]} children
 */
function append(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child instanceof Node) element.append(child);
    else if (child !== undefined && child !== null && child !== false && child !== true) {
      element.append(document.createTextNode(String(child)));
    }
  }
}

/**
 * Replaces the children of an element.
 * @template {Element} Target
 * @param {Target} element
 * @param {...Child} children
 */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/**
 * Calls `action` at most once per animation frame.
 * @param {() => void} action
 */
export function perFrame(action) {
  let frame = 0;
  return () => {
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; action(); });
  };
}

/**
 * Calls `action` after `delay` milliseconds without another call.
 * @template {unknown[]} Values
 * @param {number} delay
 * @param {(...values: Values) => void} action
 * @returns {(...values: Values) => void}
 */
export function debounce(delay, action) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), delay);
  };
}

/**
 * Runs requests of which only the last counts: the result of an earlier one is dropped, also if it
 * arrives later.
 */
export class LatestRequest {
  #count = 0;

  /**
   * @template Result
   * @param {Promise<Result>} request
   * @param {(result: Result) => void} use
   */
  async run(request, use) {
    this.#count += 1;
    const own = this.#count;
    try {
      const result = await request;
      if (own === this.#count) use(result);
    } catch (error) {
      if (own === this.#count) throw error;
    }
  }

  /** Drops the results of all requests so far. */
  cancel() {
    this.#count += 1;
  }
}

/**
 * A coloured mark of a legend.
 * @param {string} color
 */
export function swatch(color) {
  const mark = h("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = color;
  return mark;
}

/**
 * The head of a table.
 * @param {string[]} names
 */
export function tableHead(names) {
  return h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));
}

/**
 * A list to choose from.
 * @param {string} label
 * @param {[string, string][]} options value and text
 * @param {(value: string) => void} choose
 */
export function choiceList(label, options, choose) {
  const select = h("select", { "aria-label": label, change: () => choose(select.value) },
    options.map(([value, text]) => h("option", { value }, text)));
  return select;
}

/**
 * A problem, and a button to try again.
 * @param {unknown} error
 * @param {() => void} [retry]
 */
export function problem(error, retry) {
  return h("div", { class: "empty", role: "alert" },
    h("h2", {}, "Cannot load this"),
    h("p", {}, errorText(error)),
    retry && h("button", { type: "button", click: () => retry() }, "Try again"));
}
