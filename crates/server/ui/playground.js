// Chat with models, one or two side by side.

import { request, stream } from "./api.js";
import { app, fail, setParams } from "./app.js";
import { copy, empty, fill, h, toast } from "./dom.js";
import { number, seconds, shortId } from "./format.js";
import { shadeKey, tokenText } from "./tokens.js";

/** One conversation with one model. */
class Conversation {
  constructor(model) {
    this.model = model;
    this.messages = [];
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": `Conversation with ${model}`, tabindex: "0" });
    this.controller = null;
  }
}

export function playgroundView(root, { params }) {
  let models = [];
  const state = {
    conversations: [], tokens: params.get("tokens") !== "0",
    values: {
      temperature: Number(params.get("t") ?? 0.7), top_p: 1, max_tokens: Number(params.get("max") ?? 200), seed: "", system: "",
    },
  };
  const columns = h("div", { class: "columns" });
  const input = h("textarea", {
    rows: "3", placeholder: "Write a message. Enter sends it, Shift+Enter starts a new line.", "aria-label": "Message", id: "message",
    keydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); } },
  });
  const sendButton = h("button", { type: "submit", class: "primary" }, "Send");
  const stopButton = h("button", { type: "button", hidden: true, click: stop }, "Stop");
  const form = h("form", { class: "composer", submit: (event) => { event.preventDefault(); send(); } },
    input, h("div", { class: "buttons" }, sendButton, stopButton));
  const field = (label, name, attributes) => {
    const control = h("input", { value: state.values[name], ...attributes, change: () => {
      state.values[name] = attributes.type === "number" ? control.value : control.value;
    } });
    return h("label", {}, label, control);
  };
  const side = h("aside", { class: "side", "aria-label": "Parameters" },
    h("h2", {}, "Parameters"),
    field("Temperature", "temperature", { type: "number", min: "0", max: "2", step: "0.1" }),
    field("Top p", "top_p", { type: "number", min: "0.01", max: "1", step: "0.05" }),
    field("Maximum tokens", "max_tokens", { type: "number", min: "1", max: "32768", step: "1" }),
    field("Seed", "seed", { type: "number", placeholder: "random" }),
    h("label", {}, "System message", h("textarea", { rows: "3", change: (event) => { state.values.system = event.target.value; } })),
    h("label", { class: "toggle" }, h("input", { type: "checkbox", checked: state.tokens, change: (event) => {
      state.tokens = event.target.checked;
      setParams({ tokens: state.tokens ? null : "0" });
      state.conversations.forEach(redraw);
    } }), " Shade tokens"), shadeKey(),
    h("h2", {}, "Copy as"),
    h("div", { class: "buttons" }, Object.entries(SNIPPETS).map(([name, make]) =>
      h("button", { type: "button", click: () => copy(make(state.conversations[0]?.model ?? "", body(state.conversations[0], false)), `Copied as ${name}`) }, name))),
    h("div", { class: "buttons" },
      h("button", { type: "button", click: () => { stop(); state.conversations.forEach((one) => { one.messages = []; redraw(one); }); } }, "Clear"),
      h("button", { type: "button", id: "compare-toggle", click: toggleCompare }, "Compare two models")));
  fill(root, h("h1", { class: "offscreen" }, "Playground"), h("div", { class: "playground-grid" }, h("div", { class: "chat" }, columns, form), side));

  function modelSelect(conversation, index) {
    const select = h("select", { "aria-label": `Model ${index + 1}`, change: () => {
      conversation.model = select.value;
      remember();
    } }, models.map((model) => h("option", { value: model.id, title: model.id }, label(model))));
    select.value = conversation.model;
    return select;
  }

  function label(model) {
    if (!model.id.startsWith("tinker://")) return model.id;
    const [run, , name] = model.id.slice(9).split("/");
    const known = app.runs.get(run);
    return `${known?.name ?? shortId(run)} / ${name} (${model.root})`;
  }

  function remember() {
    setParams({ model: state.conversations[0]?.model, other: state.conversations[1]?.model });
  }

  function layout() {
    columns.classList.toggle("two", state.conversations.length > 1);
    fill(columns, state.conversations.map((one, index) => h("section", { class: "conversation" }, modelSelect(one, index), one.log)));
    state.conversations.forEach(redraw);
    document.getElementById("compare-toggle").textContent = state.conversations.length > 1 ? "One model" : "Compare two models";
  }

  function toggleCompare() {
    if (state.conversations.length > 1) state.conversations.pop();
    else {
      const other = models.find((model) => model.id !== state.conversations[0]?.model) ?? models[0];
      if (!other) return;
      const added = new Conversation(other.id);
      // Both models answer the same messages.
      added.messages = state.conversations[0].messages.filter((message) => message.role === "user").map((message) => ({ ...message }));
      state.conversations.push(added);
    }
    remember();
    layout();
  }

  function body(conversation, streaming) {
    const { temperature, top_p, max_tokens, seed, system } = state.values;
    const messages = (conversation?.messages ?? []).filter((message) => !message.error && (message.content || message.role === "user"))
      .map(({ role, content }) => ({ role, content }));
    if (!messages.length) messages.push({ role: "user", content: input.value || "Hello!" });
    if (system) messages.unshift({ role: "system", content: system });
    const result = { model: conversation?.model ?? "", messages, temperature: Number(temperature), max_tokens: Number(max_tokens) };
    if (Number(top_p) < 1) result.top_p = Number(top_p);
    if (seed !== "") result.seed = Number(seed);
    if (streaming) Object.assign(result, { stream: true, logprobs: true, top_logprobs: 5 });
    return result;
  }

  function redraw(conversation) {
    if (!conversation.messages.length) {
      fill(conversation.log, empty("Playground", "Write a message below. Checkpoints of your runs are in the list above."));
      return;
    }
    fill(conversation.log, conversation.messages.map((message) => messageElement(message)));
  }

  function messageElement(message) {
    const note = message.seconds ? `${message.tokens.text.length} tokens · ${seconds(message.seconds)} · ${number(message.tokens.text.length / message.seconds)} tok/s` : "";
    const content = message.tokens?.text.length && state.tokens
      ? tokenText(message.tokens, { label: "Answer" }) : h("div", { class: "plain" }, message.content);
    return h("div", { class: `message ${message.role}` },
      h("div", { class: "who" }, message.role === "user" ? "You" : "Model", h("span", { class: "muted" }, note)),
      message.error ? h("p", { class: "error" }, message.error) : content);
  }

  async function answer(conversation) {
    const message = { role: "assistant", content: "", tokens: { text: [], logprobs: [], top: [] } };
    const sent = body(conversation, true);
    conversation.messages.push(message);
    redraw(conversation);
    let element = conversation.log.lastElementChild;
    conversation.controller = new AbortController();
    let frame = 0;
    const draw = () => {
      frame = 0;
      const next = messageElement(message);
      element.replaceWith(next);
      element = next;
      conversation.log.scrollTop = conversation.log.scrollHeight;
    };
    const started = performance.now();
    try {
      await stream("/v1/chat/completions", sent, conversation.controller.signal, (event) => {
        const choice = event.choices?.[0];
        if (!choice) return;
        message.content += choice.delta?.content ?? "";
        for (const token of choice.logprobs?.content ?? []) {
          message.tokens.text.push(token.token);
          message.tokens.logprobs.push(token.logprob);
          message.tokens.top.push((token.top_logprobs ?? []).map((other) => [null, other.token, other.logprob]));
        }
        message.seconds = (performance.now() - started) / 1000;
        frame ||= requestAnimationFrame(draw);
      });
    } catch (error) {
      if (error.name !== "AbortError") message.error = error.message;
    } finally {
      conversation.controller = null;
      cancelAnimationFrame(frame);
      draw();
    }
  }

  async function send() {
    const text = input.value.trim();
    if (!text || sendButton.disabled) return;
    input.value = "";
    sendButton.disabled = true;
    stopButton.hidden = false;
    for (const one of state.conversations) one.messages.push({ role: "user", content: text });
    await Promise.all(state.conversations.map(answer));
    sendButton.disabled = false;
    stopButton.hidden = true;
    input.focus();
  }

  function stop() {
    for (const one of state.conversations) one.controller?.abort();
  }

  async function load() {
    try {
      models = (await request("/v1/models")).data;
      // Newest checkpoints first, then base models.
      models.sort((a, b) => Number(b.id.startsWith("tinker://")) - Number(a.id.startsWith("tinker://")) || b.created - a.created);
      if (!app.runs.size) {
        const { runs } = await request("/ui/api/runs");
        app.runs = new Map(runs.map((run) => [run.id, run]));
      }
      if (!models.length) { fill(columns, empty("No model", "This server serves no model. Start one with:", "tinkex serve")); return; }
      const wanted = params.get("model");
      if (wanted && !models.some((model) => model.id === wanted)) {
        models.unshift({ id: wanted, root: "", created: 0 });
        toast(`${shortId(wanted)} is not in the list of models`);
      }
      state.conversations = [new Conversation(wanted ?? models[0].id)];
      if (params.get("other")) state.conversations.push(new Conversation(params.get("other")));
      layout();
      input.focus();
    } catch (error) { fail(error, root); }
  }

  return { ready: load(), close: stop, redraw: () => {} };
}

const json = (value) => JSON.stringify(value, null, 2);

/** Programs that send the same request. The key is read from the environment. */
const SNIPPETS = {
  curl: (_, body) => `curl ${location.origin}/v1/chat/completions \\
  -H "Authorization: Bearer $TINKER_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${json(body).replaceAll("'", "'\\''")}'`,
  Python: (_, body) => {
    const { messages, model, ...rest } = body;
    const options = Object.entries(rest).map(([name, value]) => `    ${name}=${JSON.stringify(value)},\n`).join("");
    return `import os
from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=os.environ["TINKER_API_KEY"])
response = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=${json(messages).replaceAll("\n", "\n    ")},
${options})
print(response.choices[0].message.content)
`;
  },
  Rust: (_, body) => `// Cargo.toml: reqwest = { version = "0.13", features = ["json"] }, serde_json = "1",
//             tokio = { version = "1", features = ["full"] }
#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let body = serde_json::json!(${json(body).replaceAll("\n", "\n    ")});
    let response: serde_json::Value = reqwest::Client::new()
        .post(${JSON.stringify(`${location.origin}/v1/chat/completions`)})
        .bearer_auth(std::env::var("TINKER_API_KEY")?)
        .json(&body)
        .send()
        .await?
        .error_for_status()?
        .json()
        .await?;
    println!("{}", response["choices"][0]["message"]["content"].as_str().unwrap_or_default());
    Ok(())
}
`,
};
