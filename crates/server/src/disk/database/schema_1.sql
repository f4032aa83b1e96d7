-- Schema of version 1, for the tests of the migration.

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    fact TEXT NOT NULL,
    created_at AS (fact ->> 'created_at'),
    ended AS (fact ->> 'end' IS NOT NULL),
    project_id AS (fact ->> 'project_id')
);

CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    used_at INTEGER NOT NULL,       -- time of the last request or checkpoint
    last_seq INTEGER,               -- sequence number of the last executed request
    fact TEXT NOT NULL,
    session AS (fact ->> 'session'),
    base_model AS (fact ->> 'base_model'),
    created_at AS (fact ->> 'created_at')
);
CREATE INDEX runs_of_session ON runs (session);

-- Requests that modified a model after its snapshot; executing them again restores the model.
CREATE TABLE changes (
    run TEXT NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,             -- kind of the request, as in the table "requests"
    body INTEGER NOT NULL,          -- payload number of the request body
    PRIMARY KEY (run, seq)
) WITHOUT ROWID;

CREATE TABLE samplers (
    id TEXT PRIMARY KEY,
    fact TEXT NOT NULL,
    session AS (fact ->> 'session'),
    base_model AS (fact ->> 'base_model'),
    model_path AS (fact ->> 'model_path')
);

CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY,
    fact TEXT NOT NULL,
    folder AS (fact ->> 'folder'),
    created_at AS (fact ->> 'created_at'),
    expires_at AS (fact ->> 'expires_at'),
    size_bytes AS (fact ->> 'size_bytes')
);

-- Requests and their results, until a result is acknowledged or expires.
CREATE TABLE requests (
    id TEXT PRIMARY KEY,
    body INTEGER NOT NULL,          -- payload number of the body, increasing in order of admission
    answer INTEGER,                 -- payload number of the result; NULL before the execution
    answer_bytes INTEGER,
    answered_at INTEGER,
    outcome TEXT,                   -- JSON: "json", "proto", or the failure
    fact TEXT NOT NULL,
    session AS (fact ->> 'session'),
    kind AS (fact ->> 'kind'),
    seq AS (fact ->> 'seq'),
    at AS (fact ->> 'at')
);

CREATE TABLE usage (
    hour INTEGER NOT NULL,          -- hours since the Unix epoch
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    what TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (hour, session, base_model, what)
) WITHOUT ROWID;

-- Exactly one row.
CREATE TABLE state (
    next INTEGER NOT NULL,          -- first payload number that no row refers to
    voided INTEGER NOT NULL         -- number of failed commits that were overwritten in the WAL
);
INSERT INTO state VALUES (1, 0);
