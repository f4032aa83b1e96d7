-- Version 3 counts the starts of a request after restarts, and remembers deleted checkpoints and the
-- time of the server.

ALTER TABLE requests ADD COLUMN starts INTEGER NOT NULL DEFAULT 0;

CREATE TABLE deleted_checkpoints (
    path TEXT PRIMARY KEY,
    deleted_at INTEGER NOT NULL
) WITHOUT ROWID;

ALTER TABLE writer_state ADD COLUMN clock TEXT;
