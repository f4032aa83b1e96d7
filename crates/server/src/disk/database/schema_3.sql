-- Schema of version 3, for the tests of the migration.

-- Records are stored as JSON in the column "record"; generated columns expose single fields of it
-- for indexes and for inspection with other tools. Times are microseconds since the Unix epoch.
-- Payload numbers refer to entries of the file "payloads".

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    record TEXT NOT NULL,
    created_at AS (record ->> 'created_at'),
    ended AS (record ->> 'end' IS NOT NULL),
    project_id AS (record ->> 'project_id')
);

CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    last_used INTEGER NOT NULL,     -- time of the last request or checkpoint
    last_seq INTEGER,               -- sequence number of the last executed request
    record TEXT NOT NULL,
    session AS (record ->> 'session'),
    base_model AS (record ->> 'base_model'),
    created_at AS (record ->> 'created_at')
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
    folder AS (record ->> 'folder'),
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
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    meter TEXT NOT NULL,            -- counted quantity, for example "training" (tokens trained on)
    count INTEGER NOT NULL,
    PRIMARY KEY (hour, session, base_model, meter)
) WITHOUT ROWID;

-- Exactly one row.
CREATE TABLE writer_state (
    -- First payload number that no row refers to.
    next_payload INTEGER NOT NULL,
    -- Number of failed commits that were overwritten in the WAL.
    overwritten_commits INTEGER NOT NULL,
    -- JSON: time that the server knew last, and the boot of the machine at that time.
    clock TEXT
);
INSERT INTO writer_state (next_payload, overwritten_commits) VALUES (1, 0);
