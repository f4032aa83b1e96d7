// @ts-check
// Streamed answers of the inference endpoints.

import { responseError } from "./api.js";
import { EventParser } from "./model/event_stream.js";

/**
 * Sends a request and calls `onData` with every event of the response.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {(event: any) => void} onData
 */
export async function stream(path, body, signal, onData) {
  const response = await fetch(path, {
    method: "POST", credentials: "same-origin", signal,
    headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  if (!response.ok || !response.body) {
    throw responseError(response, await response.json().catch(() => ({})));
  }
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const data of parser.push(value)) {
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? "The server reported an error.");
      onData(event);
    }
  }
}
