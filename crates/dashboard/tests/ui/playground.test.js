import assert from "node:assert/strict";
import { test } from "node:test";

import { addChunk, chatRequest, emptyAnswer, modelChoices, streamed } from "../../ui/model/conversation.js";
import { EventParser } from "../../ui/model/event_stream.js";
import { figure, rates } from "../../ui/model/load.js";
import { SNIPPETS } from "../../ui/model/snippets.js";

const fields = { temperature: "0.7", top_p: "1", max_tokens: "20", seed: "", system: "" };

test("the request has the messages without failed and empty answers", () => {
  const messages = [
    { role: "user", content: "a" }, { role: "assistant", content: "", error: "no" }, { role: "assistant", content: "" },
    { role: "user", content: "" }, { role: "assistant", content: "b", tokens: {} },
  ];
  assert.deepEqual(chatRequest("m", messages, fields, ""), {
    model: "m", temperature: 0.7, max_tokens: 20,
    messages: [{ role: "user", content: "a" }, { role: "user", content: "" }, { role: "assistant", content: "b" }],
  });
});

test("an empty conversation sends the draft, and fields are sent if they are set", () => {
  const request = chatRequest("m", [], { ...fields, top_p: "0.9", seed: "0", system: "s" }, "draft");
  assert.deepEqual(request.messages, [{ role: "system", content: "s" }, { role: "user", content: "draft" }]);
  assert.deepEqual([request.top_p, request.seed], [0.9, 0]);
  assert.equal(chatRequest("m", [], fields, "").messages[0].content, "Hello!");
  assert.ok(!("top_p" in chatRequest("m", [], { ...fields, top_p: "" }, "")));
  assert.equal(streamed(request).stream, true);
});

test("parts of an answer are added up", () => {
  const message = emptyAnswer();
  assert.equal(addChunk(message, {}), false);
  assert.equal(addChunk(message, { choices: [] }), false);
  assert.ok(addChunk(message, { choices: [{ delta: { content: "a" }, logprobs: { content: [{ token: "a", logprob: -1, top_logprobs: [{ token: "b", logprob: -2 }] }] } }] }));
  assert.ok(addChunk(message, { choices: [{ delta: {}, logprobs: null }] }));
  assert.deepEqual(message, { role: "assistant", content: "a", tokens: { text: ["a"], logprobs: [-1], top: [[[null, "b", -2]]] } });
});

test("checkpoints come first, newest first, after models of the address that are not listed", () => {
  const listed = [{ id: "base", root: "base", created: 9 }, { id: "tinker://a/b/1", root: "base", created: 1 }, { id: "tinker://a/b/2", root: "base", created: 2 }];
  const { models, missing } = modelChoices(listed, ["gone", null, "gone"].slice(0, 2));
  assert.deepEqual(models.map((model) => model.id), ["gone", "tinker://a/b/2", "tinker://a/b/1", "base"]);
  assert.deepEqual(missing, ["gone"]);
  assert.deepEqual(modelChoices([], [null, null]), { models: [], missing: [] });
});

test("events are returned when they are complete, however the text is cut", () => {
  const text = "data: {\"a\":1}\n\n: comment\n\nevent: x\ndata: 2\ndata:3\n\r\ndata: [DONE]\r\n\r\ndata: cut";
  for (const size of [1, 2, 7, 1000]) {
    const parser = new EventParser();
    const found = [];
    for (let n = 0; n < text.length; n += size) found.push(...parser.push(text.slice(n, n + size)));
    assert.deepEqual(found, ["{\"a\":1}", "2\n3", "[DONE]"], `${size}`);
  }
  assert.deepEqual(new EventParser().push(""), []);
});

const hostile = {
  model: "it's", temperature: 0, max_tokens: 5,
  messages: [{ role: "user", content: "a 'quote' \"double\" \\ $HOME `x` \n \b \u0001 ä 🙂" }],
};

test("curl: the body survives the quotes of the shell", async () => {
  const { execFileSync } = await import("node:child_process");
  const command = SNIPPETS.curl("http://127.0.0.1:1", hostile);
  const shown = execFileSync("sh", ["-c", command.replace(/^curl/, "printf '%s\\0'")], { encoding: "utf8" }).split("\0");
  assert.deepEqual(JSON.parse(shown[shown.indexOf("-d") + 1]), hostile);
});

test("Python: literals are those of Python", () => {
  const program = SNIPPETS.Python("http://h", { ...hostile, stream: true, logprobs: false });
  assert.match(program, /stream=True,/);
  assert.match(program, /logprobs=False,/);
  assert.match(program, /base_url="http:\/\/h\/v1"/);
  assert.doesNotMatch(program, /: (true|false|null)\b/);
});

test("Rust: strings have the escapes of Rust", () => {
  const program = SNIPPETS.Rust("http://h", { ...hostile, messages: [{ role: "user", content: "\b\f\u0001\\b\\u0041" }] });
  assert.ok(program.includes(String.raw`"\u{8}\u{c}\u{0001}\\b\\u0041"`), program);
});

test("rates are differences of counters over time", () => {
  const reading = (time, busy, trained) => ({ time, counters: { busy_microseconds_total: { value: busy }, trained_tokens_total: { value: trained } } });
  assert.equal(rates(null, reading(0, 0, 0)), null);
  assert.equal(rates(reading(5, 0, 0), reading(5, 9, 9)), null);
  assert.deepEqual(rates(reading(0, 0, 0), reading(2000, 1e6, 100)), { load: 0.5, trained: 50, sampled: 0 });
  // A restart sets counters to 0.
  assert.deepEqual(rates(reading(0, 1e9, 100), reading(1000, 0, 0)), { load: 0, trained: 0, sampled: 0 });
  assert.equal(figure({}, "queued"), 0);
});
