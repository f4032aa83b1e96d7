//! Tests of the migration of databases that earlier versions wrote.

use std::path::PathBuf;
use std::sync::mpsc;

use bytes::Bytes;
use tempfile::TempDir;

use super::*;
use crate::disk::frame::{FrameHeader, MAGIC};
use crate::disk::tests::faults::crashed;
use crate::disk::tests::{append, open, open_error};
use crate::disk::{DATABASE, Disk, PAYLOADS};
use crate::record::{
    FailureCategory, RequestKind, ResultKind, ResultRecord, SequenceScope, UsageKey, UsageMeter,
};

const SCHEMA_1: &str = include_str!("schema_1.sql");
const SCHEMA_2: &str = include_str!("schema_2.sql");
const SCHEMA_3: &str = include_str!("schema_3.sql");

/// Rows in the form in which version 1 wrote them. Payload 1 is the body of a custom loss, 2 its
/// result, 3 a pass that the run must replay, 4 the failed request, 5 its result, 6 the unfinished
/// request.
const ROWS_1: &str = r#"
    INSERT INTO sessions (id, fact) VALUES
        ('open', '{"id":"open","created_at":10,"tags":["a"],"user_metadata":{"k":1},
                   "project_id":"p","display_name":null,"end":null,"ended_at":null}'),
        ('ended', '{"id":"ended","created_at":11,"tags":[],"user_metadata":null,
                    "project_id":null,"display_name":null,"end":"expired","ended_at":12}');
    INSERT INTO runs (id, used_at, last_seq, fact) VALUES
        ('open:train:0', 40, 3,
         '{"id":"open:train:0","session":"open","number":0,"base_model":"tiny",
           "lora":{"rank":4,"seed":18446744073709551615,"train_unembed":true,"train_mlp":true,
                   "train_attn":false},
           "optimizer":{"type":"adamw"},"user_metadata":null,"created_at":20,"closed":null,
           "snapshot":{"seq":2,"folder":"snapshot-2"},"project_id":null}');
    INSERT INTO changes (run, seq, kind, body) VALUES ('open:train:0', 3, 'forward_backward', 3);
    INSERT INTO samplers (id, fact) VALUES
        ('open:sample:0', '{"id":"open:sample:0","session":"open","base_model":"tiny",
                            "model_path":null,"folder":null,"clients":2}');
    INSERT INTO checkpoints (path, fact) VALUES
        ('tinker://open:train:0/weights/first',
         '{"path":"tinker://open:train:0/weights/first","folder":"first-1","request":"save",
           "seq":1,"created_at":30,"expires_at":null,"size_bytes":77,"public":false,
           "user_metadata":null,"base_model":"tiny",
           "lora":{"rank":4,"seed":7,"train_unembed":true,"train_mlp":true,"train_attn":true},
           "optimizer":{"type":"adamw"}}');
    INSERT INTO requests (id, body, answer, answer_bytes, answered_at, outcome, fact) VALUES
        ('loss', 1, 2, 6, 50, '"json"',
         '{"id":"loss","kind":"create_custom_loss","session":"open","line":{"losses":"open"},
           "seq":0,"digest":"d1","seed":0,"samples":0,"at":21}'),
        ('failed', 4, 5, 0, 60, '{"failed":{"error":"no tokens","category":"user"}}',
         '{"id":"failed","kind":"optim_step","session":"open","line":{"model":"open:train:0"},
           "seq":2,"digest":"d2","seed":0,"samples":0,"at":22}'),
        ('unfinished', 6, NULL, NULL, NULL, NULL,
         '{"id":"unfinished","kind":"sample","session":"open","line":{"sampler":"open:sample:0"},
           "seq":18446744073709551614,"digest":"d3","seed":9,"samples":1,"at":23}');
    INSERT INTO usage (hour, session, base_model, what, count) VALUES
        (400000, 'open', 'tiny', 'training', 1000),
        (400000, 'open', 'tiny', 'cached_prefill', -1);
    UPDATE state SET next = 7, voided = 2;
"#;

/// The payloads of [`ROWS_1`] that are still needed.
const PAYLOADS_1: [(u64, &str); 5] =
    [(1, "loss body"), (2, "result"), (3, "pass"), (5, ""), (6, "sample")];

/// A data folder of version 1.
struct OldFolder {
    folder: TempDir,
    /// Connection that wrote the database.
    connection: Connection,
}

impl OldFolder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let connection = Connection::open(folder.path().join(DATABASE)).unwrap();
        let header = "PRAGMA application_id = 0x544E4B58; PRAGMA user_version = 1;";
        let sql = format!("PRAGMA journal_mode = wal; BEGIN; {SCHEMA_1} {header} {ROWS_1} COMMIT;");
        connection.execute_batch(&sql).unwrap();
        let mut payloads = MAGIC.to_vec();
        for (number, payload) in PAYLOADS_1 {
            let payload = payload.as_bytes();
            payloads.extend(FrameHeader::new(number, payload).unwrap().to_bytes());
            payloads.extend(payload);
        }
        std::fs::write(folder.path().join(PAYLOADS), payloads).unwrap();
        Self { folder, connection }
    }

    fn database(&self) -> PathBuf {
        self.folder.path().join(DATABASE)
    }

    /// Returns the folder as a graceful shutdown of the old server leaves it.
    fn stopped(self) -> TempDir {
        self.connection.close().unwrap();
        self.folder
    }

    /// Returns a copy of the folder as `kill -9` of the old server leaves it: all rows are in the
    /// WAL.
    fn killed(self) -> TempDir {
        let (copy, _) = crashed(&self.database());
        std::fs::copy(self.folder.path().join(PAYLOADS), copy.path().join(PAYLOADS)).unwrap();
        copy
    }
}

/// Returns the number that `sql` selects.
fn query_number(connection: &Connection, sql: &str) -> i64 {
    connection.query_row(sql, [], |row| row.get(0)).unwrap()
}

/// Checks that `rows` are the rows of [`ROWS_1`].
fn assert_old_rows(rows: &StoredRows) {
    let [open, ended] = &*rows.sessions else { panic!("{:?}", rows.sessions) };
    assert_eq!((open.id.as_str(), open.created_at, open.end.is_some()), ("open", 10, false));
    assert_eq!((ended.id.as_str(), ended.ended_at, ended.end.is_some()), ("ended", Some(12), true));

    let [run] = &*rows.runs else { panic!("{:?}", rows.runs) };
    assert_eq!((run.row.id.as_str(), run.row.last_seq), ("open:train:0", Some(3)));
    assert_eq!((run.last_used, run.row.lora.seed), (40, u64::MAX));
    assert_eq!(run.row.snapshot.as_ref().unwrap().folder, "snapshot-2");

    let [change] = &*rows.changes else { panic!("{:?}", rows.changes) };
    assert_eq!((change.run.as_str(), change.seq), ("open:train:0", 3));
    assert_eq!((change.change.kind, change.change.body), (RequestKind::ForwardBackward, 3));

    let [sampler] = &*rows.samplers else { panic!("{:?}", rows.samplers) };
    assert_eq!((sampler.id.as_str(), sampler.clients), ("open:sample:0", 2));
    let [checkpoint] = &*rows.checkpoints else { panic!("{:?}", rows.checkpoints) };
    assert_eq!((checkpoint.folder.as_str(), checkpoint.size_bytes), ("first-1", 77));

    let [loss, failed, unfinished] = &*rows.requests else { panic!("{:?}", rows.requests) };
    assert_eq!((loss.row.id.as_str(), loss.row.number, loss.row.at), ("loss", 1, 21));
    let result = loss.result.as_ref().unwrap();
    assert_eq!((result.number, result.size, result.at), (2, 6, 50));
    assert_eq!(result.result, ResultKind::Json);
    let error = "no tokens".to_owned();
    let failure = ResultKind::Failed { error, category: FailureCategory::User };
    assert_eq!(failed.row.scope, SequenceScope::Model("open:train:0".into()));
    assert_eq!(failed.result.as_ref().unwrap().result, failure);
    assert_eq!((unfinished.row.number, unfinished.row.seq), (6, u64::MAX - 1));
    assert!(unfinished.result.is_none());

    let usage: Vec<_> = rows.usage.iter().map(|(key, count)| (key.meter, *count)).collect();
    assert_eq!(usage, [(UsageMeter::Training, 1_000), (UsageMeter::CachedPrefill, u64::MAX)]);
}

/// Writes a result with the payload "done" for the unfinished request, and waits until it is
/// durable.
fn finish_request(disk: &mut Disk, rows: &StoredRows) {
    let request = rows.requests.iter().find(|request| request.result.is_none()).unwrap();
    let number = disk.next_payload_number();
    let meter = UsageMeter::Training;
    let (session, base_model) = ("open".into(), "tiny".to_owned());
    let result = ResultRecord {
        request: std::sync::Arc::new(request.row.clone()),
        number,
        size: 4,
        result: ResultKind::Proto,
        model_changed: false,
        at: 70,
        usage: vec![(UsageKey { hour: 400_000, session, base_model, meter }, 5)],
    };
    let (sender, receiver) = mpsc::channel();
    let payload = Some((number, Bytes::from_static(b"done")));
    let on_written = Box::new(move |written| sender.send(written).unwrap());
    disk.append_required(vec![Record::Result(result)], payload, on_written);
    receiver.recv().unwrap().unwrap();
}

#[test]
fn a_database_of_version_1_is_migrated_and_continues() {
    for folder in [OldFolder::new().stopped(), OldFolder::new().killed()] {
        let (mut disk, rows) = open(folder.path()).unwrap();
        assert_old_rows(&rows);
        for (number, payload) in PAYLOADS_1 {
            assert_eq!(disk.reader().payload(number).unwrap(), payload);
        }
        finish_request(&mut disk, &rows);
        assert_eq!(append(&mut disk, "new", b"body").unwrap(), 8, "numbers continue after 7");
        drop(disk);

        let (disk, rows) = open(folder.path()).unwrap();
        let [_, _, finished, new] = &*rows.requests else { panic!("{:?}", rows.requests) };
        let result = finished.result.as_ref().unwrap();
        assert_eq!((result.number, result.at, &result.result), (7, 70, &ResultKind::Proto));
        assert_eq!(disk.reader().payload(7).unwrap(), "done");
        assert_eq!(new.row.id.as_str(), "new");
        let training = rows.usage.iter().find(|(key, _)| key.meter == UsageMeter::Training);
        assert_eq!(training.unwrap().1, &1_005);
    }
}

/// Returns the statements that created the tables and indexes, without comments, spaces and
/// quotes.
fn schema_of(connection: &Connection) -> Vec<String> {
    let sql = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name";
    let mut statement = connection.prepare(sql).unwrap();
    let statements = statement.query_map([], |row| row.get::<_, String>(0)).unwrap();
    let normalize = |sql: String| {
        let code = sql.lines().map(|line| line.split("--").next().unwrap());
        code.flat_map(str::chars).filter(|c| !c.is_whitespace() && *c != '"').collect()
    };
    statements.map(|sql| normalize(sql.unwrap())).collect()
}

#[test]
fn a_migrated_database_has_the_schema_of_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut new = Database::open(&folder.path().join(DATABASE)).unwrap();
    new.create_tables().unwrap();
    let empty = |schema: &str, version: i32| {
        let folder = tempfile::tempdir().unwrap();
        let connection = Connection::open(folder.path().join(DATABASE)).unwrap();
        let header =
            format!("PRAGMA application_id = 0x544E4B58; PRAGMA user_version = {version};");
        connection.execute_batch(&format!("{schema} {header}")).unwrap();
        folder
    };
    for old in [OldFolder::new().stopped(), empty(SCHEMA_2, 2), empty(SCHEMA_3, 3)] {
        let migrated = Database::open(&old.path().join(DATABASE)).unwrap();
        assert_eq!(schema_of(&migrated.connection), schema_of(&new.connection));
        let version =
            |database: &Database| query_number(&database.connection, "PRAGMA user_version");
        assert_eq!(version(&migrated), version(&new));
    }
}

/// Truncates the WAL at many positions, as a crash during the migration may leave it.
#[test]
fn a_crash_during_the_migration_loses_nothing() {
    let folder = OldFolder::new().stopped();
    let path = folder.path().join(DATABASE);
    // While this connection is open, the migration is only in the WAL.
    let (mut migrated, _) = connect(&path).unwrap();
    for (name, value) in SETTINGS {
        migrated.pragma_update(None, name, value).unwrap();
    }
    migrate(&mut migrated, 1).unwrap();
    let wal_length = std::fs::metadata(path.with_extension("sqlite-wal")).unwrap().len();
    let mut found_versions = Vec::new();
    for length in (0..wal_length).step_by(250).chain([wal_length - 1, wal_length]) {
        let (_folder, copy) = crashed(&path);
        let wal = copy.with_extension("sqlite-wal");
        std::fs::OpenOptions::new().write(true).open(wal).unwrap().set_len(length).unwrap();
        let connection = Connection::open(&copy).unwrap();
        let version = query_number(&connection, "PRAGMA user_version");
        let column = if version == 1 { "fact" } else { "record" };
        assert_eq!(query_number(&connection, &format!("SELECT count({column}) FROM requests")), 3);
        connection.close().unwrap();
        found_versions.push(version);

        assert_old_rows(&Database::open(&copy).unwrap().read().unwrap());
    }
    // Only the complete WAL contains the migration.
    let (last, incomplete) = found_versions.split_last().unwrap();
    assert_eq!(*last, 4);
    assert!(incomplete.iter().all(|version| *version == 1), "{incomplete:?}");
    assert_old_rows(&StoredRows::read(&migrated).unwrap());
}

#[test]
fn a_failed_migration_changes_nothing() {
    let old = OldFolder::new();
    // One of the last statements of the migration fails.
    old.connection.execute_batch("ALTER TABLE state RENAME COLUMN voided TO other").unwrap();
    let folder = old.stopped();
    let path = folder.path().join(DATABASE);
    let before = std::fs::read(&path).unwrap();
    let message = open_error(folder.path());
    assert!(message.contains("metadata.sqlite: cannot migrate from schema 1: "), "{message}");
    assert!(message.contains("voided"), "{message}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn unknown_versions_are_refused_and_unchanged() {
    for (version, reason) in [
        (5, "written by a newer version of this server (schema 5, this version supports 1 to 4)"),
        (0, "written by an unknown version of this server (schema 0"),
        (-1, "written by an unknown version of this server (schema -1"),
    ] {
        let old = OldFolder::new();
        old.connection.pragma_update(None, "user_version", version).unwrap();
        let folder = old.stopped();
        let content = || {
            let entries = std::fs::read_dir(folder.path()).unwrap();
            let mut files: Vec<(PathBuf, Vec<u8>)> = entries
                .map(|entry| entry.unwrap().path())
                .map(|path| (path.clone(), std::fs::read(path).unwrap()))
                .collect();
            files.sort();
            files
        };
        let before = content();
        let message = open_error(folder.path());
        assert!(message.contains("metadata.sqlite: ") && message.contains(reason), "{message}");
        assert!(message.ends_with("use that version, or another data folder"), "{message}");
        assert!(content() == before, "a file has changed");
    }
}
