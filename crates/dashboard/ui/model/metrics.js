// @ts-check
// Titles and order of the charts of a run.

/** @type {Record<string, string>} */
const TITLES = {
  "unclipped_grad_l2:mean": "gradient norm", learning_rate: "learning rate", "loss:sum": "loss, sum of the batch",
  eval_loss: "evaluation loss", tokens_per_second: "tokens/s", "forward: loss per token": "loss per token of forward passes",
};
/** Metrics of the first charts, in this order. */
const FIRST = [
  "loss per token", "loss", "reward", "reward_mean", "forward: loss per token", "eval_loss", "tokens/s", "tokens_per_second",
  "unclipped_grad_l2:mean", "learning_rate", "kl:mean", "entropy:mean",
];
/** Metrics that are shown on request only. */
const SECONDARY = [
  "tokens", "loss:sum", "tokens:sum", "weight:sum", "compute seconds", "queued seconds", "epoch",
];
/** Metrics without noise. */
const EXACT = ["learning_rate", "epoch", "tokens", "tokens:sum", "weight:sum"];

/** @param {string} name */
export function metricTitle(name) {
  return TITLES[name] ?? name.replace(/:(mean|sum|max|min)$/, (_, kind) => ` (${kind})`).replaceAll("_", " ");
}

/**
 * Whether the chart of a metric is shown on request only.
 * @param {string} name
 */
export function isSecondary(name) {
  return !FIRST.includes(name) && (name.startsWith("forward: ") || SECONDARY.includes(name));
}

/**
 * Whether smoothing would distort a metric: a schedule or a count has no noise.
 * @param {string} name
 */
export function isExact(name) {
  return EXACT.includes(name);
}

/**
 * Sorts the names of metrics in the order of their charts.
 * @param {Iterable<string>} names
 */
export function sortMetrics(names) {
  /** @param {string} name */
  const rank = (name) => {
    const first = FIRST.indexOf(name);
    if (first >= 0) return first;
    return isSecondary(name) ? FIRST.length + 1 : FIRST.length;
  };
  return [...new Set(names)].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}
