-- Version 2 renames columns and a table; all values stay the same. SQLite also renames the columns
-- in the expressions of generated columns, in keys and in indexes.

ALTER TABLE sessions RENAME COLUMN fact TO record;

ALTER TABLE runs RENAME COLUMN fact TO record;
ALTER TABLE runs RENAME COLUMN used_at TO last_used;

ALTER TABLE changes RENAME COLUMN body TO body_payload;

ALTER TABLE samplers RENAME COLUMN fact TO record;

ALTER TABLE checkpoints RENAME COLUMN fact TO record;

ALTER TABLE requests RENAME COLUMN fact TO record;
ALTER TABLE requests RENAME COLUMN at TO admitted_at;
ALTER TABLE requests RENAME COLUMN body TO body_payload;
ALTER TABLE requests RENAME COLUMN answer TO result_payload;
ALTER TABLE requests RENAME COLUMN answer_bytes TO result_bytes;
ALTER TABLE requests RENAME COLUMN answered_at TO finished_at;
ALTER TABLE requests RENAME COLUMN outcome TO result_kind;

ALTER TABLE usage RENAME COLUMN what TO meter;

ALTER TABLE state RENAME COLUMN next TO next_payload;
ALTER TABLE state RENAME COLUMN voided TO overwritten_commits;
ALTER TABLE state RENAME TO writer_state;
