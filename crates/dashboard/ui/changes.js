// @ts-check
// The stream of changes.

import { Unauthorized } from "./api.js";

/** @import { ChangesDocument, ServerDocument } from "./documents.js" */

/** Delay before the first attempt to reconnect, and its maximum, in milliseconds. */
const FIRST_DELAY = 500;
const MAX_DELAY = 10_000;

/** @typedef {"live" | "reconnecting" | "offline"} StreamState */

/**
 * @typedef {object} StreamListener
 * @property {(changes: ChangesDocument) => void} changes
 * @property {(server: ServerDocument) => void} server
 * @property {(state: StreamState) => void} state
 * @property {() => void} reconnected events between the two connections may be missing
 * @property {() => void} unauthorized the session has ended; the stream is closed
 * @property {() => Promise<void>} probe fails if the server cannot be reached or the session has ended
 */

/** Reads the stream of changes, and connects again when it is interrupted. */
export class ChangeStream {
  /** @type {EventSource | null} */
  #source = null;
  /** @type {StreamState | null} */
  #state = null;
  #delay = FIRST_DELAY;
  #timer = 0;
  #closed = false;
  /** Aborting removes the listeners of the window. */
  #listeners = new AbortController();

  /**
   * @param {StreamListener} listener
   * @param {string | null} last id of the event after which the stream continues
   */
  constructor(listener, last) {
    this.listener = listener;
    this.last = last;
    const { signal } = this.#listeners;
    addEventListener("online", () => this.#retryNow(), { signal });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.#retryNow(); }, { signal });
    this.#connect();
  }

  close() {
    this.#closed = true;
    this.#listeners.abort();
    clearTimeout(this.#timer);
    this.#source?.close();
  }

  #connect() {
    const query = this.last ? `?last=${encodeURIComponent(this.last)}` : "";
    const source = new EventSource(`/ui/api/events${query}`);
    this.#source = source;
    /** @param {MessageEvent} event */
    const remember = (event) => {
      if (event.lastEventId) this.last = event.lastEventId;
      this.#delay = FIRST_DELAY;
      this.#setState("live");
    };
    source.addEventListener("open", () => this.#setState("live"));
    source.addEventListener("start", remember);
    source.addEventListener("changes", (event) => {
      remember(event);
      this.listener.changes(JSON.parse(event.data));
    });
    source.addEventListener("server", (event) => {
      remember(event);
      this.listener.server(JSON.parse(event.data));
    });
    source.addEventListener("error", () => {
      // A browser stops to reconnect after some kinds of errors.
      source.close();
      this.#scheduleRetry();
    });
  }

  #scheduleRetry() {
    this.#source = null;
    this.#setState(navigator.onLine === false ? "offline" : "reconnecting");
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#reconnect(), this.#delay);
    this.#delay = Math.min(this.#delay * 1.6, MAX_DELAY);
  }

  /** An EventSource does not tell why it failed: a request before it finds out that the session has ended. */
  async #reconnect() {
    try {
      await this.listener.probe();
    } catch (error) {
      if (this.#closed) return;
      if (error instanceof Unauthorized) {
        this.close();
        this.listener.unauthorized();
      } else this.#scheduleRetry();
      return;
    }
    if (!this.#closed && !this.#source) this.#connect();
  }

  #retryNow() {
    if (this.#source) return;
    clearTimeout(this.#timer);
    this.#delay = FIRST_DELAY;
    this.#reconnect();
  }

  /** @param {StreamState} state */
  #setState(state) {
    if (this.#closed || this.#state === state) return;
    const reconnected = this.#state !== null && state === "live";
    this.#state = state;
    this.listener.state(state);
    if (reconnected) this.listener.reconnected();
  }
}
