//! Tests of the data folder: writing, reopening, damage, and compaction.

use std::collections::HashSet;
use std::sync::mpsc;

pub mod faults;

use super::frame::{FrameHeader, HEADER_LEN, MAGIC, MAX_PAYLOAD};
use super::payloads::{AppendFile, BUFFER, PayloadIndex};
use super::*;
use crate::record::{RequestKind, RequestRecord, ResultKind, ResultRecord, SequenceScope};

/// Returns a request whose body is payload `number`.
pub(super) fn request(id: &str, number: u64) -> Arc<RequestRecord> {
    Arc::new(RequestRecord {
        number,
        id: id.into(),
        kind: RequestKind::Sample,
        session: "s".into(),
        scope: SequenceScope::Sampler("s:sample:0".into()),
        seq: u64::MAX - 1,
        digest: "d".to_owned(),
        seed: u64::MAX,
        samples: 1,
        source: None,
        at: 1,
    })
}

pub(super) fn open(folder: &Path) -> io::Result<(Disk, StoredRows)> {
    Disk::open(folder, &Executor::threads())
}

/// Writes a request, waits for it, and returns its payload number.
pub fn append(disk: &mut Disk, id: &str, body: &[u8]) -> io::Result<u64> {
    let (sender, receiver) = mpsc::channel();
    let number = disk.next_payload_number();
    let payload = Some((number, Bytes::copy_from_slice(body)));
    let on_written = Box::new(move |result| drop(sender.send(result)));
    disk.append(vec![Record::Request(request(id, number))], payload, on_written);
    receiver.recv().unwrap().map(|()| number)
}

fn remove(disk: &mut Disk, ids: &[&str]) {
    let (sender, receiver) = mpsc::channel();
    let ids = ids.iter().map(|id| (*id).into()).collect();
    let on_written = Box::new(move |result| drop(sender.send(result)));
    disk.append(vec![Record::RequestsRemoved { ids }], None, on_written);
    receiver.recv().unwrap().unwrap();
}

fn compact(disk: &mut Disk) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    disk.compact(0, Box::new(move |result| drop(sender.send(result))));
    receiver.recv().unwrap()
}

fn ids(rows: &StoredRows) -> Vec<String> {
    rows.requests.iter().map(|request| request.row.id.to_string()).collect()
}

/// Returns the ids of the requests in a data folder.
fn stored_ids(folder: &Path) -> Vec<String> {
    ids(&open(folder).unwrap().1)
}

pub(super) fn open_error(folder: &Path) -> String {
    match open(folder) {
        Ok(_) => panic!("the folder was opened"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn written_requests_are_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, found) = open(folder.path()).unwrap();
    assert!(found.requests.is_empty());
    append(&mut disk, "a", b"").unwrap();
    let big = vec![7; 2 * BUFFER];
    let number = append(&mut disk, "b", &big).unwrap();
    assert_eq!(disk.reader().payload(number).unwrap(), big);
    assert_eq!(disk.commits(), 2);
    drop(disk);

    let (mut disk, found) = open(folder.path()).unwrap();
    assert_eq!(ids(&found), ["a", "b"]);
    let row = &found.requests[1].row;
    assert_eq!((row.number, row.seq, row.seed), (number, u64::MAX - 1, u64::MAX));
    assert_eq!(disk.reader().payload(number).unwrap(), big);
    assert!(append(&mut disk, "c", b"").unwrap() > number);
}

#[test]
fn payload_numbers_are_never_reused() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    let number = append(&mut disk, "a", b"body").unwrap();
    remove(&mut disk, &["a"]);
    compact(&mut disk).unwrap();
    assert_eq!(disk.payload_bytes(), MAGIC.len() as u64);
    drop(disk);
    let (mut disk, found) = open(folder.path()).unwrap();
    assert!(found.requests.is_empty());
    assert!(disk.next_payload_number() > number);
}

/// Simulates a crash after the payloads were flushed and before the rows were committed.
#[test]
fn a_payload_without_a_row_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    append(&mut disk, "a", b"body").unwrap();
    let length = disk.payload_bytes();
    let next = disk.next_payload_number();
    drop(disk);
    let path = folder.path().join(PAYLOADS);
    let whole = std::fs::read(&path).unwrap();
    let mut more = whole.clone();
    more.extend_from_slice(&FrameHeader::new(next, b"lost").unwrap().to_bytes());
    more.extend_from_slice(b"lost");
    for cut in whole.len()..=more.len() {
        std::fs::write(&path, &more[..cut]).unwrap();
        let (mut disk, found) = open(folder.path()).unwrap();
        assert_eq!(ids(&found), ["a"]);
        assert_eq!(disk.payload_bytes(), length);
        assert_eq!(disk.next_payload_number(), next);
        drop(disk);
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }
}

#[test]
fn a_missing_payload_is_an_error_and_no_file_changes() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    let numbers = ["a", "b", "c"].map(|id| append(&mut disk, id, b"body").unwrap());
    drop(disk);
    let path = folder.path().join(PAYLOADS);
    let whole = std::fs::read(&path).unwrap();
    let mut broken = vec![Vec::new(), whole[..4].to_vec(), whole[..whole.len() - 1].to_vec()];
    // Damage each byte of the second header.
    let second = MAGIC.len() + HEADER_LEN + 4;
    broken.extend((second..second + HEADER_LEN).map(|at| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x15;
        bytes
    }));
    for bytes in broken {
        std::fs::write(&path, &bytes).unwrap();
        let message = open_error(folder.path());
        assert!(message.contains("damaged") && message.contains("backup"), "{message}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "the file is unchanged");
    }
    // A payload that no row needs may be missing.
    std::fs::write(&path, &whole).unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    remove(&mut disk, &["c"]);
    drop(disk);
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let (disk, found) = open(folder.path()).unwrap();
    assert_eq!(ids(&found), ["a", "b"]);
    drop(disk);

    // A payload with a wrong checksum fails only when it is read.
    let mut bytes = whole;
    bytes[second + HEADER_LEN] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let (disk, _) = open(folder.path()).unwrap();
    let message = disk.reader().payload(numbers[1]).unwrap_err();
    assert_eq!(message.kind(), io::ErrorKind::InvalidData, "{message}");
    assert_eq!(disk.reader().payload(numbers[0]).unwrap(), "body");
}

#[test]
fn data_without_a_database_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    append(&mut open(folder.path()).unwrap().0, "a", b"body").unwrap();
    let payloads = std::fs::read(folder.path().join(PAYLOADS)).unwrap();
    // Deleted, or truncated.
    let path = folder.path().join(DATABASE);
    for lose in [|path: &Path| std::fs::remove_file(path), |path: &Path| std::fs::write(path, "")] {
        lose(&path).unwrap();
        let message = open_error(folder.path());
        assert!(message.contains("payload file without its database"), "{message}");
        assert_eq!(std::fs::read(folder.path().join(PAYLOADS)).unwrap(), payloads);
    }

    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(PAYLOADS), "another program's data").unwrap();
    assert!(open_error(folder.path()).contains("payloads"));

    // Weights without a database: expiry would remove them.
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join(WEIGHTS);
    std::fs::create_dir_all(weights.join("c1")).unwrap();
    assert!(open_error(folder.path()).contains("weights without the database"));
    assert!(!folder.path().join(DATABASE).exists());
    std::fs::remove_dir(weights.join("c1")).unwrap();
    drop(open(folder.path()).unwrap());
}

#[cfg(unix)]
#[test]
fn files_are_readable_by_their_owner_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    append(&mut disk, "a", b"a prompt").unwrap();
    remove(&mut disk, &["a"]);
    compact(&mut disk).unwrap();
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{:?}: {mode:o}", entry.file_name());
    }
}

#[test]
fn files_of_other_programs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(DATABASE);
    drop(open(folder.path()).unwrap());
    let sql = "PRAGMA application_id = 0";
    rusqlite::Connection::open(&path).unwrap().execute_batch(sql).unwrap();
    assert!(open_error(folder.path()).contains("not a database of this server"));
    std::fs::write(&path, "another program's file").unwrap();
    assert!(open_error(folder.path()).contains("not a database"));
}

#[test]
fn compaction_keeps_needed_payloads_and_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    let numbers: Vec<u64> =
        ["a", "b", "c"].map(|id| append(&mut disk, id, id.as_bytes()).unwrap()).into();
    // The second request gets a result, so its body is no longer needed.
    let result_number = disk.next_payload_number();
    let result = Record::Result(ResultRecord {
        request: request("b", numbers[1]),
        number: result_number,
        size: 6,
        result: ResultKind::Json,
        model_changed: false,
        at: 2,
        usage: vec![],
    });
    disk.append_required(
        vec![result],
        Some((result_number, Bytes::from_static(b"answer"))),
        Box::new(|_| {}),
    );
    remove(&mut disk, &["a", "c"]);
    let before = disk.payload_bytes();
    compact(&mut disk).unwrap();
    let last = append(&mut disk, "d", b"d").unwrap();
    assert!(disk.payload_bytes() < before);
    assert_eq!(disk.reader().payload(result_number).unwrap(), "answer");
    for number in numbers {
        let error = disk.reader().payload(number).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
    drop(disk);
    let (disk, found) = open(folder.path()).unwrap();
    assert_eq!(ids(&found), ["b", "d"]);
    assert_eq!(found.requests[0].result.as_ref().unwrap().number, result_number);
    assert_eq!(disk.reader().payload(last).unwrap(), "d");
}
