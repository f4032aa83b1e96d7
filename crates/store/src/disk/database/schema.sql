-- Records are stored as JSON in the column "record"; generated columns expose single fields of it
-- for indexes and for inspection with other tools. Times are microseconds since the Unix epoch.
-- Payload numbers refer to entries of the file "payloads".

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    record TEXT NOT NULL,
    created_at AS (record ->> 'created_at'),
    ended AS (record ->> 'end' IS NOT NULL),
    project_id AS (record ->> 'project_id'),
    owner AS (ifnull(record ->> 'owner', 'admin'))
);

-- Metadata that users attached to sessions, runs and checkpoints, as JSON.
CREATE TABLE user_metadata (
    object TEXT PRIMARY KEY,        -- id of the session or run, or path of the checkpoint
    metadata TEXT NOT NULL
);

CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    last_used INTEGER NOT NULL,     -- time of the last request or checkpoint
    last_seq INTEGER,               -- sequence number of the last executed request
    record TEXT NOT NULL,
    session AS (record ->> 'session'),
    base_model AS (record ->> 'base_model'),
    created_at AS (record ->> 'created_at'),
    owner AS (ifnull(record ->> 'owner', 'admin'))
);
CREATE INDEX runs_of_session ON runs (session);

-- Requests that modified a model after its snapshot; executing them again restores the model.
CREATE TABLE changes (
    run TEXT NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,             -- kind of the request, as in the table "requests"
    body_payload INTEGER NOT NULL,  -- payload number of the request body
    PRIMARY KEY (run, seq)
) WITHOUT ROWID;

CREATE TABLE samplers (
    id TEXT PRIMARY KEY,
    record TEXT NOT NULL,
    session AS (record ->> 'session'),
    base_model AS (record ->> 'base_model'),
    model_path AS (record ->> 'model_path')
);

CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY,
    record TEXT NOT NULL,
    weights AS (record ->> 'weights'), -- JSON: folder, or checkpoint on an upstream
    created_at AS (record ->> 'created_at'),
    expires_at AS (record ->> 'expires_at'),
    size_bytes AS (record ->> 'size_bytes')
);

-- Checkpoints that were deleted recently, so that a repeated deletion succeeds.
CREATE TABLE deleted_checkpoints (
    path TEXT PRIMARY KEY,
    deleted_at INTEGER NOT NULL
) WITHOUT ROWID;

-- Requests and their results, until a result is acknowledged or expires.
CREATE TABLE requests (
    id TEXT PRIMARY KEY,
    body_payload INTEGER NOT NULL,  -- payload number of the body, increasing in order of admission
    -- The next four columns are NULL until the request is finished.
    result_payload INTEGER,         -- payload number of the result
    result_bytes INTEGER,           -- size of that payload
    finished_at INTEGER,
    result_kind TEXT,               -- JSON: encoding of the result ("json", "proto") or the failure
    record TEXT NOT NULL,
    session AS (record ->> 'session'),
    kind AS (record ->> 'kind'),
    seq AS (record ->> 'seq'),
    admitted_at AS (record ->> 'at'),
    starts INTEGER NOT NULL DEFAULT 0  -- number of starts after restarts of the server
);

CREATE TABLE usage (
    hour INTEGER NOT NULL,          -- hours since the Unix epoch
    owner TEXT NOT NULL,            -- user to whom the usage is charged
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    meter TEXT NOT NULL,            -- counted quantity, for example "training" (tokens trained on)
    count INTEGER NOT NULL,
    PRIMARY KEY (hour, owner, session, base_model, meter)
) WITHOUT ROWID;

-- API keys, as digests.
CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    record TEXT NOT NULL
);

-- Limits of users. A user without a row has no limits.
CREATE TABLE users (
    id TEXT PRIMARY KEY,
    record TEXT NOT NULL
);

-- Newest entries of the audit log.
CREATE TABLE audit_log (
    number INTEGER PRIMARY KEY,
    record TEXT NOT NULL
);

-- Exactly one row.
CREATE TABLE writer_state (
    -- First payload number that no row refers to.
    next_payload INTEGER NOT NULL,
    -- Number of failed commits that were overwritten in the WAL.
    overwritten_commits INTEGER NOT NULL,
    -- JSON: last time that the server stored, and the boot of the machine at that time.
    clock TEXT,
    -- Number of starts. A server commits only while the epoch is the number of its own start.
    epoch INTEGER NOT NULL DEFAULT 0
);
INSERT INTO writer_state (next_payload, overwritten_commits) VALUES (1, 0);

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
    error TEXT,
    owner TEXT NOT NULL DEFAULT 'admin' -- user who sampled
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
