// @ts-check
// Tokens, shaded by how surprising they were for the model.

import { h } from "../dom.js";
import { number } from "../model/format.js";
import { percent, surprise, visibleSpace } from "../model/tokens.js";
import { hideTip, showTip } from "./tip.js";

/** @import { TokenList } from "../model/types.js" */

/** Maximum number of alternatives of a token in its tooltip. */
const ALTERNATIVES = 8;
/** Log-probability that stands for a missing one. */
const IMPROBABLE = -99;

/**
 * Shows tokens. Arrow keys move between them when the element has the focus.
 * @param {TokenList} tokens
 * @param {{ whitespace?: boolean, shade?: boolean, label?: string }} [options]
 */
export function tokenText(tokens, { whitespace = false, shade = true, label = "Completion" } = {}) {
  const special = new Set(tokens.special ?? []);
  const spans = tokens.text.map((text, n) => {
    const logprob = tokens.logprobs?.[n];
    const shown = whitespace && !special.has(n) ? visibleSpace(text) : text;
    const span = h("span", { class: special.has(n) ? "token special" : "token", "data-n": n }, shown);
    if (shade && logprob !== undefined && logprob !== null) {
      span.style.setProperty("--s", surprise(logprob).toFixed(3));
      span.classList.add("scored");
    }
    return span;
  });
  let current = -1;
  /** @param {number} n index of the token to describe; -1 for none */
  const show = (n) => {
    spans[current]?.classList.remove("current");
    current = n;
    if (n < 0) {
      hideTip();
      return;
    }
    spans[n].classList.add("current");
    showTip(spans[n].getBoundingClientRect(), ...details(tokens, n));
  };
  const described = tokens.logprobs !== undefined;
  return h("div", {
    class: "tokens", tabindex: described && "0", role: described && "group",
    "aria-label": described && `${label}: ${tokens.text.join("").slice(0, 300)}`,
    pointerover: (event) => {
      const n = event.target.dataset?.n;
      if (n !== undefined && described) show(Number(n));
    },
    pointerleave: () => show(-1),
    blur: () => show(-1),
    keydown: (event) => {
      const move = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
      if (!move || !spans.length) return;
      event.preventDefault();
      event.stopPropagation();
      show(Math.max(0, Math.min(spans.length - 1, current + move)));
    },
  }, spans);
}

/**
 * @param {TokenList} tokens
 * @param {number} n
 */
function details(tokens, n) {
  const logprob = tokens.logprobs?.[n];
  const alternatives = tokens.top?.[n] ?? [];
  const id = tokens.ids?.[n];
  return [
    h("div", {}, h("b", { class: "mono" }, JSON.stringify(tokens.text[n])), h("span", { class: "muted" }, id === undefined ? "" : ` id ${id}`)),
    logprob === null || logprob === undefined ? null
      : h("div", {}, `log-probability ${number(logprob)} · ${percent(logprob)}`),
    alternatives.length > 0 && h("table", { class: "alternatives" }, h("tbody", {},
      alternatives.slice(0, ALTERNATIVES).map(([other, text, value]) => {
        const bar = h("span", { class: "bar" });
        bar.style.width = `${Math.max(1, 80 * Math.exp(value ?? IMPROBABLE))}px`;
        return h("tr", { class: other !== null && other === id && "chosen" },
          h("td", { class: "mono" }, JSON.stringify(text)), h("td", { class: "num" }, percent(value ?? IMPROBABLE)), h("td", {}, bar));
      }))),
  ];
}

/** Explains the shading. */
export function shadeKey() {
  return h("span", { class: "shade-key", "aria-label": "Shading: the darker, the less probable" }, "probable",
    [0, 0.25, 0.5, 0.75, 1].map((value) => {
      const step = h("span", { class: "token scored", "aria-hidden": "true" }, " ");
      step.style.setProperty("--s", String(value));
      return step;
    }), "surprising");
}
