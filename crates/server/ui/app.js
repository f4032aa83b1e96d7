// The frame of the page: views, login, keyboard, theme and the stream of changes.

import { Changes, Unauthorized, get, post } from "./api.js";
import { fill, h, hideTip, problem } from "./dom.js";
import { setServerTime } from "./format.js";
import { playgroundView } from "./playground.js";
import { compareView, runView } from "./run.js";
import { runsView } from "./runs.js";
import { samplesView } from "./samples.js";
import { serverView } from "./server.js";

const VIEWS = {
  runs: { title: "Runs", key: "r", open: runsView },
  run: { title: "Run", open: runView, nav: "runs" },
  compare: { title: "Compare", open: compareView, nav: "runs" },
  samples: { title: "Samples", key: "s", open: samplesView },
  playground: { title: "Playground", key: "p", open: playgroundView },
  server: { title: "Server", key: "v", open: serverView },
};

const main = document.getElementById("main");

/** State that all views share. */
export const app = {
  info: null,
  runs: new Map(),
  server: null,
  view: null,
  changes: null,
};

/** Reads view and parameters from the address. */
export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const id = rest.length ? decodeURIComponent(rest.join("/")) : null;
  const params = new URLSearchParams(query ?? "");
  if (name === "runs" && id) return { name: "run", id, params };
  return { name: VIEWS[name] ? name : "runs", id, params };
}

/** Changes parameters of the address without a new view. */
export function setParams(values, replace = true) {
  const { name, id, params } = route();
  for (const [key, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "" || value === false) params.delete(key);
    else params.set(key, value);
  }
  const path = name === "run" ? `runs/${encodeURIComponent(id)}` : name;
  const query = params.toString();
  const hash = `#/${path}${query ? `?${query}` : ""}`;
  if (replace) history.replaceState(null, "", hash);
  else location.hash = hash;
}

export function runLink(id) {
  return `#/runs/${encodeURIComponent(id)}`;
}

async function show() {
  hideTip();
  const { name, id, params } = route();
  const view = VIEWS[name];
  app.view?.close?.();
  app.view = null;
  document.title = `${view.title} · tinkex`;
  for (const link of document.querySelectorAll("#nav a")) {
    const current = link.dataset.view === (view.nav ?? name);
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const root = h("div", { class: `view ${name}` });
  fill(main, root);
  try {
    const opened = view.open(root, { id, params });
    app.view = opened;
    await opened?.ready;
  } catch (error) {
    fail(error, root);
  }
}

/** Shows an error, or the login form. */
export function fail(error, root = main) {
  if (error instanceof Unauthorized) login();
  else {
    console.info("view failed:", error.message);
    fill(root, problem(error, show));
  }
}

function login(message) {
  app.changes?.close();
  app.changes = null;
  document.getElementById("nav").hidden = true;
  setLive("logged out");
  const input = h("input", {
    type: "password", id: "key", autocomplete: "current-password", required: true, spellcheck: "false",
    placeholder: "tml-…",
  });
  const note = h("p", { class: "error", role: "alert", id: "login-error" }, message ?? "");
  const form = h("form", { class: "login", submit: async (event) => {
    event.preventDefault();
    note.textContent = "";
    try {
      await post("login", { key: input.value });
      await start();
    } catch (error) {
      note.textContent = error instanceof Unauthorized ? "This is not the key of the server." : error.message;
      input.select();
    }
  } },
    h("h1", {}, "Log in"),
    h("p", {}, "Enter the API key of the server. It is in the file ", h("code", {}, "key"),
      " of its data folder, or in the file of ", h("code", {}, "--api-key-file"), "."),
    h("label", { for: "key" }, "API key"), input, note,
    h("button", { class: "primary", type: "submit" }, "Log in"),
    h("p", { class: "muted" }, "Or run ", h("code", {}, "tinkex dashboard"), " on the machine of the server."));
  fill(main, form);
  input.focus();
}

function setLive(state) {
  const badge = document.getElementById("live");
  const text = { live: "● live", reconnecting: "◌ reconnecting…", offline: "○ offline" }[state] ?? state;
  badge.textContent = text;
  badge.dataset.state = state;
}

async function start() {
  try {
    app.info = await get("info");
  } catch (error) {
    if (error instanceof Unauthorized) return login();
    fill(main, problem(error, start));
    return undefined;
  }
  setServerTime(app.info.time);
  const nav = document.getElementById("nav");
  nav.hidden = false;
  fill(nav, app.info.views.map((name) => h("a", { href: `#/${name}`, "data-view": name }, VIEWS[name].title)));
  document.getElementById("address").textContent =
    app.info.kind === "folders" ? "run folders" : location.host;
  app.changes = new Changes({
    changes: (changes) => {
      for (const run of changes.runs ?? []) app.runs.set(run.id, run);
      app.view?.changes?.(changes);
    },
    server: (server) => {
      app.server = server;
      app.view?.server?.(server);
    },
    state: (state, reconnected) => {
      setLive(state);
      if (reconnected) app.view?.reconnected?.();
    },
  }, app.info.cursor);
  await show();
  return undefined;
}

// Theme: the choice of the user, or that of the system.
function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  const dark = isDark();
  const button = document.getElementById("theme");
  button.textContent = dark ? "☾" : "☀";
  app.view?.redraw?.();
}

export function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

document.getElementById("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  localStorage.setItem("theme", theme);
  applyTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme());
applyTheme(localStorage.getItem("theme"));

// Keyboard.
const SHORTCUTS = [
  ["/", "Search"], ["j, k", "Next, previous row"], ["Enter", "Open the row"], ["x", "Select the row"],
  ["c", "Compare the selected runs"], ["g r", "Runs"], ["g s", "Samples"], ["g p", "Playground"],
  ["g v", "Server"], ["←, →", "Move the crosshair of a focused chart, or the token of a focused sample"],
  ["Esc", "Reset the zoom, close"], ["?", "This help"],
];

function showHelp() {
  const dialog = h("dialog", { class: "help", "aria-labelledby": "help-title", close: () => dialog.remove() },
    h("h2", { id: "help-title" }, "Keyboard"),
    h("dl", {}, SHORTCUTS.map(([keys, text]) => [
      h("dt", {}, keys.split(" ").map((key, n) => [n ? " " : "", h("kbd", {}, key.replace(",", ""))])),
      h("dd", {}, text)])),
    h("form", { method: "dialog" }, h("button", { class: "primary" }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
document.getElementById("help").addEventListener("click", showHelp);

let prefix = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input:not([type=checkbox]):not([type=range]), textarea, select, dialog");
  if (event.key === "Escape") { hideTip(); if (typing && event.target.blur) event.target.blur(); }
  if (typing) return;
  if (prefix === "g") {
    prefix = "";
    const name = Object.keys(VIEWS).find((view) => VIEWS[view].key === event.key);
    if (name && app.info?.views.includes(name)) { location.hash = `#/${name}`; event.preventDefault(); }
    return;
  }
  if (event.key === "g") { prefix = "g"; setTimeout(() => { prefix = ""; }, 1000); return; }
  if (event.key === "?") return showHelp();
  if (event.key === "/") {
    const search = main.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); search.select(); }
    return undefined;
  }
  app.view?.key?.(event);
  return undefined;
});

addEventListener("hashchange", show);
start();
