// @ts-check
// Chat with models, one or two side by side.

import { errorText, request } from "../api.js";
import { fill, h } from "../dom.js";
import { stream } from "../inference.js";
import { addChunk, chatRequest, emptyAnswer, isCheckpoint, modelChoices, streamed } from "../model/conversation.js";
import { number, seconds, shortId } from "../model/format.js";
import { SNIPPETS } from "../model/snippets.js";
import { copy } from "../part/copy.js";
import { empty } from "../part/empty.js";
import { toast } from "../part/toast.js";
import { shadeKey, tokenText } from "../part/tokens.js";

/** @import { ListedModel, Message } from "../model/types.js" */
/** @import { SamplingFields } from "../model/conversation.js" */
/** @import { Attributes, OpenView } from "../types.js" */

/** One conversation with one model. */
class Conversation {
  /** @type {Message[]} */
  messages = [];
  /**
   * Ends the answer that is being generated.
   * @type {AbortController | null}
   */
  controller = null;

  /** @param {string} model */
  constructor(model) {
    this.model = model;
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", tabindex: "0" });
    this.setModel(model);
  }

  /** @param {string} model */
  setModel(model) {
    this.model = model;
    this.log.setAttribute("aria-label", `Conversation with ${model}`);
  }
}

/** @type {OpenView} */
export function playgroundView(root, { store, router, fail }) {
  /** @type {ListedModel[]} */
  let models = [];
  /** @type {Conversation[]} */
  let conversations = [];
  let isShaded = true;
  /**
   * Elements of the messages that are shown.
   * @type {WeakMap<Message, Element>}
   */
  const elements = new WeakMap();
  /** @type {SamplingFields} */
  const fields = { temperature: "0.7", top_p: "1", max_tokens: "200", seed: "", system: "" };

  const columns = h("div", { class: "columns" });
  const input = h("textarea", {
    rows: "3", placeholder: "Write a message. Enter sends it, Shift+Enter starts a new line.", "aria-label": "Message", id: "message",
    keydown: (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    },
  });
  const sendButton = h("button", { type: "submit", class: "primary" }, "Send");
  const stopButton = h("button", { type: "button", hidden: true, click: stop }, "Stop");
  const form = h("form", { class: "composer", submit: (event) => { event.preventDefault(); send(); } },
    input, h("div", { class: "buttons" }, sendButton, stopButton));
  const temperature = field("temperature", { min: "0", max: "2", step: "0.1" }, (value) => router.set({ t: value }));
  const topP = field("top_p", { min: "0.01", max: "1", step: "0.05" });
  const maxTokens = field("max_tokens", { min: "1", max: "32768", step: "1" }, (value) => router.set({ max: value }));
  const seed = field("seed", { placeholder: "random" });
  const system = h("textarea", { rows: "3", change: () => { fields.system = system.value; } });
  const shade = h("input", { type: "checkbox", change: () => router.set({ tokens: shade.checked ? null : "0" }) });
  const compareButton = h("button", { type: "button", id: "compare-toggle", click: toggleCompare }, "Compare two models");
  const side = h("aside", { class: "side", "aria-label": "Parameters" },
    h("h2", {}, "Parameters"),
    h("label", {}, "Temperature", temperature), h("label", {}, "Top p", topP),
    h("label", {}, "Maximum tokens", maxTokens), h("label", {}, "Seed", seed),
    h("label", {}, "System message", system),
    h("label", { class: "toggle" }, shade, " Shade tokens"), shadeKey(),
    h("h2", {}, "Copy as"),
    h("div", { class: "buttons" }, Object.keys(SNIPPETS).map((name) =>
      h("button", { type: "button", click: () => copySnippet(name) }, name))),
    h("div", { class: "buttons" }, h("button", { type: "button", click: clear }, "Clear"), compareButton));
  fill(root, h("h1", { class: "offscreen" }, "Playground"), h("div", { class: "playground-grid" }, h("div", { class: "chat" }, columns, form), side));

  /**
   * A number. `remember` writes it into the address.
   * @param {keyof SamplingFields} name
   * @param {Attributes} attributes
   * @param {(value: string) => void} [remember]
   */
  function field(name, attributes, remember) {
    const control = h("input", { type: "number", value: fields[name], ...attributes, change: () => {
      fields[name] = control.value;
      remember?.(control.value);
    } });
    return control;
  }

  /**
   * @param {Conversation} conversation
   * @param {number} index
   */
  function modelSelect(conversation, index) {
    const select = h("select", { "aria-label": `Model ${index + 1}`, change: () => {
      conversation.setModel(select.value);
      remember();
    } }, models.map((model) => h("option", { value: model.id, title: model.id }, modelLabel(model))));
    select.value = conversation.model;
    return select;
  }

  /** @param {ListedModel} model */
  function modelLabel(model) {
    if (!isCheckpoint(model)) return model.id;
    const [run, , name] = model.id.slice("tinker://".length).split("/");
    const base = model.root ? ` (${model.root})` : "";
    return `${store.nameOf(run)} / ${name}${base}`;
  }

  /** Writes the models into the address. */
  function remember() {
    router.set({ model: conversations[0]?.model, other: conversations[1]?.model });
  }

  function layout() {
    columns.classList.toggle("two", conversations.length > 1);
    fill(columns, conversations.map((one, index) => h("section", { class: "conversation" }, modelSelect(one, index), one.log)));
    conversations.forEach(redraw);
    compareButton.textContent = conversations.length > 1 ? "One model" : "Compare two models";
  }

  function toggleCompare() {
    const [first, second] = conversations;
    if (!first) return;
    if (second) {
      second.controller?.abort();
      conversations = [first];
    } else {
      const other = models.find((model) => model.id !== first.model) ?? models[0];
      const added = new Conversation(other.id);
      // Both models answer the same messages.
      added.messages = first.messages.filter((message) => message.role === "user").map((message) => ({ ...message }));
      conversations = [first, added];
    }
    layout();
    remember();
  }

  function clear() {
    stop();
    for (const conversation of conversations) {
      conversation.messages = [];
      redraw(conversation);
    }
  }

  /** @param {string} name */
  function copySnippet(name) {
    const [first] = conversations;
    const body = chatRequest(first?.model ?? "", first?.messages ?? [], fields, input.value);
    copy(SNIPPETS[name](location.origin, body), `Copied as ${name}`);
  }

  /** @param {Conversation} conversation */
  function redraw(conversation) {
    fill(conversation.log, conversation.messages.length ? conversation.messages.map(messageElement)
      : empty("Playground", "Write a message below. Checkpoints of your runs are in the list above."));
  }

  /** @param {Message} message */
  function messageElement(message) {
    const count = message.tokens?.text.length ?? 0;
    const note = message.seconds ? `${count} tokens · ${seconds(message.seconds)} · ${number(count / message.seconds)} tok/s` : "";
    const content = message.tokens && count && isShaded
      ? tokenText(message.tokens, { label: "Answer" }) : h("div", { class: "plain" }, message.content);
    const element = h("div", { class: `message ${message.role}` },
      h("div", { class: "who" }, message.role === "user" ? "You" : "Model", h("span", { class: "muted" }, note)),
      message.error ? h("p", { class: "error" }, message.error) : content);
    elements.set(message, element);
    return element;
  }

  /** @param {Conversation} conversation */
  async function answer(conversation) {
    const message = emptyAnswer();
    const body = streamed(chatRequest(conversation.model, conversation.messages, fields, input.value));
    conversation.messages.push(message);
    redraw(conversation);
    const controller = new AbortController();
    conversation.controller = controller;
    let frame = 0;
    const draw = () => {
      frame = 0;
      // The element of a conversation that was cleared is in no document: replacing it has no effect.
      elements.get(message)?.replaceWith(messageElement(message));
      conversation.log.scrollTop = conversation.log.scrollHeight;
    };
    const started = performance.now();
    try {
      await stream("/v1/chat/completions", body, controller.signal, (event) => {
        if (!addChunk(message, event)) return;
        message.seconds = (performance.now() - started) / 1000;
        frame ||= requestAnimationFrame(draw);
      });
    } catch (error) {
      if (!controller.signal.aborted) message.error = errorText(error);
    } finally {
      conversation.controller = null;
      cancelAnimationFrame(frame);
      draw();
    }
  }

  async function send() {
    const text = input.value.trim();
    if (!text || !conversations.length || sendButton.disabled) return;
    input.value = "";
    sendButton.disabled = true;
    stopButton.hidden = false;
    for (const one of conversations) one.messages.push({ role: "user", content: text });
    await Promise.all(conversations.map(answer));
    sendButton.disabled = false;
    stopButton.hidden = true;
    input.focus();
  }

  function stop() {
    for (const one of conversations) one.controller?.abort();
  }

  /** Reads the models and starts the conversations of the address. */
  async function load() {
    try {
      const [listed] = await Promise.all([request("/v1/models"), store.completeRuns()]);
      const wanted = [router.params.get("model"), router.params.get("other")];
      const choices = modelChoices(listed.data, wanted);
      models = choices.models;
      if (!models.length) {
        fill(columns, empty("No model", "This server serves no model. Start one with:", "tinkex serve"));
        return;
      }
      if (choices.missing.length) toast(`${choices.missing.map(shortId).join(", ")} is not in the list of models`);
      conversations = [new Conversation(wanted[0] ?? models[0].id)];
      if (wanted[1]) conversations.push(new Conversation(wanted[1]));
      layout();
      input.focus();
    } catch (error) {
      fail(error);
    }
  }

  load();
  return {
    update: (params) => {
      fields.temperature = params.get("t") ?? "0.7";
      fields.max_tokens = params.get("max") ?? "200";
      temperature.value = fields.temperature;
      maxTokens.value = fields.max_tokens;
      const wasShaded = isShaded;
      isShaded = params.get("tokens") !== "0";
      shade.checked = isShaded;
      if (isShaded !== wasShaded) conversations.forEach(redraw);
      conversations.forEach((conversation, n) => {
        const model = params.get(n === 0 ? "model" : "other");
        if (model === null || model === conversation.model || !models.some((one) => one.id === model)) return;
        conversation.setModel(model);
        layout();
      });
    },
    close: stop,
  };
}
