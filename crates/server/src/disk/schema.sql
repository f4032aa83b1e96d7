-- Facts are JSON; the columns that follow one are read out of it, for whoever asks.
-- Moments are microseconds since 1970. Numbers of payloads are places in the file beside.

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    fact TEXT NOT NULL,
    created_at AS (fact ->> 'created_at'),
    ended AS (fact ->> 'end' IS NOT NULL),
    project_id AS (fact ->> 'project_id')
);

CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    used_at INTEGER NOT NULL,
    last_seq INTEGER,               -- the last request that was carried out
    fact TEXT NOT NULL,
    session AS (fact ->> 'session'),
    base_model AS (fact ->> 'base_model'),
    created_at AS (fact ->> 'created_at')
);
CREATE INDEX runs_of_session ON runs (session);

-- Requests that changed a model since its snapshot: doing them again brings it back.
CREATE TABLE changes (
    run TEXT NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body INTEGER NOT NULL,          -- number of the payload
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

-- Requests and what came of them, until that was fetched or expired.
CREATE TABLE requests (
    id TEXT PRIMARY KEY,
    body INTEGER NOT NULL,          -- number of the payload, in the order in which they came
    answer INTEGER,                 -- number of the payload; none if it was not carried out yet
    answer_bytes INTEGER,
    answered_at INTEGER,
    outcome TEXT,                   -- "json", "proto", or the failure
    fact TEXT NOT NULL,
    session AS (fact ->> 'session'),
    kind AS (fact ->> 'kind'),
    seq AS (fact ->> 'seq'),
    at AS (fact ->> 'at')
);

CREATE TABLE usage (
    hour INTEGER NOT NULL,          -- since 1970
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    what TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (hour, session, base_model, what)
) WITHOUT ROWID;

-- One row.
CREATE TABLE state (
    next INTEGER NOT NULL,          -- payloads from this number on belong to nothing
    voided INTEGER NOT NULL         -- commits whose place in the WAL was taken
);
INSERT INTO state VALUES (1, 0);
