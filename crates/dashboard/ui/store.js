// @ts-check
// What the page knows: the source, its runs, and the clock of the server.
//
// The store reads documents, receives the stream of changes and hands out values. Nothing else
// changes it. It needs no browser.

import { NotFound } from "./api.js";
import { runName } from "./model/format.js";

/** @import { get } from "./api.js" */
/** @import { ChangesDocument, InfoDocument, RunDetails, RunDocument, ServerDocument } from "./documents.js" */

/** @typedef {typeof get} ReadDocument */

export class Store {
  /** @type {InfoDocument | null} */
  #info = null;
  /** @type {Map<string, RunDocument>} */
  #runs = new Map();
  /** @type {Map<string, RunDetails>} */
  #details = new Map();
  /** @type {Set<string>} */
  #deleted = new Set();
  /** Whether all runs are known. The page of one run adds that run only. */
  #isComplete = false;
  /** Difference between the clocks of the server and of this machine in milliseconds. */
  #skew = 0;
  /**
   * Request for the list of runs that has not finished, with the changes since it was sent: the
   * response may be older than they are.
   * @type {{ done: Promise<void>, since: ChangesDocument[] } | null}
   */
  #listing = null;
  /**
   * Requests for single runs that have not finished.
   * @type {Map<string, Promise<RunDetails>>}
   */
  #reading = new Map();
  /** @type {ServerDocument | null} */
  server = null;

  /** @param {ReadDocument} read */
  constructor(read) {
    this.read = read;
  }

  /** Description of the source. `loadInfo` reads it before any view is opened. */
  get info() {
    if (!this.#info) throw new Error("the description of the source is not loaded");
    return this.#info;
  }

  /** Whether the source is a set of run folders rather than a server. */
  get isFolders() {
    return this.info.kind === "folders";
  }

  async loadInfo() {
    this.#info = await this.read("info");
    this.#setTime(this.#info.time);
    return this.#info;
  }

  /** Time of the server in milliseconds. */
  now() {
    return Date.now() + this.#skew;
  }

  /** @param {number | null} time */
  #setTime(time) {
    if (time) this.#skew = time - Date.now();
  }

  get isComplete() {
    return this.#isComplete;
  }

  /** @returns {Iterable<RunDocument>} */
  get runs() {
    return this.#runs.values();
  }

  get runCount() {
    return this.#runs.size;
  }

  /** @param {string} id */
  run(id) {
    return this.#runs.get(id) ?? null;
  }

  /**
   * Settings and checkpoints of a run as of the last `loadRun`, with its current values; null if they
   * were not read.
   * @param {string} id
   * @returns {RunDetails | null}
   */
  details(id) {
    const details = this.#details.get(id);
    return details ? { ...details, ...this.#runs.get(id) } : null;
  }

  /** @param {string} id */
  nameOf(id) {
    return runName(this.#runs.get(id) ?? { id });
  }

  /** @param {string} id */
  isDeleted(id) {
    return this.#deleted.has(id);
  }

  /** Reads the list of runs, unless it is complete. */
  async completeRuns() {
    if (!this.#isComplete) await this.reloadRuns();
  }

  /** Reads the list of runs. Simultaneous calls share one request. */
  reloadRuns() {
    if (this.#listing) return this.#listing.done;
    /** @type {ChangesDocument[]} */
    const since = [];
    const done = this.#readRuns(since).finally(() => { this.#listing = null; });
    this.#listing = { done, since };
    return done;
  }

  /** @param {ChangesDocument[]} since */
  async #readRuns(since) {
    const { runs } = await this.read("runs");
    const listed = new Set(runs.map((run) => run.id));
    for (const id of [...this.#runs.keys()]) if (!listed.has(id)) this.#forget(id);
    for (const run of runs) this.#set(run);
    this.#isComplete = true;
    for (const changes of since) {
      changes.runs.forEach((run) => this.#setNewer(run));
      changes.deleted.forEach((id) => this.#forget(id));
    }
  }

  /**
   * Reads the settings and checkpoints of a run. Simultaneous calls share one request.
   * @param {string} id
   * @returns {Promise<RunDetails>}
   */
  loadRun(id) {
    const known = this.#reading.get(id);
    if (known) return known;
    const reading = this.#readRun(id).finally(() => this.#reading.delete(id));
    this.#reading.set(id, reading);
    return reading;
  }

  /** @param {string} id */
  async #readRun(id) {
    try {
      const details = await this.read("run", { id });
      this.#details.set(id, details);
      this.#setNewer(details);
      return details;
    } catch (error) {
      if (error instanceof NotFound) this.#forget(id);
      throw error;
    }
  }

  /** Reads the figures of the server. */
  async loadServer() {
    this.applyServer(await this.read("server"));
  }

  /**
   * Applies an event of the stream of changes.
   * @param {ChangesDocument} changes
   */
  apply(changes) {
    this.#listing?.since.push(changes);
    changes.runs.forEach((run) => this.#set(run));
    changes.deleted.forEach((id) => this.#forget(id));
  }

  /** @param {ServerDocument} server */
  applyServer(server) {
    this.server = server;
    this.#setTime(server.figures.time);
  }

  /** Notes that events may have been missed: the list of runs is read again when it is needed. */
  invalidate() {
    this.#isComplete = false;
  }

  /**
   * Notes that a run does not exist any more.
   * @param {string} id
   */
  markDeleted(id) {
    this.#forget(id);
  }

  /** @param {RunDocument} run */
  #set(run) {
    this.#runs.set(run.id, run);
    this.#deleted.delete(run.id);
  }

  /**
   * Adds a run, unless its known values are newer.
   * @param {RunDocument} run
   */
  #setNewer(run) {
    const known = this.#runs.get(run.id);
    if (!known || (run.last_used ?? 0) >= (known.last_used ?? 0)) this.#set(run);
  }

  /** @param {string} id */
  #forget(id) {
    this.#runs.delete(id);
    this.#details.delete(id);
    this.#deleted.add(id);
  }
}
