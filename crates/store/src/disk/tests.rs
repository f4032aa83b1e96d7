//! Tests of the data folder: writing, reopening, damage, and compaction.

use std::collections::HashSet;
use std::sync::mpsc;

pub mod faults;
mod removal;

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
        tokens: 0,
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

/// Rewrites the payload file, although all payloads are needed: adds and removes a large payload.
fn compact_all(disk: &mut Disk) {
    append(disk, "large", &[0; 10_000]).unwrap();
    remove(disk, &["large"]);
    compact(disk).unwrap();
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
fn one_wrong_byte_in_a_header_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    let numbers = ["a", "b", "c"].map(|id| append(&mut disk, id, id.as_bytes()).unwrap());
    drop(disk);
    let path = folder.path().join(PAYLOADS);
    let whole = std::fs::read(&path).unwrap();
    // Damage each byte of the magic number, and each byte of the second header.
    let second = MAGIC.len() + HEADER_LEN + 1;
    for at in (0..MAGIC.len()).chain(second..second + HEADER_LEN) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x15;
        std::fs::write(&path, &bytes).unwrap();
        let (mut disk, found) = open(folder.path()).unwrap();
        assert_eq!(ids(&found), ["a", "b", "c"]);
        for (number, expected) in numbers.iter().zip(["a", "b", "c"]) {
            assert_eq!(disk.reader().payload(*number).unwrap(), expected, "damaged at {at}");
        }
        // A compaction writes the correct headers.
        compact_all(&mut disk);
        drop(disk);
        assert_eq!(std::fs::read(&path).unwrap(), whole, "damaged at {at}");
    }
}

#[test]
fn a_damaged_payload_is_lost_alone_and_no_byte_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    // The content of the second payload contains the header and the content of another payload, as
    // a client could send it.
    let forged = FrameHeader::new(3, b"forged").unwrap().to_bytes();
    let content = [&[9; 10][..], &forged, b"other!"].concat();
    let numbers = [("a", b"a".to_vec()), ("b", content), ("c", b"c".to_vec())]
        .map(|(id, body)| append(&mut disk, id, &body).unwrap());
    drop(disk);
    let path = folder.path().join(PAYLOADS);
    let whole = std::fs::read(&path).unwrap();
    let second = MAGIC.len() + HEADER_LEN + 1;
    let mut bytes = whole.clone();
    bytes[second] ^= 1;
    bytes[second + 5] ^= 1;
    // The last write was interrupted by a crash.
    let next = numbers[2] + 1;
    bytes.extend_from_slice(&FrameHeader::new(next, b"lost").unwrap().to_bytes());
    bytes.extend_from_slice(b"lo");
    std::fs::write(&path, &bytes).unwrap();
    let (mut disk, found) = open(folder.path()).unwrap();
    assert_eq!(found.requests.len(), 3);
    assert_eq!(disk.reader().payload(numbers[0]).unwrap(), "a");
    assert_eq!(disk.reader().payload(numbers[2]).unwrap(), "c");
    let error = disk.reader().payload(numbers[1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    assert!(error.to_string().contains("damaged"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes, "the file is unchanged");
    let added = append(&mut disk, "added", b"added").unwrap();
    drop(disk);
    // The damage is skipped at every start, until a compaction removes it.
    let (mut disk, _) = open(folder.path()).unwrap();
    assert_eq!(disk.reader().payload(added).unwrap(), "added");
    compact_all(&mut disk);
    assert!(disk.payload_bytes() < bytes.len() as u64);
    assert_eq!(disk.reader().payload(numbers[2]).unwrap(), "c");
    assert_eq!(disk.reader().payload(added).unwrap(), "added");
}

/// A client can send a body that contains complete payloads of the payload file. If the header of
/// this body is damaged, they must not replace the payloads of other requests.
#[test]
fn content_of_a_damaged_payload_replaces_no_other_payload() {
    for forged in [&[3][..], &[4], &[3, 4], &[4, 3], &[5, 4, 3]] {
        let frames = forged.iter().flat_map(|number| {
            let header = FrameHeader::new(*number, b"forged").unwrap().to_bytes();
            [&header[..], b"forged"].concat()
        });
        // The forged payloads are followed by other content, or by the next payload.
        for end in [&b"content"[..], b""] {
            let content: Vec<u8> = [7; 3].into_iter().chain(frames.clone()).collect();
            let content = [&content[..], end].concat();
            let folder = tempfile::tempdir().unwrap();
            let (mut disk, _) = open(folder.path()).unwrap();
            let bodies = [b"one", &content[..], b"three", b"four", b"five"];
            for (id, body) in ["a", "b", "c", "d", "e"].into_iter().zip(bodies) {
                append(&mut disk, id, body).unwrap();
            }
            drop(disk);
            let path = folder.path().join(PAYLOADS);
            let mut bytes = std::fs::read(&path).unwrap();
            let second = MAGIC.len() + HEADER_LEN + 3;
            bytes[second] ^= 1;
            bytes[second + 5] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            let (disk, _) = open(folder.path()).unwrap();
            for (number, body) in (1..).zip(bodies) {
                let read = disk.reader().payload(number);
                if number == 2 || forged.contains(&number) {
                    let kind = read.map_err(|error| error.kind());
                    assert_eq!(kind, Err(io::ErrorKind::InvalidData), "{number} of {forged:?}");
                } else {
                    assert_eq!(read.unwrap(), body, "{number} of {forged:?}");
                }
            }
        }
    }
}

#[test]
fn a_truncated_payload_file_loses_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    let numbers = ["a", "b", "c"].map(|id| append(&mut disk, id, b"body").unwrap());
    drop(disk);
    let path = folder.path().join(PAYLOADS);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    assert_eq!(disk.reader().payload(numbers[1]).unwrap(), "body");
    assert!(disk.reader().payload(numbers[2]).unwrap_err().to_string().contains("damaged"));
    // A payload that no row needs may be missing.
    remove(&mut disk, &["c"]);
    drop(disk);
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let (disk, found) = open(folder.path()).unwrap();
    assert_eq!(ids(&found), ["a", "b"]);
    let kept = whole.len() as u64 - (HEADER_LEN as u64 + 4);
    assert_eq!(disk.payload_bytes(), kept, "the rest of an unneeded payload is removed");
    drop(disk);
    // A file without any payload belongs to another folder, or everything is lost.
    for bytes in [&[][..], &whole[..4]] {
        std::fs::write(&path, bytes).unwrap();
        let message = open_error(folder.path());
        assert!(message.contains("is empty") && message.contains("backup"), "{message}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "the file is unchanged");
    }

    // A payload with a wrong checksum fails only when it is read.
    let mut bytes = whole;
    bytes[MAGIC.len() + HEADER_LEN + 4 + HEADER_LEN] ^= 1;
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
