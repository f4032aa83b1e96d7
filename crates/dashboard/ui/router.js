// @ts-check
// The address of the page: the only place that reads or writes it.
//
// Views get the parameters from `View.update` and change them with `Router.set`, so that Back,
// Forward and a link that was sent to somebody else take the same path as a click.

import { formatRoute, parseRoute, withParams } from "./model/route.js";

/** @import { ParamChanges, Route } from "./model/types.js" */

export class Router {
  /** @type {Route} */
  #route;
  /** @type {(route: Route) => void} */
  #listener = () => {};
  /**
   * Last address of every view.
   * @type {Map<string, string>}
   */
  #visited = new Map();

  constructor() {
    this.#route = parseRoute(location.hash) ?? { name: "runs", id: null, params: new URLSearchParams() };
    addEventListener("hashchange", () => {
      const route = parseRoute(location.hash);
      if (route) this.#change(route);
    });
  }

  /** @param {(route: Route) => void} listener called after every change of the address */
  listen(listener) {
    this.#listener = listener;
  }

  get route() {
    return this.#route;
  }

  get params() {
    return this.#route.params;
  }

  /**
   * Changes parameters of the current view.
   * @param {ParamChanges} changes
   * @param {{ push?: boolean }} [options] `push`: Back returns to the parameters before
   */
  set(changes, { push = false } = {}) {
    const route = { ...this.#route, params: withParams(this.#route.params, changes) };
    const hash = formatRoute(route);
    if (hash === formatRoute(this.#route)) return;
    if (push) history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
    this.#change(route);
  }

  /** @param {string} hash */
  go(hash) {
    location.hash = hash;
  }

  /**
   * Returns the last address of a view, with its search and selection.
   * @param {string} name
   */
  lastOf(name) {
    return this.#visited.get(name) ?? `#/${name}`;
  }

  /** @param {Route} route */
  #change(route) {
    this.#route = route;
    this.#visited.set(route.name, formatRoute(route));
    this.#listener(route);
  }

  /** Notes the first address and opens it. */
  start() {
    this.#change(this.#route);
  }
}
