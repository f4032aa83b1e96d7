// @ts-check
// The list of runs.

import { choiceList, debounce, fill, h, perFrame } from "../dom.js";
import { age, bytes, exact, integer, number, runName, short, shortId, stepCount } from "../model/format.js";
import { compareLink, formatIds, parseIds, runLink } from "../model/route.js";
import { RUN_ORDERS, selectRuns, visibleRows } from "../model/runs.js";
import { empty } from "../part/empty.js";
import { spark, statusBadge } from "../part/run_parts.js";

/** @import { RunDocument } from "../documents.js" */
/** @import { OpenView } from "../types.js" */

/** Heights of a row in pixels, as in style.css. */
const ROW = 45;
const NARROW_ROW = 92;
const NARROW_WINDOW = 760;
/** Interval at which ages are updated, in milliseconds. */
const CLOCK = 10_000;
const COLUMNS = ["", "Run", "Base model", "Status", "Steps", "Loss per token", "Speed", "Last used", "Storage"];

const rowHeight = () => (innerWidth < NARROW_WINDOW ? NARROW_ROW : ROW);

/**
 * The elements of the row of a run, which stay the same while its values change.
 * @param {RunDocument} run
 * @param {(id: string) => void} toggle
 * @param {(id: string) => void} open
 */
function createRow(run, toggle, open) {
  const cell = (/** @type {string} */ name, /** @type {(Node | string | false)[]} */ ...children) =>
    h("span", { role: "cell", class: name }, ...children);
  const check = h("input", { type: "checkbox", change: () => toggle(run.id) });
  const link = h("a", { href: runLink(run.id), title: run.id });
  const model = h("span", { role: "cell", class: "model", title: run.base_model });
  const state = cell("state");
  const steps = cell("num");
  const value = h("span", { class: "num" });
  const chart = h("span");
  const speed = cell("num");
  const last = h("time", { role: "cell", class: "num muted" });
  const storage = cell("num");
  const element = h("div", {
    role: "row", "data-id": run.id,
    click: (event) => { if (!event.target.closest("a, input, button, label")) open(run.id); },
  },
    cell("check", h("label", {}, check)),
    cell("name", link, run.name !== null && h("span", { class: "muted mono id" }, shortId(run.id))),
    model, state, steps, cell("loss", chart, value), speed, last, storage);
  /** @type {string | null} */
  let shownStatus = null;
  /** @type {RunDocument["losses"] | null} */
  let shownLosses = null;
  /** @type {number | null} */
  let shownUse = null;
  /** @type {Element} */
  let shownChart = chart;

  /**
   * Shows the current values. Only what differs is changed: the list is drawn in every frame of a scroll.
   * @param {RunDocument} current
   * @param {{ index: number, isSelected: boolean, isCursor: boolean, now: number }} place
   */
  function update(current, { index, isSelected, isCursor, now }) {
    element.className = `row${isCursor ? " cursor" : ""}${isSelected ? " selected" : ""}`;
    element.setAttribute("aria-rowindex", String(index + 2));
    check.checked = isSelected;
    check.setAttribute("aria-label", `Select ${runName(current)}`);
    /** @type {[HTMLElement, string][]} */
    const texts = [
      [link, runName(current)], [model, current.base_model ?? "–"], [steps, stepCount(current)], [value, number(current.loss)],
      [speed, current.tokens_per_second ? `${short(current.tokens_per_second)} tok/s` : "–"],
      [last, age(current.last_used, now)], [storage, current.storage_bytes ? bytes(current.storage_bytes) : "–"],
    ];
    for (const [part, text] of texts) if (part.textContent !== text) part.textContent = text;
    if (shownStatus !== current.status) {
      shownStatus = current.status;
      fill(state, statusBadge(current.status));
    }
    if (shownUse !== current.last_used) {
      shownUse = current.last_used;
      last.title = exact(current.last_used);
    }
    if (shownLosses !== current.losses) {
      shownLosses = current.losses;
      const drawn = spark(current.losses);
      shownChart.replaceWith(drawn);
      shownChart = drawn;
    }
  }

  return { element, update };
}

/** @type {OpenView} */
export function runsView(root, { store, router, fail }) {
  let search = { text: "", status: "", order: "created" };
  /** @type {Set<string>} */
  let selected = new Set();
  /**
   * Run that the keyboard acts on. Kept by id: rows move when runs are added.
   * @type {string | null}
   */
  let cursor = null;
  /** @type {RunDocument[]} */
  let shown = [];
  /** @type {Map<string, ReturnType<typeof createRow>>} */
  const rows = new Map();

  const field = h("input", {
    type: "search", placeholder: "Search name, model or id", "aria-label": "Search runs",
    // The view may have been closed since the key was pressed: the address is another one then.
    input: debounce(80, () => { if (field.isConnected) router.set({ q: field.value }); }),
  });
  const statusSelect = choiceList("Status", ["", "training", "idle", "ended", "failed"].map((name) => [name, name || "all statuses"]),
    (value) => router.set({ status: value }));
  const orderSelect = choiceList("Sort", Object.entries(RUN_ORDERS).map(([name, [label]]) => [name, label]),
    (value) => router.set({ sort: value === "created" ? null : value }));
  const compare = h("button", { type: "button", class: "primary", disabled: true, click: openCompare }, "Compare");
  const count = h("span", { class: "muted", role: "status" });
  const body = h("div", { class: "rows", role: "rowgroup" });
  const table = h("div", { class: "table", role: "table", "aria-label": "Training runs" },
    h("div", { class: "row head", role: "row" }, COLUMNS.map((title) =>
      h("span", { role: "columnheader" }, title || h("span", { class: "offscreen" }, "Select")))),
    body);
  const holder = h("div", {}, h("p", { class: "muted loading" }, "Loading runs…"));
  fill(root,
    h("div", { class: "toolbar" }, h("h1", {}, "Runs"), count, h("span", { class: "grow" }), field,
      statusSelect, orderSelect, compare),
    holder);

  const draw = perFrame(drawRows);
  addEventListener("scroll", draw, { passive: true });
  addEventListener("resize", draw);
  const clock = setInterval(draw, CLOCK);

  /** @param {string} id */
  const open = (id) => router.go(runLink(id));

  /** Ids of the selected runs that exist. */
  const selection = () => [...selected].filter((id) => store.run(id));

  function openCompare() {
    const ids = selection();
    if (ids.length === 1) open(ids[0]);
    else if (ids.length) router.go(compareLink(ids));
  }

  /** @param {string} id */
  function toggle(id) {
    const ids = new Set(selection());
    if (!ids.delete(id)) ids.add(id);
    router.set({ sel: formatIds(ids) });
  }

  function refresh() {
    // An incomplete list would look as if runs had disappeared.
    if (!store.isComplete) return;
    shown = selectRuns(store.runs, search);
    const all = store.runCount;
    count.textContent = shown.length === all ? integer(all) : `${integer(shown.length)} of ${integer(all)}`;
    const chosen = selection().length;
    compare.disabled = chosen === 0;
    compare.textContent = chosen > 1 ? `Compare (${chosen})` : "Compare";
    if (!shown.length) fill(holder, nothing());
    else if (table.parentNode !== holder) fill(holder, table);
    draw();
  }

  function nothing() {
    if (store.runCount) return empty("No run matches", "Change the search or the status.");
    return store.isFolders
      ? empty("No run folders", "A run folder has run.json and metrics.jsonl. Train something:", "tinkex train examples.jsonl")
      : empty("No runs yet", "Every program that trains on this server appears here. Try this in another terminal:", "tinkex quickstart --local");
  }

  /** Draws the rows that are visible; the list may have thousands. */
  function drawRows() {
    if (!table.isConnected) return;
    const height = rowHeight();
    const [first, end] = visibleRows(shown.length, height, body.getBoundingClientRect().top, innerHeight);
    const now = store.now();
    const visible = shown.slice(first, end).map((run, n) => {
      let row = rows.get(run.id);
      if (!row) rows.set(run.id, row = createRow(run, toggle, open));
      row.update(run, { index: first + n, isSelected: selected.has(run.id), isCursor: run.id === cursor, now });
      return row.element;
    });
    // Elements that stay are not moved: a click on one would be lost.
    const before = [...body.children].filter((element) => element.getAttribute("role") === "row");
    const isSame = before.length === visible.length && before.every((element, n) => element === visible[n]);
    const layout = `${first} ${shown.length} ${height}`;
    if (isSame && body.dataset.layout === layout) return;
    body.dataset.layout = layout;
    const focused = document.activeElement;
    fill(body, first > 0 && spacer(first * height), visible, end < shown.length && spacer((shown.length - end) * height));
    // An element that is inserted again loses the focus.
    if (focused instanceof HTMLElement && body.contains(focused)) focused.focus({ preventScroll: true });
    for (const id of rows.keys()) if (!store.run(id)) rows.delete(id);
  }

  /** @param {number} height */
  function spacer(height) {
    const element = h("div", { "aria-hidden": "true" });
    element.style.height = `${height}px`;
    return element;
  }

  async function load() {
    try {
      await store.reloadRuns();
      refresh();
    } catch (error) {
      fail(error);
    }
  }

  /** @param {number} move */
  function moveCursor(move) {
    const index = shown.findIndex((run) => run.id === cursor);
    const next = Math.max(0, Math.min(shown.length - 1, index + move));
    cursor = shown[next].id;
    const top = body.getBoundingClientRect().top + scrollY + next * rowHeight();
    if (top < scrollY + 120 || top > scrollY + innerHeight - 90) scrollTo({ top: top - innerHeight / 2 });
    drawRows();
  }

  /** @param {KeyboardEvent} event */
  function key(event) {
    /** @type {Record<string, number>} */
    const moves = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 };
    const target = event.target instanceof Element ? event.target : null;
    if (moves[event.key] && shown.length) {
      moveCursor(moves[event.key]);
      event.preventDefault();
    } else if (event.key === "x" && cursor !== null && store.run(cursor)) toggle(cursor);
    else if (event.key === "c") openCompare();
    else if (event.key === "Enter" && cursor !== null && store.run(cursor) && !target?.closest("a, button, input")) open(cursor);
  }

  load();
  return {
    update: (params) => {
      search = { text: params.get("q") ?? "", status: params.get("status") ?? "", order: params.get("sort") ?? "created" };
      selected = new Set(parseIds(params.get("sel")));
      // A text that is being typed is ahead of the address.
      if (document.activeElement !== field) field.value = search.text;
      statusSelect.value = search.status;
      orderSelect.value = search.order in RUN_ORDERS ? search.order : "created";
      refresh();
    },
    changes: (changes) => { if (changes.runs.length || changes.deleted.length) refresh(); },
    reconnected: load,
    key,
    close: () => {
      clearInterval(clock);
      removeEventListener("scroll", draw);
      removeEventListener("resize", draw);
    },
  };
}
