// The list of runs.

import { get } from "./api.js";
import { app, fail, runLink, setParams } from "./app.js";
import { debounce, empty, fill, h, perFrame } from "./dom.js";
import { age, bytes, exact, integer, number, runName, short, shortId, status } from "./format.js";

const ROW = 45;
const SORTS = {
  created: ["Newest", (a, b) => (b.created ?? 0) - (a.created ?? 0)],
  used: ["Last used", (a, b) => (b.last_used ?? 0) - (a.last_used ?? 0)],
  name: ["Name", (a, b) => runName(a).localeCompare(runName(b))],
  loss: ["Lowest loss", (a, b) => (a.loss ?? Infinity) - (b.loss ?? Infinity)],
  steps: ["Most steps", (a, b) => b.steps - a.steps],
  storage: ["Largest storage", (a, b) => (b.storage_bytes ?? 0) - (a.storage_bytes ?? 0)],
};

/** A small chart of the losses. */
export function spark(values, width = 96, height = 22) {
  const finite = values.filter((value) => Number.isFinite(value));
  if (finite.length < 2) return h("span", { class: "spark" });
  const min = Math.min(...finite);
  const range = Math.max(...finite) - min || 1;
  const points = values.map((value, n) => {
    const x = 1 + (n / (values.length - 1)) * (width - 2);
    const y = height - 2 - ((value - min) / range) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  return h("svg:svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    h("svg:polyline", { points: points.join(" ") }));
}

export function statusBadge(name) {
  const [icon, word] = status(name);
  return h("span", { class: `status ${name}` }, h("span", { "aria-hidden": "true" }, icon), ` ${word}`);
}

export function runsView(root, { params }) {
  const state = {
    text: params.get("q") ?? "", status: params.get("status") ?? "", sort: params.get("sort") ?? "created",
    selected: new Set((params.get("sel") ?? "").split(",").filter(Boolean)), cursor: -1, shown: [],
  };
  const search = h("input", {
    type: "search", placeholder: "Search name, model or id", "aria-label": "Search runs", value: state.text,
    input: debounce(80, () => { state.text = search.value; setParams({ q: state.text }); refresh(); }),
  });
  const statusSelect = h("select", { "aria-label": "Status", change: () => {
    state.status = statusSelect.value; setParams({ status: state.status }); refresh();
  } }, ["", "training", "idle", "ended", "failed"].map((name) =>
    h("option", { value: name }, name || "all statuses")));
  statusSelect.value = state.status;
  const sortSelect = h("select", { "aria-label": "Sort", change: () => {
    state.sort = sortSelect.value; setParams({ sort: state.sort }); refresh();
  } }, Object.entries(SORTS).map(([name, [label]]) => h("option", { value: name }, label)));
  sortSelect.value = SORTS[state.sort] ? state.sort : "created";
  const compare = h("button", { type: "button", class: "primary", disabled: true, click: openCompare }, "Compare");
  const count = h("span", { class: "muted", role: "status" });
  const body = h("div", { class: "rows", role: "rowgroup" });
  const table = h("div", { class: "table", role: "table", "aria-label": "Training runs" },
    h("div", { class: "row head", role: "row" },
      ["", "Run", "Base model", "Status", "Steps", "Loss per token", "Speed", "Last used", "Storage"].map((title) =>
        h("span", { role: "columnheader" }, title || h("span", { class: "offscreen" }, "Select")))),
    body);
  const holder = h("div", {}, h("p", { class: "muted loading" }, "Loading runs…"));
  fill(root,
    h("div", { class: "toolbar" }, h("h1", {}, "Runs"), count, h("span", { class: "grow" }), search,
      statusSelect, sortSelect, compare),
    holder);

  const draw = perFrame(drawRows);
  addEventListener("scroll", draw, { passive: true });
  addEventListener("resize", draw);
  const clock = setInterval(draw, 10000);

  function openCompare() {
    const ids = [...state.selected];
    if (ids.length === 1) location.hash = runLink(ids[0]);
    else if (ids.length) location.hash = `#/compare?${new URLSearchParams({ runs: ids.join(",") })}`;
  }

  function toggle(id) {
    if (!state.selected.delete(id)) state.selected.add(id);
    setParams({ sel: [...state.selected].join(",") });
    refresh();
  }

  function refresh() {
    const text = state.text.toLowerCase();
    const matches = (run) => (!state.status || run.status === state.status)
      && (!text || [run.name, run.id, run.base_model].some((part) => part?.toLowerCase().includes(text)));
    state.shown = [...app.runs.values()].filter(matches).sort((SORTS[state.sort] ?? SORTS.created)[1]);
    state.cursor = Math.min(state.cursor, state.shown.length - 1);
    const all = app.runs.size;
    count.textContent = state.shown.length === all ? `${integer(all)}` : `${integer(state.shown.length)} of ${integer(all)}`;
    for (const id of state.selected) if (!app.runs.has(id)) state.selected.delete(id);
    compare.disabled = state.selected.size === 0;
    compare.textContent = state.selected.size > 1 ? `Compare (${state.selected.size})` : "Compare";
    if (!all) {
      const folders = app.info?.kind === "folders";
      fill(holder, folders
        ? empty("No run folders", "A run folder has run.json and metrics.jsonl. Train something:",
          "tinkex train examples.jsonl")
        : empty("No runs yet", "Every program that trains on this server appears here. Try this in another terminal:",
          "tinkex quickstart --local"));
    } else if (!state.shown.length) {
      fill(holder, empty("No run matches", "Change the search or the status."));
    } else if (table.parentNode !== holder) fill(holder, table);
    draw();
  }

  /** Draws the rows that are visible; the list may have thousands. */
  function drawRows() {
    if (!table.isConnected) return;
    const rows = state.shown;
    const narrow = innerWidth < 760;
    const height = narrow ? 92 : ROW;
    const offset = body.getBoundingClientRect().top;
    const virtual = rows.length > 200;
    const first = virtual ? Math.max(0, Math.floor(-offset / height) - 10) : 0;
    const last = virtual ? Math.min(rows.length, first + Math.ceil(innerHeight / height) + 20) : rows.length;
    const shown = rows.slice(first, last).map((run, n) => row(run, first + n));
    // Elements that stay are not moved: a click on one would be lost.
    const before = [...body.children].filter((element) => element.dataset.id);
    const same = before.length === shown.length && before.every((element, n) => element === shown[n]);
    const layout = `${first} ${rows.length} ${height}`;
    if (same && body.dataset.layout === layout) return;
    const focused = document.activeElement?.closest?.(".row")?.dataset.id;
    body.dataset.layout = layout;
    fill(body,
      first > 0 && spacer(first * height), shown,
      last < rows.length && spacer((rows.length - last) * height));
    if (focused) body.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.querySelector("a")?.focus({ preventScroll: true });
    for (const id of known.keys()) if (!app.runs.has(id)) known.delete(id);
  }

  function spacer(height) {
    const element = h("div", { "aria-hidden": "true" });
    element.style.height = `${height}px`;
    return element;
  }

  const known = new Map();

  /** Returns the row of a run with its current values. The element of a run stays the same. */
  function row(run, index) {
    let entry = known.get(run.id);
    if (!entry) known.set(run.id, entry = createRow(run));
    const { element, parts } = entry;
    const selected = state.selected.has(run.id);
    element.className = `row${index === state.cursor ? " cursor" : ""}${selected ? " selected" : ""}`;
    element.setAttribute("aria-rowindex", index + 2);
    parts.check.checked = selected;
    parts.check.setAttribute("aria-label", `Select ${runName(run)}`);
    parts.last.title = exact(run.last_used);
    for (const [part, text] of [
      ["link", runName(run)], ["model", run.base_model ?? "–"],
      ["steps", integer(run.steps) + (run.total_steps ? `/${integer(run.total_steps)}` : "")],
      ["value", number(run.loss)], ["speed", run.tokens_per_second ? `${short(run.tokens_per_second)} tok/s` : "–"],
      ["last", age(run.last_used)], ["storage", run.storage_bytes ? bytes(run.storage_bytes) : "–"],
    ]) {
      if (parts[part].textContent !== text) parts[part].textContent = text;
    }
    if (entry.status !== run.status) fill(parts.status, statusBadge(entry.status = run.status));
    if (entry.losses !== run.losses) {
      entry.losses = run.losses;
      parts.loss.firstElementChild.replaceWith(spark(run.losses ?? []));
    }
    return element;
  }

  function createRow(run) {
    const cell = (name, ...children) => h("span", { role: "cell", class: name }, ...children);
    const parts = {
      check: h("input", { type: "checkbox", change: () => toggle(run.id) }),
      link: h("a", { href: runLink(run.id), title: run.id }),
      model: h("span", { role: "cell", class: "model", title: run.base_model }),
      status: cell("state"), steps: cell("num"), value: h("span", { class: "num" }), speed: cell("num"),
      last: h("time", { role: "cell", class: "num muted" }), storage: cell("num"),
    };
    parts.loss = cell("loss", h("span"), parts.value);
    const element = h("div", {
      role: "row", "data-id": run.id,
      click: (event) => { if (!event.target.closest("a, input, button, label")) location.hash = runLink(run.id); },
    },
      cell("check", h("label", {}, parts.check)),
      cell("name", parts.link, run.name && h("span", { class: "muted mono id" }, shortId(run.id))),
      parts.model, parts.status, parts.steps, parts.loss, parts.speed, parts.last, parts.storage);
    return { element, parts, status: null, losses: null };
  }

  async function load() {
    try {
      const { runs } = await get("runs");
      app.runs = new Map(runs.map((run) => [run.id, run]));
      refresh();
    } catch (error) {
      fail(error, root);
    }
  }

  function key(event) {
    const move = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    const run = state.shown[state.cursor];
    if (move && state.shown.length) {
      state.cursor = Math.max(0, Math.min(state.shown.length - 1, state.cursor + move));
      const top = body.getBoundingClientRect().top + scrollY + state.cursor * ROW;
      if (top < scrollY + 120 || top > scrollY + innerHeight - 90) scrollTo({ top: top - innerHeight / 2 });
      drawRows();
      event.preventDefault();
    } else if (event.key === "x" && run) toggle(run.id);
    else if (event.key === "c") openCompare();
    else if (event.key === "Enter" && run && !event.target.closest("a, button, input")) location.hash = runLink(run.id);
  }

  return {
    ready: load(),
    changes: (changes) => { if (changes.runs?.length) refresh(); },
    reconnected: load,
    key,
    close: () => {
      clearInterval(clock);
      removeEventListener("scroll", draw);
      removeEventListener("resize", draw);
    },
  };
}
