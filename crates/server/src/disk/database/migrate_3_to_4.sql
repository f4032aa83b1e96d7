-- Version 4 adds the history that the dashboard shows.

-- History for the dashboard. A series has the points of one kind of request of a run, such as
-- "forward_backward", with the same metrics.
CREATE TABLE metric_series (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    kind TEXT NOT NULL,
    names TEXT NOT NULL,            -- JSON: names of the values of a point
    UNIQUE (run, kind, names)
);

-- Finished requests of models; ids increase in order of commits.
CREATE TABLE metric_points (
    id INTEGER PRIMARY KEY,
    series INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    finished_at INTEGER NOT NULL,
    queued INTEGER NOT NULL,        -- microseconds from admission to execution
    computed INTEGER NOT NULL,      -- microseconds of execution
    tokens INTEGER NOT NULL,
    metrics BLOB NOT NULL,          -- little-endian f64, one per name of the series
    error TEXT                      -- NULL for a successful request
);
CREATE INDEX points_of_series ON metric_points (series);
CREATE INDEX failed_points ON metric_points (id) WHERE error IS NOT NULL;

-- Newest sampling requests; ids increase in order of commits.
CREATE TABLE sample_log (
    id INTEGER PRIMARY KEY,
    finished_at INTEGER NOT NULL,
    queued INTEGER NOT NULL,
    computed INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    folder TEXT,                    -- folder of the adapter; NULL for the base model
    session TEXT NOT NULL,
    source TEXT NOT NULL,           -- "tinker" or "inference"
    prompt_tokens INTEGER NOT NULL,
    prompt BLOB,                    -- little-endian u32; NULL if the text is not recorded
    prompt_hash INTEGER,
    bytes INTEGER NOT NULL,         -- size of all blobs of the request
    error TEXT
);

CREATE TABLE sample_completions (
    sample INTEGER NOT NULL,
    number INTEGER NOT NULL,        -- index of the completion in its request
    tokens BLOB NOT NULL,           -- little-endian u32
    logprobs BLOB NOT NULL,         -- little-endian f32
    top BLOB,                       -- most probable tokens: count per position, then pairs of u32 and f32
    stop TEXT NOT NULL,
    sequence_hash INTEGER NOT NULL, -- of prompt and completion, to find it in training batches
    advantage REAL,
    PRIMARY KEY (sample, number)
) WITHOUT ROWID;
CREATE INDEX completions_by_sequence ON sample_completions (sequence_hash);
