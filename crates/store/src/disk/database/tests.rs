//! Tests of the versions of the format.

use std::path::PathBuf;

use super::*;
use crate::disk::DATABASE;
use crate::disk::tests::{append, open, open_error};

#[test]
fn other_versions_are_refused_by_name_and_unchanged() {
    for (version, reason) in [
        (2, "the data folder has format 2 of a newer version of Tinkex"),
        (0, "the data folder has format 0 of an unknown version of Tinkex"),
        (-1, "the data folder has format -1 of an unknown version of Tinkex"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        append(&mut open(folder.path()).unwrap().0, "a", b"body").unwrap();
        let connection = Connection::open(folder.path().join(DATABASE)).unwrap();
        connection.pragma_update(None, "user_version", version).unwrap();
        connection.close().unwrap();
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
        let database = folder.path().join(DATABASE);
        assert!(message.contains(&database.display().to_string()), "{message}");
        assert!(message.contains(reason), "{message}");
        assert!(message.contains("this version reads format 1; use that version"), "{message}");
        assert!(content() == before, "a file has changed");
    }
}

/// A database of an earlier build, without owners.
#[test]
fn missing_columns_are_added_and_old_rows_belong_to_the_administrator() {
    let folder = tempfile::tempdir().unwrap();
    append(&mut open(folder.path()).unwrap().0, "a", b"body").unwrap();
    let connection = Connection::open(folder.path().join(DATABASE)).unwrap();
    let older = r#"
        DROP TABLE usage;
        CREATE TABLE usage (
            hour INTEGER NOT NULL, session TEXT NOT NULL, base_model TEXT NOT NULL,
            meter TEXT NOT NULL, count INTEGER NOT NULL,
            PRIMARY KEY (hour, session, base_model, meter)
        ) WITHOUT ROWID;
        INSERT INTO usage VALUES (7, 's', 'm', 'training', 5);
        ALTER TABLE sample_log DROP COLUMN owner;
        INSERT INTO sample_log (finished_at, queued, computed, base_model, session, source,
            prompt_tokens, bytes) VALUES (1, 1, 1, 'm', 's', 'tinker', 1, 1);
        ALTER TABLE runs DROP COLUMN owner;
        INSERT INTO runs (id, last_used, record) VALUES ('s:train:0', 1, '{"id":"s:train:0",
            "session":"s","number":0,"base_model":"m","lora":{"rank":4,"seed":1,
            "train_unembed":true,"train_mlp":true,"train_attn":true},
            "optimizer":{"type":"adamw"},"created_at":1,"closed":null,"snapshot":null,
            "project_id":null}');"#;
    connection.execute_batch(older).unwrap();
    connection.close().unwrap();
    let (_, rows) = open(folder.path()).unwrap();
    let usage: Vec<_> = rows.usage.iter().map(|(key, n)| (key.owner.as_str(), *n)).collect();
    assert_eq!(usage, [("admin", 5)]);
    let connection = Connection::open(folder.path().join(DATABASE)).unwrap();
    for table in ["sample_log", "runs"] {
        let sql = format!("SELECT owner FROM {table}");
        let owner = connection.query_row(&sql, [], |row| row.get::<_, String>(0));
        assert_eq!(owner.as_deref(), Ok("admin"), "{table}");
    }
}

/// The metadata of a database of an earlier build is a part of the records.
#[test]
fn metadata_moves_to_its_own_table() {
    let folder = tempfile::tempdir().unwrap();
    append(&mut open(folder.path()).unwrap().0, "a", b"body").unwrap();
    let connection = Connection::open(folder.path().join(DATABASE)).unwrap();
    let older = r#"
        DROP TABLE user_metadata;
        INSERT INTO sessions (id, record) VALUES ('s', '{"id":"s","created_at":1,"tags":[],
            "user_metadata":{"n":7,"big":18446744073709551615},"project_id":null,
            "display_name":null,"end":null,"ended_at":null}');
        INSERT INTO runs (id, last_used, record) VALUES ('s:train:0', 1, '{"id":"s:train:0",
            "session":"s","number":0,"base_model":"m","lora":{"rank":4,
            "seed":18446744073709551615,"train_unembed":true,"train_mlp":true,"train_attn":true},
            "optimizer":{"type":"adamw"},"user_metadata":{"name":"animals"},"created_at":1,
            "closed":null,"snapshot":null,"project_id":null}');"#;
    connection.execute_batch(older).unwrap();
    connection.close().unwrap();
    let (disk, rows) = open(folder.path()).unwrap();
    let json = r#"{"n":7,"big":18446744073709551615}"#;
    assert_eq!(rows.sessions[0].metadata_bytes, json.len() as u64);
    let read = disk.metadata().get("s", 1).unwrap().unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap().len(), json.len());
    assert_eq!(read["big"], u64::MAX);
    let run = &rows.runs[0].row;
    assert_eq!((run.name.as_deref(), run.lora.seed), (Some("animals"), u64::MAX));
    assert_eq!(disk.metadata().get("s:train:0", 1).unwrap().unwrap()["name"], "animals");
}
