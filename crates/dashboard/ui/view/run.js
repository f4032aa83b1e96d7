// @ts-check
// One run: its header and tabs.

import { NotFound } from "../api.js";
import { fill, h } from "../dom.js";
import { age, exact, number, runName, short, shortId, stepCount } from "../model/format.js";
import { chartPanel } from "../part/chart_panel.js";
import { checkpointPanel } from "../part/checkpoints.js";
import { copyButton } from "../part/copy.js";
import { empty } from "../part/empty.js";
import { runsCrumb, statusBadge } from "../part/run_parts.js";
import { sampleList } from "../part/sample_list.js";
import { settingsPanel } from "../part/settings.js";
import { timeline } from "../part/timeline.js";

/** @import { OpenView, Panel } from "../types.js" */

const CLOCK = 10_000;

/** @type {OpenView} */
export function runView(root, { store, router, id: routeId, fail }) {
  const id = routeId ?? "";
  /**
   * The panel of every tab. The first tab is the default, which the address leaves out.
   * @type {Record<string, () => Panel>}
   */
  const panels = {
    charts: () => chartPanel(store, router, [id]),
    ...(store.isFolders ? {} : { samples: () => sampleList(store, router, { run: id }) }),
    checkpoints: () => checkpointPanel(store, id),
    ...(store.isFolders ? {} : { requests: () => timeline(router, id) }),
    settings: () => settingsPanel(store, id),
  };
  const tabs = Object.keys(panels);
  /** @type {string | null} */
  let tab = null;
  /** @type {Panel | null} */
  let panel = null;

  // These elements stay: a click on one that is replaced would be lost.
  const heading = h("h1");
  const facts = h("span", { class: "contents" });
  const problemLine = h("p", { class: "error" });
  const header = h("div", { class: "run-header" }, heading,
    h("p", { class: "facts" }, facts, h("span", { class: "fact mono", title: id }, shortId(id), copyButton(id, "id"))), problemLine);
  const buttons = tabs.map((name) => h("button", {
    type: "button", role: "tab", click: () => choose(name), keydown: (event) => moveTab(event, name),
  }, name[0].toUpperCase() + name.slice(1)));
  const tabBar = h("div", { class: "tabs", role: "tablist", "aria-label": "Parts of the run" }, buttons);
  const content = h("div", { class: "panel", role: "tabpanel" });
  fill(root, runsCrumb(router.lastOf("runs")), header, tabBar, content);
  const clock = setInterval(drawHeader, CLOCK);

  function drawHeader() {
    // A response may arrive after the view was closed.
    if (!root.isConnected) return;
    const run = store.run(id);
    fill(heading, store.nameOf(id), " ", run && statusBadge(run.status));
    if (run) document.title = `${runName(run)} · tinkex`;
    problemLine.textContent = run?.error ?? "";
    problemLine.hidden = !run?.error;
    if (!run) return;
    fill(facts,
      run.base_model && fact("base model", run.base_model),
      run.rank !== null && fact("rank", String(run.rank)),
      fact("steps", stepCount(run)),
      fact("loss per token", number(run.loss)),
      run.tokens_per_second !== null && fact("speed", `${short(run.tokens_per_second)} tok/s`),
      run.tokens > 0 && fact("tokens", short(run.tokens)),
      run.created !== null && fact("started", age(run.created, store.now()), exact(run.created)));
  }

  /**
   * @param {string} label
   * @param {string} value
   * @param {string} [title]
   */
  function fact(label, value, title) {
    return h("span", { class: "fact", title }, h("span", { class: "muted" }, label), " ", value);
  }

  /** @param {string} name */
  function choose(name) {
    router.set({ tab: name === tabs[0] ? null : name }, { push: true });
  }

  /**
   * @param {KeyboardEvent} event
   * @param {string} name
   */
  function moveTab(event, name) {
    const move = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
    if (!move) return;
    event.stopPropagation();
    const next = (tabs.indexOf(name) + move + tabs.length) % tabs.length;
    choose(tabs[next]);
    buttons[next].focus();
  }

  /** @param {string} name */
  async function openTab(name) {
    tab = name;
    buttons.forEach((button, n) => {
      button.setAttribute("aria-selected", String(tabs[n] === name));
      button.tabIndex = tabs[n] === name ? 0 : -1;
    });
    panel?.close?.();
    const opened = panels[name]();
    panel = opened;
    fill(content, opened.element);
    try {
      await opened.load?.();
    } catch (error) {
      if (panel !== opened) return;
      if (error instanceof NotFound) showMissing();
      else fail(error, content);
    }
  }

  /** @param {(error: unknown) => void} failed */
  async function loadHeader(failed) {
    try {
      await store.loadRun(id);
      drawHeader();
    } catch (error) {
      if (error instanceof NotFound) showMissing();
      else failed(error);
    }
  }

  function showMissing() {
    if (!root.isConnected) return;
    closePanel();
    fill(root, runsCrumb(router.lastOf("runs")),
      empty("This run does not exist", `Run ${id} was deleted, or belongs to another server.`));
  }

  function closePanel() {
    panel?.close?.();
    panel = null;
    clearInterval(clock);
  }

  drawHeader();
  return {
    update: (params) => {
      const wanted = params.get("tab") ?? tabs[0];
      const name = tabs.includes(wanted) ? wanted : tabs[0];
      if (tab === null) loadHeader(fail);
      if (name === tab) panel?.update?.(params);
      else openTab(name);
    },
    changes: (changes) => {
      if (changes.deleted.includes(id)) {
        showMissing();
        return;
      }
      const isChanged = changes.runs.some((run) => run.id === id);
      if (isChanged) drawHeader();
      if (isChanged || (tab === "samples" && changes.last_sample !== null)) panel?.refresh?.();
    },
    reconnected: () => {
      loadHeader(() => {});
      panel?.refresh?.();
    },
    redraw: () => panel?.redraw?.(),
    key: (event) => { if (event.key === "Escape") panel?.resetZoom?.(); },
    close: closePanel,
  };
}
