// @ts-check
// Requests and answers of the playground.

/** @import { ChatChunk, ChatRequest, ListedModel, Message } from "./types.js" */

/**
 * Values of the fields of the playground, as text.
 * @typedef {object} SamplingFields
 * @property {string} temperature
 * @property {string} top_p
 * @property {string} max_tokens
 * @property {string} seed
 * @property {string} system
 */

/**
 * Returns the request for the next answer to a conversation.
 * @param {string} model
 * @param {Message[]} messages
 * @param {SamplingFields} fields
 * @param {string} draft message to send if the conversation is empty
 * @returns {ChatRequest}
 */
export function chatRequest(model, messages, fields, draft) {
  const sent = messages.filter((message) => !message.error && (message.content || message.role === "user"))
    .map(({ role, content }) => ({ role: String(role), content }));
  if (!sent.length) sent.push({ role: "user", content: draft || "Hello!" });
  if (fields.system) sent.unshift({ role: "system", content: fields.system });
  /** @type {ChatRequest} */
  const request = { model, messages: sent, temperature: Number(fields.temperature), max_tokens: Number(fields.max_tokens) };
  if (fields.top_p !== "" && Number(fields.top_p) < 1) request.top_p = Number(fields.top_p);
  if (fields.seed !== "") request.seed = Number(fields.seed);
  return request;
}

/**
 * Returns a request whose answer is streamed with the alternatives of every token.
 * @param {ChatRequest} request
 * @returns {ChatRequest}
 */
export function streamed(request) {
  return { ...request, stream: true, logprobs: true, top_logprobs: 5 };
}

/** @returns {Message & Required<Pick<Message, "tokens">>} */
export function emptyAnswer() {
  return { role: "assistant", content: "", tokens: { text: [], logprobs: [], top: [] } };
}

/**
 * Adds a part of a streamed answer to its message. Returns whether the part has content.
 * @param {Message & Required<Pick<Message, "tokens">>} message
 * @param {ChatChunk} chunk
 */
export function addChunk(message, chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  message.content += choice.delta?.content ?? "";
  for (const token of choice.logprobs?.content ?? []) {
    message.tokens.text.push(token.token);
    message.tokens.logprobs.push(token.logprob);
    message.tokens.top.push((token.top_logprobs ?? []).map((other) => [null, other.token, other.logprob]));
  }
  return true;
}

/** @param {{ id: string }} model */
export function isCheckpoint({ id }) {
  return id.startsWith("tinker://");
}

/**
 * Sorts models: newest checkpoints first, then base models. A model of the address that is not
 * listed comes first.
 * @param {ListedModel[]} models
 * @param {(string | null)[]} wanted
 */
export function modelChoices(models, wanted) {
  const sorted = [...models].sort((a, b) => Number(isCheckpoint(b)) - Number(isCheckpoint(a)) || b.created - a.created);
  const missing = [...new Set(wanted)].flatMap((id) =>
    (id && !models.some((model) => model.id === id) ? [{ id, root: "", created: 0 }] : []));
  return { models: [...missing, ...sorted], missing: missing.map((model) => model.id) };
}
