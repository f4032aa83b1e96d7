// @ts-check
// A group of samples of one prompt.

import { h } from "../dom.js";
import { age, exact, integer, number, seconds, shortId } from "../model/format.js";
import { sortCompletions } from "../model/groups.js";
import { runLink } from "../model/route.js";
import { meanLogprob } from "../model/tokens.js";
import { copyButton } from "./copy.js";
import { tokenText } from "./tokens.js";

/** @import { CompletionDocument } from "../documents.js" */
/** @import { SampleGroup } from "../model/groups.js" */
/** @import { Store } from "../store.js" */

/** Length from which the name of a model is shortened. */
const LONG_NAME = 44;

/**
 * @param {Store} store
 * @param {SampleGroup} group
 * @param {{ order: string, whitespace: boolean }} options
 */
export function sampleCard(store, { members, completions }, { order, whitespace }) {
  const [first] = members;
  const tokens = completions.reduce((sum, completion) => sum + completion.ids.length, 0);
  const took = Math.max(...members.map((sample) => sample.compute_seconds));
  // Training loops save weights for a moment and sample from them.
  const named = first.model ?? "unnamed weights";
  const model = named.startsWith("tinker://") ? named.slice(named.lastIndexOf("/") + 1) : named;
  const isGroup = completions.length > 1;
  return h("article", { class: "sample", "data-id": first.id },
    h("header", {},
      h("span", { class: "chip", title: first.model ?? first.weights }, model.length > LONG_NAME ? shortId(model) : model),
      first.run && h("a", { href: runLink(first.run) }, store.nameOf(first.run)),
      isGroup && h("span", {}, `group of ${completions.length}`),
      h("span", { class: "muted" }, `${integer(first.prompt_tokens)} + ${integer(tokens)} tokens · ${seconds(took)}`
        + (first.source === "inference" ? " · inference endpoint" : "")),
      h("span", { class: "grow" }),
      h("time", { class: "muted", title: exact(first.time) }, age(first.time, store.now())),
      first.prompt && copyButton(first.prompt.text.join("") + (completions[0]?.text.join("") ?? ""), "sample")),
    first.prompt
      ? h("div", { class: "prompt", tabindex: "0", role: "group", "aria-label": "Prompt" }, tokenText(first.prompt, { whitespace, shade: false }))
      : h("p", { class: "muted" }, "The text of this sample is not recorded."),
    h("div", { class: isGroup ? "completions many" : "completions" }, sortCompletions(completions, order).map((completion) =>
      h("div", { class: "completion" }, score(completion, isGroup), tokenText(completion, { whitespace })))),
    members.filter((sample) => sample.error).map((sample) => h("p", { class: "error" }, sample.error)));
}

/**
 * Figures of a completion; null if it is the only one and has nothing to tell.
 * @param {CompletionDocument} completion
 * @param {boolean} isGroup
 */
function score(completion, isGroup) {
  const { advantage, stop } = completion;
  if (!isGroup && advantage === null && stop !== "cancelled") return null;
  return h("div", { class: "score" },
    advantage !== null && h("span", { class: advantage >= 0 ? "plus" : "minus" },
      `advantage ${advantage > 0 ? "+" : ""}${number(advantage)}`),
    h("span", { class: "muted" }, `mean log-probability ${number(meanLogprob(completion))}`),
    stop === "length" && h("span", { class: "muted" }, "cut at the limit"),
    stop === "cancelled" && h("span", { class: "muted" }, "ended by the client"));
}
