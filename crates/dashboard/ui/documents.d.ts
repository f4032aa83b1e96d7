// Generated from crates/dashboard/src/document.rs, whose tests compare it.

/** Documents by their names in `/ui/api/`. */
export interface Documents {
  info: InfoDocument;
  runs: RunListDocument;
  run: RunDetails;
  metrics: MetricsDocument;
  requests: RequestsDocument;
  samples: SampleListDocument;
  server: ServerDocument;
}

/** Description of the source. */
export interface InfoDocument {
  /** `server` or `folders`. */
  kind: string;
  version: string;
  models: string[];
  folders: string[];
  /** Whether metrics are recorded. */
  history: boolean;
  /** Whether prompts and completions are recorded. */
  samples: boolean;
  /** Views that the source has documents for. */
  views: string[];
  /** Id of the event after which the stream of changes continues. */
  cursor: string | null;
  time: number | null;
}

/** A run in the list of runs. */
export interface RunDocument {
  id: string;
  name: string | null;
  base_model: string | null;
  rank: number | null;
  /** `training`, `idle`, `ended` or `failed`. */
  status: string;
  steps: number;
  /** Planned number of steps. */
  total_steps: number | null;
  /** Loss per token of the last step. */
  loss: number | null;
  /** Losses at equal distances. */
  losses: (number | null)[];
  tokens: number;
  tokens_per_second: number | null;
  error: string | null;
  /** Number of unfinished requests. */
  queued: number;
  created: number | null;
  last_used: number | null;
  checkpoints: number;
  storage_bytes: number | null;
  session: string | null;
}

/** All runs. */
export interface RunListDocument {
  runs: RunDocument[];
}

/** A checkpoint of a run. */
export interface CheckpointDocument {
  path: string;
  name: string;
  kind: string;
  step: number | null;
  seq: number | null;
  created: number | null;
  expires: number | null;
  size_bytes: number | null;
  public: boolean;
}

/** A run with its settings and checkpoints. */
export interface RunDetails extends RunDocument {
  settings: Record<string, unknown>;
  metadata: Record<string, unknown>;
  session_metadata: Record<string, unknown>;
  tags: string[];
  saved: CheckpointDocument[];
}

/** Points of a metric. */
export interface CurveDocument {
  step: number[];
  time: number[];
  value: (number | null)[];
  /** Mean of the values that each pair of points stands for; empty if all points are sent. */
  mean: (number | null)[];
}

/** Metrics of a run. */
export interface MetricsDocument {
  metrics: Record<string, CurveDocument>;
}

/** Newest requests of a run. */
export interface RequestsDocument {
  /** Names of the values of a row. */
  columns: string[];
  training: [string, number, number, number, number, number, string | null][];
  sampling: [string, number, number, number, number, number, string | null][];
  /** Number of unfinished requests. */
  queued: number;
  now: number;
}

/** Tokens. */
export interface TokensDocument {
  ids: number[];
  text: string[];
  /** Positions of special tokens. */
  special: number[];
}

/** A completion. */
export interface CompletionDocument extends TokensDocument {
  logprobs: (number | null)[];
  /** Most probable tokens of each position; empty if the program did not ask for them. */
  top: [number, string, number | null][][];
  /** Reason for the end. */
  stop: string;
  /** Advantage in the training batch that the completion came back in. */
  advantage: number | null;
}

/** A sampling request. */
export interface SampleDocument {
  id: number;
  time: number;
  queued_seconds: number;
  compute_seconds: number;
  base_model: string;
  /** Name of the weights. */
  model: string | null;
  /** Identifies the weights, also if they have no name. */
  weights: string;
  run: string | null;
  session: string;
  source: string;
  prompt_tokens: number;
  prompt: TokensDocument | null;
  /** Equal for equal prompts. Text: a number of 64 bits would lose digits in JavaScript. */
  group: string | null;
  completions: CompletionDocument[];
  error: string | null;
}

/** Newest samples that match a query. */
export interface SampleListDocument {
  samples: SampleDocument[];
  /** Whether older samples match, too. */
  more: boolean;
  /** Number of all samples in the log. */
  total: number;
}

/** A figure of `/metrics`. */
export interface FigureDocument {
  /** Current value. */
  value: number;
  /** Description of the figure. */
  help: string;
}

/** Limits of the server. */
export interface LimitsDocument {
  /** Bytes for each purpose. */
  memory: Record<string, number>;
  /** Number of queued requests. */
  queued: number;
}

/** An upstream of a gateway. */
export interface UpstreamDocument {
  /** Name of the upstream. */
  name: string;
  /** Whether the upstream responds. */
  up: boolean;
}

/** Figures of the server, without the prefix of their names in `/metrics`. */
export interface FiguresDocument {
  /** Values that only grow. */
  counters: Record<string, FigureDocument>;
  /** Values that grow and shrink. */
  gauges: Record<string, FigureDocument>;
  /** Limits of the gauges. */
  limits: LimitsDocument;
  /** Upstreams of the gateway. */
  upstreams: UpstreamDocument[];
  /** Memory that the process may use. */
  process_bytes: number | null;
  /** Free space on the disk of the data folder. */
  disk_free_bytes: number | null;
  /** Current time of the server. */
  time: number;
}

/** A request that failed. */
export interface FailureDocument {
  run: string | null;
  kind: string;
  time: number;
  error: string;
}

/** State of the server. */
export interface ServerDocument {
  figures: FiguresDocument;
  errors: FailureDocument[];
}

/** An event of the stream of changes. */
export interface ChangesDocument {
  /** Runs with new values. */
  runs: RunDocument[];
  /** Ids of the runs that do not exist any more. */
  deleted: string[];
  /** Id of the newest sample, if samples were added. */
  last_sample: number | null;
}
