// Tokens, shaded by how surprising they were for the model.

import { h, hideTip, showTip } from "./dom.js";
import { number } from "./format.js";

/** Shows white space that is not a plain space between words. */
function visible(text) {
  return text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t").replaceAll(" ", "·");
}

/** Surprise of a token from 0 to 1: a probability of 1 is 0, one of e⁻⁵ or less is 1. */
export function surprise(logprob) {
  return Number.isFinite(logprob) ? Math.min(1, Math.max(0, -logprob / 5)) : 0;
}

/**
 * Shows tokens: `{text, ids, special, logprobs, top}`. Arrow keys move between them when the
 * element has the focus.
 */
export function tokenText(tokens, { whitespace = false, shade = true, label = "Completion" } = {}) {
  const special = new Set(tokens.special ?? []);
  const spans = tokens.text.map((text, n) => {
    const logprob = tokens.logprobs?.[n];
    const shown = whitespace && !special.has(n) ? visible(text) : text;
    const span = h("span", { class: special.has(n) ? "token special" : "token", "data-n": n }, shown);
    if (shade && logprob !== undefined && logprob !== null) {
      span.style.setProperty("--s", surprise(logprob).toFixed(3));
      span.classList.add("scored");
    }
    return span;
  });
  let current = -1;
  const show = (n) => {
    spans[current]?.classList.remove("current");
    current = n;
    if (n < 0) return hideTip();
    spans[n].classList.add("current");
    return showTip(spans[n].getBoundingClientRect(), ...details(tokens, n));
  };
  const element = h("div", {
    class: "tokens", tabindex: tokens.logprobs ? "0" : null, role: tokens.logprobs ? "group" : null,
    "aria-label": tokens.logprobs ? `${label}: ${tokens.text.join("").slice(0, 300)}` : null,
    pointerover: (event) => {
      const n = event.target.dataset?.n;
      if (n !== undefined && tokens.logprobs) show(Number(n));
    },
    pointerleave: () => show(-1),
    blur: () => show(-1),
    keydown: (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move || !spans.length) return;
      event.preventDefault();
      event.stopPropagation();
      show(Math.max(0, Math.min(spans.length - 1, current + move)));
    },
  }, spans);
  return element;
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95) return "100 %";
  return value < 0.01 ? "< 0.01 %" : `${Number(value.toPrecision(3))} %`;
}

function details(tokens, n) {
  const logprob = tokens.logprobs?.[n];
  const alternatives = tokens.top?.[n] ?? [];
  return [
    h("div", {}, h("b", { class: "mono" }, JSON.stringify(tokens.text[n])), h("span", { class: "muted" }, tokens.ids ? ` id ${tokens.ids[n]}` : "")),
    logprob === null || logprob === undefined ? null
      : h("div", {}, `log-probability ${number(logprob)} · ${percent(logprob)}`),
    alternatives.length > 0 && h("table", { class: "alternatives" }, h("tbody", {}, alternatives.slice(0, 8).map(([id, text, value]) => {
      const bar = h("span", { class: "bar" });
      bar.style.width = `${Math.max(1, 80 * Math.exp(value ?? -99))}px`;
      return h("tr", { class: id !== null && id === tokens.ids?.[n] ? "chosen" : null },
        h("td", { class: "mono" }, JSON.stringify(text)), h("td", { class: "num" }, percent(value ?? -99)), h("td", {}, bar));
    }))),
  ];
}

/** Mean log-probability of a completion. */
export function meanLogprob(completion) {
  const values = (completion.logprobs ?? []).filter((value) => Number.isFinite(value));
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN;
}

/** Explains the shading. */
export function shadeKey() {
  return h("span", { class: "shade-key", "aria-label": "Shading: the darker, the less probable" }, "probable",
    [0, 0.25, 0.5, 0.75, 1].map((value) => {
      const step = h("span", { class: "token scored", "aria-hidden": "true" }, " ");
      step.style.setProperty("--s", value);
      return step;
    }), "surprising");
}
