// Types that several modules share and that need no browser.

/** View, object and parameters that the address names. */
export interface Route {
  name: string;
  /** Id of the run; null for views that show no single object. */
  id: string | null;
  params: URLSearchParams;
}

/** Parameters of a route to change. Null, an empty string and false remove the parameter. */
export type ParamChanges = Record<string, string | boolean | null | undefined>;

/** Points of a metric as a chart draws them. */
export interface Series {
  label: string;
  /** Index of the run, which determines the colour. */
  index: number;
  x: number[];
  y: number[];
  /** Means of downsampled ranges; empty if `y` has all points. */
  mean: number[];
  /** Number of steps since the point before, for each entry of `mean`. */
  weights: number[];
  /** Smoothed values of the last drawing. */
  smooth?: number[] | null;
}

/** Points of a metric in memory. Values that are not finite are NaN. */
export interface Curve {
  step: number[];
  time: number[];
  y: number[];
  mean: number[];
  weights: number[];
}

/** Tokens to show: of a sample, or of an answer in the playground, which has no ids. */
export interface TokenList {
  text: string[];
  ids?: number[];
  special?: number[];
  logprobs?: (number | null)[];
  top?: [number | null, string, number | null][][];
}

export interface Message {
  role: "user" | "assistant" | "system";
  content: string;
  tokens?: { text: string[]; logprobs: number[]; top: [null, string, number][][] };
  /** Time since the request was sent, in seconds. */
  seconds?: number;
  error?: string;
}

export interface ChatRequest {
  model: string;
  messages: { role: string; content: string }[];
  temperature: number;
  max_tokens: number;
  top_p?: number;
  seed?: number;
  stream?: boolean;
  logprobs?: boolean;
  top_logprobs?: number;
}

/** Part of a streamed answer of `/v1/chat/completions`. */
export interface ChatChunk {
  choices?: {
    delta?: { content?: string | null };
    logprobs?: { content?: { token: string; logprob: number; top_logprobs?: { token: string; logprob: number }[] }[] } | null;
  }[];
}

/** A model of `/v1/models`. */
export interface ListedModel {
  id: string;
  root: string;
  created: number;
}
