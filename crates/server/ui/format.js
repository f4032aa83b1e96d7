// Numbers, times and ids as text.

const group = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three significant digits, thousands separated; scientific for very small and large values. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return group.format(value);
  return String(Number(value.toPrecision(3)));
}

export function integer(value) {
  return value === null || value === undefined ? "–" : group.format(value);
}

/** A short form with a unit prefix: 17.5k, 1.2M. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
  }
  return String(Number(value.toPrecision(3)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${value} B`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Number((value / 3600).toPrecision(3))} h`;
}

let skew = 0;

/** Sets the difference between the server's clock and the browser's, in milliseconds. */
export function setServerTime(time) {
  if (time) skew = time - Date.now();
}

export function now() {
  return Date.now() + skew;
}

/** Time since a moment, in words. */
export function age(time) {
  if (!time) return "–";
  const since = Math.max(0, (now() - time) / 1000);
  if (since < 10) return "just now";
  if (since < 90) return `${Math.round(since)} s ago`;
  if (since < 5400) return `${Math.round(since / 60)} min ago`;
  if (since < 129600) return `${Math.round(since / 3600)} h ago`;
  return `${Math.round(since / 86400)} days ago`;
}

/** The exact time in the zone of the browser. */
export function exact(time) {
  return time ? new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" }) : "";
}

export function clockTime(time) {
  return new Date(time).toLocaleTimeString(undefined, { hour12: false });
}

/** Shortens an id in the middle. */
export function shortId(id) {
  return id.length <= 20 ? id : `${id.slice(0, 8)}…${id.slice(-8)}`;
}

/** Shortens the run in the path of a checkpoint: tinker://7a10c3d2…/weights/final. */
export function shortPath(path) {
  const [run, ...rest] = path.replace(/^tinker:\/\//, "").split("/");
  return rest.length && path.startsWith("tinker://") ? `tinker://${run.slice(0, 8)}…/${rest.join("/")}` : shortId(path);
}

export function runName(run) {
  return run.name || shortId(run.id);
}

const STATUS = {
  training: ["●", "training"], idle: ["◐", "idle"], ended: ["✓", "ended"], failed: ["✕", "failed"],
};

/** Icon and word of a status: never colour alone. */
export function status(name) {
  return STATUS[name] ?? ["○", name];
}

/** Colours that are distinguishable for colour-blind people (Okabe–Ito, adapted for contrast). */
export const LIGHT = ["#0b6bcb", "#c4530a", "#00795c", "#a3418f", "#8a6d00", "#3b7ea1", "#444444"];
export const DARK = ["#5cb3ff", "#ff9d4d", "#2fd2a6", "#e58fd0", "#f0e442", "#9fd3f2", "#cccccc"];
