//! Removal of unneeded payloads, and of the content of deleted runs.

use super::*;
use crate::record::MetadataRecord;

#[test]
fn a_small_file_is_compacted_when_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    append(&mut disk, "a", b"a marker of a prompt").unwrap();
    remove(&mut disk, &["a"]);
    compact_small(&mut disk);
    assert!(disk.payload_bytes() > MAGIC.len() as u64, "the file is in use");
    compact_small(&mut disk);
    assert_eq!(disk.payload_bytes(), MAGIC.len() as u64);
}

/// Compacts the payload file as the expiry task does, which leaves small files in use unchanged.
fn compact_small(disk: &mut Disk) {
    let (sender, receiver) = mpsc::channel();
    disk.compact(1 << 30, Box::new(move |result| drop(sender.send(result))));
    receiver.recv().unwrap().unwrap();
}

fn delete_run(disk: &mut Disk) {
    let (sender, receiver) = mpsc::channel();
    let deleted = vec![Record::RunDeleted { id: "m".into() }];
    disk.append(deleted, None, Box::new(move |result| drop(sender.send(result))));
    receiver.recv().unwrap().unwrap();
}

const MARKER: &[u8] = b"MARKER-OF-A-PROMPT";

/// Returns whether a file of the folder contains [`MARKER`].
fn has_marker(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().any(|entry| {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        bytes.windows(MARKER.len()).any(|bytes| bytes == MARKER)
    })
}

/// The deletion of a run removes its content at once, also from a file with many needed payloads.
#[test]
fn a_deleted_run_leaves_no_payloads() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    let kept = append(&mut disk, "kept", &[1; 10_000]).unwrap();
    compact_small(&mut disk);
    append(&mut disk, "removed", MARKER).unwrap();
    remove(&mut disk, &["removed"]);
    delete_run(&mut disk);
    compact_small(&mut disk);
    assert!(!has_marker(folder.path()));
    assert_eq!(disk.reader().payload(kept).unwrap().len(), 10_000);
}

#[test]
fn payloads_of_a_run_that_is_deleted_during_a_compaction_are_removed_by_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    append(&mut disk, "unneeded", &vec![1; 10 << 20]).unwrap();
    remove(&mut disk, &["unneeded"]);
    append(&mut disk, "of run", MARKER).unwrap();
    // The compaction copies this payload and then waits for other commands.
    append(&mut disk, "large", &vec![1; 9 << 20]).unwrap();
    append(&mut disk, "last", b"").unwrap();
    // Queue all commands before the writer executes the first.
    let (start, started) = mpsc::channel::<()>();
    disk.barrier(Box::new(move |_| started.recv().unwrap()));
    let (sender, results) = mpsc::channel();
    let report = |what: &'static str| -> WriteCallback {
        let sender = sender.clone();
        Box::new(move |written| sender.send((what, written.is_ok())).unwrap())
    };
    disk.compact(0, report("compacted"));
    let ids = vec!["of run".into()];
    let records = vec![Record::RequestsRemoved { ids }, Record::RunDeleted { id: "m".into() }];
    disk.append(records, None, report("deleted"));
    start.send(()).unwrap();
    assert_eq!(results.recv().unwrap(), ("deleted", true));
    assert_eq!(results.recv().unwrap(), ("compacted", true));
    assert!(has_marker(folder.path()), "the run was deleted during the compaction");
    compact_small(&mut disk);
    assert!(!has_marker(folder.path()));
}

/// The WAL is truncated although the payload file has nothing to remove, and as soon as no other
/// connection reads the database.
#[test]
fn a_deleted_run_leaves_nothing_in_the_wal() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    append(&mut disk, "kept", b"body").unwrap();
    compact_small(&mut disk);
    let (sender, receiver) = mpsc::channel();
    let json = format!("{{\"prompt\":\"{}\"}}", str::from_utf8(MARKER).unwrap());
    let metadata = MetadataRecord { object: "m".to_owned(), json: Some(json.into()) };
    let records = vec![Record::Metadata(metadata)];
    disk.append(records, None, Box::new(move |result| drop(sender.send(result))));
    receiver.recv().unwrap().unwrap();
    let reader = rusqlite::Connection::open(folder.path().join(DATABASE)).unwrap();
    reader.execute_batch("BEGIN").unwrap();
    reader.query_row("SELECT count(*) FROM runs", [], |_| Ok(())).unwrap();
    delete_run(&mut disk);
    compact_small(&mut disk);
    assert!(has_marker(folder.path()), "the reader needs the WAL");
    // The server does not forget the deletion when it ends before the truncation.
    drop(disk);
    let (mut disk, _) = open(folder.path()).unwrap();
    compact_small(&mut disk);
    assert!(has_marker(folder.path()), "the reader needs the WAL");
    reader.execute_batch("COMMIT").unwrap();
    compact_small(&mut disk);
    assert!(!has_marker(folder.path()));
}
