// @ts-check
// The frame of the page. It connects the store, the router, the stream of changes and the open view.
//
// Data flows one way: the server and the address change the store and the router, and these tell the
// view what to show. A view asks the router for other parameters; it changes nothing else.

import { Unauthorized, get, post } from "./api.js";
import { ChangeStream } from "./changes.js";
import { byId, fill, h, problem } from "./dom.js";
import { showHelp, startKeyboard } from "./keyboard.js";
import { loginForm } from "./login.js";
import { hideTip } from "./part/tip.js";
import { Router } from "./router.js";
import { Store } from "./store.js";
import { startTheme } from "./theme.js";
import { compareView } from "./view/compare.js";
import { playgroundView } from "./view/playground.js";
import { runView } from "./view/run.js";
import { runsView } from "./view/runs.js";
import { samplesView } from "./view/samples.js";
import { serverView } from "./view/server.js";

/** @import { Route } from "./model/types.js" */
/** @import { OpenView, View } from "./types.js" */

/**
 * `parent` is the view of the navigation that a view without an entry of its own belongs to.
 * @type {Record<string, { title: string, open: OpenView, key?: string, parent?: string }>}
 */
const VIEWS = {
  runs: { title: "Runs", key: "r", open: runsView },
  run: { title: "Run", open: runView, parent: "runs" },
  compare: { title: "Compare", open: compareView, parent: "runs" },
  samples: { title: "Samples", key: "s", open: samplesView },
  playground: { title: "Playground", key: "p", open: playgroundView },
  server: { title: "Server", key: "v", open: serverView },
};

/** @type {Record<string, string>} */
const STREAM_STATES = { live: "● live", reconnecting: "◌ reconnecting…", offline: "○ offline" };

const main = byId("main");
const nav = byId("nav");
const store = new Store(get);
const router = new Router();
/** @type {ChangeStream | null} */
let stream = null;
/**
 * The open view, with the view and the object of its address.
 * @type {{ view: View, name: string, id: string | null } | null}
 */
let current = null;

/**
 * Shows what the address names. The same view of the same object stays and gets the new parameters.
 * @param {Route} route
 */
function show({ name: wanted, id, params }) {
  // Without a session there is only the login form.
  if (!stream) return;
  const isOffered = wanted in VIEWS && store.info.views.includes(VIEWS[wanted].parent ?? wanted);
  const name = isOffered ? wanted : "runs";
  if (current?.name === name && current.id === id) {
    current.view.update?.(params);
    return;
  }
  closeView();
  const { title, open, parent } = VIEWS[name];
  document.title = `${title} · tinkex`;
  for (const link of nav.querySelectorAll("a")) {
    if (link.dataset.view === (parent ?? name)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const root = h("div", { class: `view ${name}` });
  fill(main, root);
  try {
    const view = open(root, { store, router, id, fail: (error, target) => fail(error, target ?? root) });
    current = { view, name, id };
    view.update?.(params);
  } catch (error) {
    fail(error, root);
  }
}

function closeView() {
  hideTip();
  current?.view.close?.();
  current = null;
}

/**
 * Shows an error, or the login form.
 * @param {unknown} error
 * @param {HTMLElement} root
 */
function fail(error, root) {
  if (error instanceof Unauthorized) {
    logIn();
    return;
  }
  // A view that is closed has nothing to report.
  if (!root.isConnected) return;
  console.info("view failed:", error);
  // The error replaces the whole view: the next address or connection opens it again.
  if (root.parentElement === main) closeView();
  fill(root, problem(error, reopen));
}

function reopen() {
  closeView();
  show(router.route);
}

function logIn() {
  stream?.close();
  stream = null;
  closeView();
  nav.hidden = true;
  byId("logout").hidden = true;
  setBadge("logged out", "logged out");
  const { form, input } = loginForm(start);
  fill(main, form);
  input.focus();
}

/**
 * @param {string} state
 * @param {string} text
 */
function setBadge(state, text) {
  const badge = byId("live");
  badge.textContent = text;
  badge.dataset.state = state;
}

/** Reads the description of the source, connects to the stream of changes and opens the view. */
async function start() {
  let info;
  try {
    info = await store.loadInfo();
  } catch (error) {
    if (error instanceof Unauthorized) logIn();
    else fill(main, problem(error, start));
    return;
  }
  nav.hidden = false;
  // The page of run folders cannot log in again: its code works once.
  byId("logout").hidden = store.isFolders;
  fill(nav, info.views.map((name) => h("a", { href: `#/${name}`, "data-view": name }, VIEWS[name].title)));
  byId("address").textContent = store.isFolders ? "run folders" : location.host;
  stream?.close();
  stream = new ChangeStream({
    changes: (changes) => {
      store.apply(changes);
      current?.view.changes?.(changes);
    },
    server: (server) => {
      store.applyServer(server);
      current?.view.server?.();
    },
    state: (state) => setBadge(state, STREAM_STATES[state]),
    reconnected: () => {
      store.invalidate();
      if (current) current.view.reconnected?.();
      else show(router.route);
    },
    unauthorized: logIn,
    probe: async () => {
      const { version } = store.info;
      // Documents change with the page: a page of another version cannot read them.
      if ((await store.loadInfo()).version !== version) location.reload();
    },
  }, info.cursor);
  // The session before may have seen other runs.
  store.invalidate();
  closeView();
  router.start();
}

startTheme(byId("theme"), () => current?.view.redraw?.());
startKeyboard({
  open: (key) => {
    const name = Object.keys(VIEWS).find((view) => VIEWS[view].key === key);
    if (!name || !stream || !store.info.views.includes(name)) return false;
    router.go(`#/${name}`);
    return true;
  },
  escape: hideTip,
  search: () => {
    const field = main.querySelector("input[type=search]");
    if (!(field instanceof HTMLInputElement)) return false;
    field.focus();
    field.select();
    return true;
  },
  other: (event) => current?.view.key?.(event),
});
byId("help").addEventListener("click", showHelp);
byId("logout").addEventListener("click", async () => {
  try {
    await post("logout");
  } catch (error) {
    fail(error, main);
    return;
  }
  start();
});
byId("skip").addEventListener("click", (event) => {
  // Following the link would replace the address of the view.
  event.preventDefault();
  main.focus();
});
router.listen(show);
start();
