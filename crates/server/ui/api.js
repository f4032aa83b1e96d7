// Requests to the server, and the stream of changes.

import { setServerTime } from "./format.js";

export class Unauthorized extends Error {}

/** Sends a request and returns the JSON of the response. */
export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Error("The server does not respond. Start it again, or wait until it is back.");
  }
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) throw new Unauthorized(body.detail ?? "Log in first.");
  if (!response.ok) {
    throw new Error(body.detail ?? body.error?.message ?? `The server responded with ${response.status}.`);
  }
  return body;
}

export function get(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") query.set(key, value);
  }
  return request(`/ui/api/${name}?${query}`);
}

export function post(name, body = {}) {
  const headers = { "content-type": "application/json" };
  return request(`/ui/api/${name}`, { method: "POST", headers, body: JSON.stringify(body) });
}

/** Calls `on.changes`, `on.server` and `on.state` as events arrive; reconnects by itself. */
export class Changes {
  /** `last` is the position from which to continue. */
  constructor(on, last) {
    this.on = on;
    this.delay = 500;
    this.last = last ?? null;
    this.connect();
    // Aborting removes the listeners.
    this.controller = new AbortController();
    const { signal } = this.controller;
    addEventListener("online", () => this.retry(), { signal });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.retry(); }, { signal });
  }

  connect() {
    clearTimeout(this.timer);
    this.source?.close();
    const query = this.last ? `?last=${encodeURIComponent(this.last)}` : "";
    const source = new EventSource(`/ui/api/events${query}`);
    this.source = source;
    const remember = (event) => {
      if (event.lastEventId) this.last = event.lastEventId;
      this.delay = 500;
      this.setState("live");
    };
    source.addEventListener("open", () => this.setState("live"));
    source.addEventListener("start", remember);
    source.addEventListener("changes", (event) => {
      remember(event);
      this.on.changes(JSON.parse(event.data));
    });
    source.addEventListener("server", (event) => {
      remember(event);
      const data = JSON.parse(event.data);
      setServerTime(data.figures?.time);
      this.on.server(data);
    });
    source.addEventListener("error", () => {
      // The browser gives up after some errors: connect again with a growing delay.
      source.close();
      this.setState(navigator.onLine === false ? "offline" : "reconnecting");
      this.timer = setTimeout(() => this.connect(), this.delay);
      this.delay = Math.min(this.delay * 1.6, 10000);
    });
  }

  retry() {
    if (this.source?.readyState !== 2) return;
    this.delay = 500;
    this.connect();
  }

  setState(state) {
    if (this.state === state) return;
    const reconnected = this.state && this.state !== "live" && state === "live";
    this.state = state;
    this.on.state(state, reconnected);
  }

  close() {
    this.controller.abort();
    clearTimeout(this.timer);
    this.source?.close();
  }
}

/** Reads a stream of server-sent events of an inference endpoint. */
export async function stream(path, body, signal, onData) {
  const response = await fetch(path, {
    method: "POST", credentials: "same-origin", signal,
    headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  if (!response.ok) {
    const error = await response.json().catch(() => ({}));
    if (response.status === 401) throw new Unauthorized("Log in first.");
    throw new Error(error.error?.message ?? error.detail ?? `The server responded with ${response.status}.`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    pending += value;
    for (let end; (end = pending.indexOf("\n\n")) >= 0; pending = pending.slice(end + 2)) {
      const data = pending.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
      const text = data.map((line) => line.slice(5).trimStart()).join("\n");
      if (!text || text === "[DONE]") continue;
      const event = JSON.parse(text);
      if (event.error) throw new Error(event.error.message ?? "The server reported an error.");
      onData(event);
    }
  }
}
