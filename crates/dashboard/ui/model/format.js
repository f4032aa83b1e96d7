// @ts-check
// Numbers, times and ids as text.

/** @import { RunDocument } from "../documents.js" */

// Creating a format takes much longer than using it.
const group = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const dateAndTime = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const timeOfDay = new Intl.DateTimeFormat(undefined, { hour: "numeric", minute: "2-digit", second: "2-digit", hour12: false });

/**
 * Three significant digits, thousands separated; scientific for very small and large values.
 * @param {number | null | undefined} value
 */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return group.format(value);
  return String(Number(value.toPrecision(3)));
}

/** @param {number | null | undefined} value */
export function integer(value) {
  return value === null || value === undefined ? "–" : group.format(value);
}

/**
 * A short form with a unit prefix: 17.5k, 1.2M.
 * @param {number | null | undefined} value
 */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  /** @type {[number, string][]} */
  const units = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
  }
  return String(Number(value.toPrecision(3)));
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  /** @type {[number, string][]} */
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  for (const [size, unit] of units) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${value} B`;
}

/**
 * A duration with its unit.
 * @param {number | null | undefined} value seconds
 */
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Number((value / 3600).toPrecision(3))} h`;
}

/**
 * Time between a moment and now, in words. Both are milliseconds of the server's clock.
 * @param {number | null | undefined} time
 * @param {number} now
 */
export function age(time, now) {
  if (!time) return "–";
  const since = Math.max(0, (now - time) / 1000);
  if (since < 10) return "just now";
  if (since < 90) return `${Math.round(since)} s ago`;
  if (since < 5400) return `${Math.round(since / 60)} min ago`;
  if (since < 129600) return `${Math.round(since / 3600)} h ago`;
  return `${Math.round(since / 86400)} days ago`;
}

/**
 * The exact time in the time zone of the browser.
 * @param {number | null | undefined} time
 */
export function exact(time) {
  return time ? dateAndTime.format(time) : "";
}

/** @param {number} time */
export function clockTime(time) {
  return timeOfDay.format(time);
}

/**
 * Shortens an id in the middle.
 * @param {string} id
 */
export function shortId(id) {
  return id.length <= 20 ? id : `${id.slice(0, 8)}…${id.slice(-8)}`;
}

/**
 * Shortens the run in the path of a checkpoint: tinker://7a10c3d2…/weights/final.
 * @param {string} path
 */
export function shortPath(path) {
  const [run, ...rest] = path.replace(/^tinker:\/\//, "").split("/");
  return rest.length && path.startsWith("tinker://") ? `tinker://${run.slice(0, 8)}…/${rest.join("/")}` : shortId(path);
}

/** @param {Pick<RunDocument, "id"> & Partial<RunDocument>} run */
export function runName(run) {
  return run.name || shortId(run.id);
}

/**
 * Number of steps, with the planned number if it is known.
 * @param {Partial<RunDocument>} run
 */
export function stepCount(run) {
  return integer(run.steps ?? 0) + (run.total_steps ? `/${integer(run.total_steps)}` : "");
}

/** @type {Record<string, [string, string]>} */
const STATUS = {
  training: ["●", "training"], idle: ["◐", "idle"], ended: ["✓", "ended"], failed: ["✕", "failed"],
};

/**
 * Icon and word of a status: colour alone would exclude colour-blind readers.
 * @param {string} name
 * @returns {[string, string]}
 */
export function status(name) {
  return STATUS[name] ?? ["○", name];
}
