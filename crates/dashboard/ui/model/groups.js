// @ts-check
// Groups of samples: which samples belong together, which groups are shown, and in which order.

import { meanLogprob } from "./tokens.js";

/** @import { CompletionDocument, SampleDocument } from "../documents.js" */

/**
 * @typedef {object} SampleGroup
 * @property {SampleDocument[]} members newest first
 * @property {CompletionDocument[]} completions of all members
 */

/** Maximum time between the samples of a group in milliseconds. */
const GROUP_SPAN = 600_000;

/**
 * Groups samples of one prompt and the same weights within a short time.
 * @param {SampleDocument[]} samples newest first
 * @returns {SampleGroup[]}
 */
export function groupSamples(samples) {
  /** @type {SampleDocument[][]} */
  const found = [];
  /** @type {Map<string, SampleDocument[]>} */
  const open = new Map();
  for (const sample of samples) {
    const key = sample.group === null ? null : `${sample.group} ${sample.weights}`;
    const known = key === null ? undefined : open.get(key);
    if (known && known[0].time - sample.time < GROUP_SPAN) {
      known.push(sample);
      continue;
    }
    const started = [sample];
    found.push(started);
    if (key !== null) open.set(key, started);
  }
  return found.map((members) => ({ members, completions: members.flatMap((sample) => sample.completions) }));
}

/**
 * Returns the groups that a filter selects: "rewarded", "groups", "failed"; all for any other value.
 * @param {SampleGroup[]} groups
 * @param {string} only
 */
export function filterGroups(groups, only) {
  if (only === "rewarded") return groups.filter((one) => one.completions.some((completion) => completion.advantage !== null));
  if (only === "groups") return groups.filter((one) => one.completions.length > 1);
  if (only === "failed") return groups.filter((one) => one.members.some((sample) => sample.error !== null));
  return groups;
}

/**
 * Sorts groups: "advantage", "lowest", "logprob"; newest first for any other value.
 * @param {SampleGroup[]} groups
 * @param {string} order
 */
export function sortGroups(groups, order) {
  /** @type {(group: SampleGroup) => number} */
  let rank;
  if (order === "advantage") rank = (group) => -extreme(group, Math.max, -Infinity);
  else if (order === "lowest") rank = (group) => extreme(group, Math.min, Infinity);
  else if (order === "logprob") rank = leastProbable;
  else return groups;
  const ranked = groups.map((group) => ({ group, rank: rank(group) }));
  // Equal infinities have no difference.
  ranked.sort((a, b) => (a.rank === b.rank ? 0 : a.rank - b.rank));
  return ranked.map(({ group }) => group);
}

/**
 * @param {SampleGroup} group
 * @param {(a: number, b: number) => number} pick
 * @param {number} start
 */
function extreme(group, pick, start) {
  return group.completions.reduce((most, completion) => pick(most, completion.advantage ?? start), start);
}

/** @param {SampleGroup} group */
function leastProbable(group) {
  return group.completions.map(meanLogprob).reduce((least, mean) => (mean < least ? mean : least), 0);
}

/**
 * Sorts the completions of one group in the order of the list.
 * @param {CompletionDocument[]} completions
 * @param {string} order
 */
export function sortCompletions(completions, order) {
  const sorted = [...completions];
  if (order === "logprob") {
    /** @param {CompletionDocument} completion */
    const rank = (completion) => {
      const mean = meanLogprob(completion);
      return Number.isNaN(mean) ? Infinity : mean;
    };
    sorted.sort((a, b) => (rank(a) === rank(b) ? 0 : rank(a) - rank(b)));
  } else if (completions.some((completion) => completion.advantage !== null)) {
    /** @param {CompletionDocument} completion */
    const rank = (completion) => completion.advantage ?? -Infinity;
    sorted.sort((a, b) => (rank(a) === rank(b) ? 0 : rank(b) - rank(a)));
    if (order === "lowest") sorted.reverse();
  }
  return sorted;
}
