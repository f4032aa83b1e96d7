// @ts-check
// Tokens and their log-probabilities.

/**
 * Makes white space visible.
 * @param {string} text
 */
export function visibleSpace(text) {
  return text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t").replaceAll(" ", "·");
}

/**
 * Surprise of a token from 0 to 1: 0 for a probability of 1, and 1 for a probability of at most e⁻⁵.
 * @param {number | null | undefined} logprob
 */
export function surprise(logprob) {
  if (logprob === null || logprob === undefined || !Number.isFinite(logprob)) return 0;
  return Math.min(1, Math.max(0, -logprob / 5));
}

/**
 * Probability in percent as text.
 * @param {number} logprob
 */
export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95) return "100 %";
  return value < 0.01 ? "< 0.01 %" : `${Number(value.toPrecision(3))} %`;
}

/**
 * Mean log-probability of a completion; NaN if no token has a finite one.
 * @param {{ logprobs?: (number | null)[] }} completion
 */
export function meanLogprob(completion) {
  let sum = 0;
  let count = 0;
  for (const value of completion.logprobs ?? []) {
    if (value === null || !Number.isFinite(value)) continue;
    sum += value;
    count += 1;
  }
  return count ? sum / count : NaN;
}
