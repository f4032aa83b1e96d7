//! Tests of checks and repairs.

use std::fs;

use rusqlite::Connection;

use super::super::frame::HEADER_LEN;
use super::super::tests::{append, open};
use super::*;

/// Creates a data folder with two requests and a sealed folder of weights that a checkpoint uses.
fn data_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    for id in ["a", "b"] {
        append(&mut disk, id, &[7; 100]).unwrap();
    }
    drop(disk);
    let weights = folder.path().join(WEIGHTS);
    fs::create_dir(&weights).unwrap();
    fs::create_dir(weights.join("m-weights-one")).unwrap();
    fs::write(weights.join("m-weights-one/adapter"), "content").unwrap();
    let name = sealed::seal(&weights.join("m-weights-one"), |_| {}).unwrap();
    let record = serde_json::json!({
        "path": "tinker://m/weights/one", "weights": {"local": name}, "request": null, "seq": 1,
        "created_at": 1, "expires_at": null, "size_bytes": 7, "public": false,
        "user_metadata": null, "base_model": "base",
        "lora": {"rank": 1, "seed": 0, "train_unembed": false, "train_mlp": false,
                 "train_attn": true},
        "optimizer": {"type": "adam"},
    });
    let sql = "INSERT INTO checkpoints (path, record) VALUES ('tinker://m/weights/one', ?)";
    database(folder.path()).execute(sql, [record.to_string()]).unwrap();
    folder
}

fn database(folder: &Path) -> Connection {
    Connection::open(folder.join(DATABASE)).unwrap()
}

fn lost(report: &DataFolderReport) -> Vec<&str> {
    report.lost.iter().map(|lost| lost.object.as_str()).collect()
}

#[test]
fn an_intact_folder_has_no_problems() {
    let folder = data_folder();
    let report = check(folder.path()).unwrap();
    assert!(report.is_intact(), "{report:?}");
    assert_eq!(report.payloads.readable, 2);
    assert_eq!(report.weights[0].state, WeightsState::Intact);
    assert_eq!(report.weights[0].used_by, ["checkpoint tinker://m/weights/one"]);
    assert!(repair(folder.path()).unwrap().repairs.is_empty());
}

#[test]
fn damaged_weights_name_their_checkpoint() {
    let folder = data_folder();
    let report = check(folder.path()).unwrap();
    let file = folder.path().join(WEIGHTS).join(&report.weights[0].folder).join("adapter");
    fs::write(file, "Content").unwrap();
    let report = check(folder.path()).unwrap();
    assert_eq!(report.weights[0].state, WeightsState::Damaged);
    assert_eq!(lost(&report), ["checkpoint tinker://m/weights/one"]);
    assert!(!report.is_intact());
    fs::remove_dir_all(folder.path().join(WEIGHTS).join(&report.weights[0].folder)).unwrap();
    let report = check(folder.path()).unwrap();
    assert_eq!(report.weights[0].state, WeightsState::Missing);
    assert_eq!(lost(&report), ["checkpoint tinker://m/weights/one"]);
}

#[test]
fn a_repaired_payload_file_keeps_the_other_payloads() {
    let folder = data_folder();
    let path = folder.path().join(PAYLOADS);
    let mut bytes = fs::read(&path).unwrap();
    let first_content = MAGIC.len() + HEADER_LEN;
    bytes[first_content] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let report = check(folder.path()).unwrap();
    assert_eq!(report.payloads.state, FileState::Damaged);
    assert_eq!(lost(&report).len(), 1, "{report:?}");
    assert!(lost(&report)[0].starts_with("request a (sample of sampling session"), "{report:?}");
    assert_eq!(fs::read(&path).unwrap(), bytes, "a check changes nothing");

    let report = repair(folder.path()).unwrap();
    assert_eq!(report.repairs.len(), 1, "{report:?}");
    assert_eq!(fs::read(folder.path().join("payloads.damaged")).unwrap(), bytes);
    let (disk, rows) = open(folder.path()).unwrap();
    assert_eq!(rows.requests.len(), 2);
    let numbers: Vec<u64> = rows.requests.iter().map(|request| request.row.number).collect();
    assert!(disk.reader().payload(numbers[0]).is_err());
    assert_eq!(disk.reader().payload(numbers[1]).unwrap(), [7; 100][..]);
    drop(disk);
    // The payload is still lost, but the file needs no second repair.
    let report = repair(folder.path()).unwrap();
    assert_eq!(lost(&report).len(), 1, "{report:?}");
    assert_eq!(report.payloads.state, FileState::Intact, "{report:?}");
    assert!(report.repairs.is_empty(), "{report:?}");
}

#[test]
fn a_repaired_database_of_an_earlier_build_keeps_usage_and_metadata() {
    let folder = data_folder();
    let older = r#"
        DROP TABLE usage;
        CREATE TABLE usage (
            hour INTEGER NOT NULL, session TEXT NOT NULL, base_model TEXT NOT NULL,
            meter TEXT NOT NULL, count INTEGER NOT NULL,
            PRIMARY KEY (hour, session, base_model, meter)
        ) WITHOUT ROWID;
        INSERT INTO usage VALUES (7, 's', 'm', 'training', 5);
        DROP TABLE user_metadata;
        INSERT INTO sessions (id, record) VALUES ('s', '{"id":"s","created_at":1,"tags":[],
            "user_metadata":{"n":7},"project_id":null,"display_name":null,"end":null,
            "ended_at":null}');
        UPDATE requests SET record = '{}' WHERE id = 'b'"#;
    database(folder.path()).execute_batch(older).unwrap();
    let report = repair(folder.path()).unwrap();
    assert_eq!(report.database.state, FileState::Damaged, "{report:?}");
    assert_eq!(lost(&report), ["row b of the table requests"], "{report:?}");
    assert_eq!(check(folder.path()).unwrap().database.state, FileState::Intact);
    let (disk, rows) = open(folder.path()).unwrap();
    assert_eq!(rows.requests.len(), 1);
    let usage: Vec<_> = rows.usage.iter().map(|(key, n)| (key.owner.as_str(), *n)).collect();
    assert_eq!(usage, [("admin", 5)]);
    assert_eq!(disk.metadata().get("s", rows.sessions[0].metadata_bytes).unwrap().unwrap()["n"], 7);
}

#[test]
fn a_row_that_violates_a_constraint_is_reported_as_lost() {
    let folder = data_folder();
    let set_schema = |from: &str, to: &str| {
        let connection = database(folder.path());
        connection.pragma_update(None, "writable_schema", true).unwrap();
        let sql = "UPDATE sqlite_schema SET sql = replace(sql, ?, ?) WHERE name = 'user_metadata'";
        connection.execute(sql, [from, to]).unwrap();
    };
    set_schema("metadata TEXT NOT NULL", "metadata TEXT");
    let insert = "INSERT INTO user_metadata VALUES ('a', '{}'), ('b', NULL)";
    database(folder.path()).execute(insert, []).unwrap();
    set_schema("metadata TEXT", "metadata TEXT NOT NULL");
    let report = repair(folder.path()).unwrap();
    assert_eq!(lost(&report), ["row b of the table user_metadata"], "{report:?}");
    let copied = format!("copied {} rows", report.database.readable - 1);
    assert!(report.repairs[0].starts_with(&copied), "{report:?}");
}

#[test]
fn the_readable_rows_of_a_damaged_database_are_recovered() {
    let folder = data_folder();
    let path = folder.path().join(DATABASE);
    let connection = database(folder.path());
    // Enough rows for several pages.
    let insert = "INSERT INTO usage (hour, owner, session, base_model, meter, count) \
                  VALUES (?, 'admin', 's', 'b', 'training', 1)";
    for hour in 0..2000 {
        connection.execute(insert, [hour]).unwrap();
    }
    connection.execute("UPDATE requests SET record = '{}' WHERE id = 'b'", []).unwrap();
    let root = "SELECT rootpage FROM sqlite_schema WHERE name = 'usage'";
    let root: u32 = connection.query_row(root, [], |row| row.get(0)).unwrap();
    connection.close().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    // The root page of the table has the numbers of its pages. Damage one of them.
    let page = usize::try_from(root - 1).unwrap() * 4096;
    let cell = page + usize::from(u16::from_be_bytes([bytes[page + 14], bytes[page + 15]]));
    bytes[cell..cell + 4].copy_from_slice(&[0xFF; 4]);
    fs::write(&path, &bytes).unwrap();

    let report = check(folder.path()).unwrap();
    assert_eq!(report.database.state, FileState::Damaged);
    assert!(lost(&report).contains(&"row b of the table requests"), "{report:?}");
    assert_eq!(fs::read(&path).unwrap(), bytes, "a check changes nothing");
    let report = repair(folder.path()).unwrap();
    assert_eq!(report.repairs.len(), 1, "{report:?}");
    assert!(folder.path().join("metadata.sqlite.damaged").exists());
    let after = check(folder.path()).unwrap();
    assert_eq!(after.database.state, FileState::Intact, "{after:?}");
    let usage: i64 = database(folder.path())
        .query_row("SELECT count(*) FROM usage", [], |row| row.get(0))
        .unwrap();
    assert!((1000..2000).contains(&usage), "{usage} rows, from both sides of the damaged page");
    let (mut disk, rows) = open(folder.path()).unwrap();
    assert_eq!(rows.requests.len(), 1);
    assert_eq!(rows.checkpoints.len(), 1);
    assert_eq!(disk.reader().payload(rows.requests[0].row.number).unwrap(), [7; 100][..]);
    assert!(append(&mut disk, "c", b"c").unwrap() > 2, "payload numbers are never reused");
}

#[test]
fn intact_weights_are_listed_without_a_database() {
    let folder = data_folder();
    let path = folder.path().join(DATABASE);
    fs::write(&path, [0xFF; 8192]).unwrap();
    let report = check(folder.path()).unwrap();
    assert_eq!(report.database.state, FileState::Damaged);
    assert_eq!(report.weights[0].state, WeightsState::Intact);
    assert_eq!(repair(folder.path()).unwrap().repairs, Vec::<String>::new());
    assert_eq!(fs::read(&path).unwrap(), [0xFF; 8192], "nothing can be recovered");
    fs::remove_file(&path).unwrap();
    let report = check(folder.path()).unwrap();
    assert_eq!(report.database.state, FileState::Missing);
    assert_eq!(report.weights[0].state, WeightsState::Intact);
}
