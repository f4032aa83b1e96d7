// @ts-check
// Server-sent events in a response body.

/** Collects the text of a response and returns the data of every complete event. */
export class EventParser {
  #pending = "";

  /**
   * @param {string} text
   * @returns {string[]} data of the events that `text` completes, without empty ones
   */
  push(text) {
    this.#pending += text;
    const events = this.#pending.split(/\r?\n\r?\n/);
    this.#pending = events.pop() ?? "";
    return events.map(eventData).filter(Boolean);
  }
}

/** @param {string} event */
function eventData(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
