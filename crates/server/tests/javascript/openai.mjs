// Runs the official `openai` package of npm against a local server.
//
//     node openai.mjs BASE_URL FOLDER GUIDE
//
// FOLDER contains node_modules with the package. GUIDE is a Markdown file whose program is run.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [baseUrl, folder, guide] = process.argv.slice(2);
const require = createRequire(`${folder}/`);
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "tml-local", maxRetries: 0 });
const model = "tinkex/tiny";
const answer = 'A cow says "moo".';
const messages = [{ role: "user", content: "What does a cow say?" }];

const whole = await client.chat.completions.create({ model, messages, temperature: 0 });
assert.equal(whole.choices[0].message.content, answer);

let text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, answer);

const prompt = { model, prompt: "Once upon a time", temperature: 0, max_tokens: 24, ignore_eos: true };
const completion = await client.completions.create(prompt);
text = "";
for await (const chunk of await client.completions.create({ ...prompt, stream: true })) {
  text += chunk.choices[0]?.text ?? "";
}
assert.equal(text, completion.choices[0].text);

await assert.rejects(client.completions.create({ ...prompt, model: "tinkex/tny" }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError && error.message.includes(model), error);
  return true;
});

const names = [];
for await (const listed of client.models.list()) names.push(listed.id);
assert.ok(names.includes(model), names);

const stream = await client.completions.create({ ...prompt, max_tokens: 1900, stream: true });
for await (const _ of stream) break;
stream.controller.abort();
const [, documented] = readFileSync(guide, "utf8").match(/```javascript\n([^]*?)```/);
const program = `${folder}/documented.mjs`;
writeFileSync(program, documented.replaceAll("http://127.0.0.1:8080", baseUrl));
// The server accepts any key, but the package requires one.
process.env.TINKER_API_KEY = "tml-any";
await import(pathToFileURL(program));
console.log("\nopenai of npm: all checks passed");
