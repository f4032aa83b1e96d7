// @ts-check
// The part of the address after `#`: view, object and parameters.

/** @import { ParamChanges, Route } from "./types.js" */

/**
 * Decodes a part of an address. An address that somebody typed may have an incomplete escape.
 * @param {string} text
 */
function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/**
 * Reads an address. Returns null if it names no view, as the target of a link within the page.
 * @param {string} hash
 * @returns {Route | null}
 */
export function parseRoute(hash) {
  if (hash !== "" && hash !== "#" && !hash.startsWith("#/")) return null;
  const text = hash.replace(/^#\/?/, "");
  const cut = text.indexOf("?");
  const path = cut < 0 ? text : text.slice(0, cut);
  const params = new URLSearchParams(cut < 0 ? "" : text.slice(cut + 1));
  const [name, ...rest] = path.split("/");
  const id = rest.length ? decode(rest.join("/")) : "";
  if (name === "runs" && id) return { name: "run", id, params };
  return { name: name || "runs", id: null, params };
}

/**
 * Writes an address.
 * @param {Route} route
 */
export function formatRoute({ name, id, params }) {
  const path = name === "run" ? `runs/${encodeURIComponent(id ?? "")}` : name;
  const query = params.toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}

/**
 * Returns parameters with some changed.
 * @param {URLSearchParams} params
 * @param {ParamChanges} changes
 */
export function withParams(params, changes) {
  const changed = new URLSearchParams(params);
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "" || value === false) changed.delete(key);
    else changed.set(key, String(value));
  }
  return changed;
}

/** @param {string} id */
export function runLink(id) {
  return `#/runs/${encodeURIComponent(id)}`;
}

/** @param {string[]} ids */
export function compareLink(ids) {
  return `#/compare?${new URLSearchParams({ runs: formatIds(ids) })}`;
}

/** @param {string} model */
export function playgroundLink(model) {
  return `#/playground?${new URLSearchParams({ model })}`;
}

/**
 * Writes ids as one parameter. The id of a run folder is its path, which can contain the separator.
 * @param {Iterable<string>} ids
 */
export function formatIds(ids) {
  return [...ids].map((id) => id.replace(/[%,]/g, encodeURIComponent)).join(",");
}

/**
 * Reads the ids of a parameter.
 * @param {string | null} value
 */
export function parseIds(value) {
  return (value ?? "").split(",").filter(Boolean).map(decode);
}
