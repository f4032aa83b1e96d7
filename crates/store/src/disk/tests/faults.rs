//! Failing files and commits, crashes of the process, and power losses.

use std::fs::{File, OpenOptions};
use std::io::{Seek as _, SeekFrom};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;
use crate::history::{HistoryRecord, LoggedWeights, SampleHistory, SampleSource};
use crate::user::UserId;

/// A file whose operations fail on request, each after part of its work.
struct FaultyFile {
    file: File,
    operation: usize,
    fails: Box<dyn Fn(usize) -> bool + Send>,
}

impl FaultyFile {
    /// Counts an operation and returns whether it must fail.
    fn next(&mut self) -> bool {
        self.operation += 1;
        (self.fails)(self.operation - 1)
    }
}

impl AppendFile for FaultyFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.next() {
            self.file.append(&bytes[..bytes.len() / 2])?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.append(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.next() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        if self.next() { Err(io::ErrorKind::Other.into()) } else { self.file.truncate(length) }
    }
}

/// A file on a disk without space while `full` is true: appending fails, truncating does not.
struct FullFile {
    file: File,
    full: Arc<AtomicBool>,
}

impl AppendFile for FullFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.append(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.file.truncate(length)
    }
}

/// Opens a disk whose payload file fails at the operations for which `fails` returns true. Also
/// returns the limit on database pages.
fn open_faulty(
    folder: &Path,
    fails: impl Fn(usize) -> bool + Send + 'static,
) -> (Disk, Arc<AtomicU32>) {
    open_with(folder, |file| Box::new(FaultyFile { file, operation: 0, fails: Box::new(fails) }))
}

/// Opens a disk whose payload file `wrap` returns. Also returns the limit on database pages.
fn open_with(
    folder: &Path,
    wrap: impl FnOnce(File) -> Box<dyn AppendFile>,
) -> (Disk, Arc<AtomicU32>) {
    std::fs::create_dir_all(folder).unwrap();
    drop(open(folder).unwrap());
    let path = folder.join(PAYLOADS);
    let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let length = file.seek(SeekFrom::End(0)).unwrap();
    let database = Database::open(&folder.join(DATABASE)).unwrap();
    let max_pages = Arc::clone(&database.max_pages);
    let payloads = Payloads::new(wrap(file), PayloadIndex::new(path, length));
    let reserve = Reserve::new(folder);
    (Disk::start(database, payloads, reserve, 1, &Executor::threads()).unwrap(), max_pages)
}

#[test]
fn a_failed_write_is_reported_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    // Fail one to three consecutive operations, including flushes and truncations.
    for (at, count) in (0..8).flat_map(|at| (1..4).map(move |count| (at, count))) {
        let folder = folder.path().join(format!("{at}-{count}"));
        let (mut disk, _) = open_faulty(&folder, move |n| (at..at + count).contains(&n));
        let mut written = Vec::new();
        for id in ["a", "b", "c", "d", "e"] {
            match append(&mut disk, id, b"body") {
                Ok(number) => {
                    assert_eq!(disk.reader().payload(number).unwrap(), "body");
                    written.push(id.to_owned());
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        assert!(written.len() >= 2, "{at} {count}: {written:?}");
        drop(disk);
        assert_eq!(stored_ids(&folder), written, "{at} {count}");
    }
}

#[test]
fn a_full_database_is_reported_and_its_payloads_are_truncated() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, max_pages) = open_faulty(folder.path(), |_| false);
    append(&mut disk, "a", b"body").unwrap();
    let length = disk.payload_bytes();
    // Allow no new pages.
    max_pages.store(1, Ordering::Relaxed);
    let mut written = vec!["a".to_owned()];
    let mut failure = None;
    for n in 0..1_000 {
        let id = format!("r{n}");
        match append(&mut disk, &id, b"body") {
            Ok(_) => written.push(id),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    let failure = failure.unwrap();
    assert_eq!(failure.kind(), io::ErrorKind::StorageFull, "{failure}");
    let rows = (written.len() - 1) as u64;
    let path = folder.path().join(PAYLOADS);
    assert_eq!(disk.payload_bytes(), length + rows * (HEADER_LEN as u64 + 4));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), disk.payload_bytes());
    // A required write stays outstanding, and later writes are rejected.
    let (sender, receiver) = mpsc::channel();
    let number = disk.next_payload_number();
    let records = vec![Record::Request(request("required", number))];
    let payload = Some((number, Bytes::from_static(b"required")));
    disk.append_required(records, payload, Box::new(move |written| drop(sender.send(written))));
    assert!(append(&mut disk, "late", b"body").is_err());
    assert!(disk.write_error().unwrap().contains("full"));
    max_pages.store(u32::MAX, Ordering::Relaxed);
    receiver.recv().unwrap().unwrap();
    assert_eq!(disk.write_error(), None);
    drop(disk);
    written.push("required".to_owned());
    let (disk, again) = open(folder.path()).unwrap();
    assert_eq!(ids(&again), written);
    assert_eq!(disk.reader().payload(number).unwrap(), "required");
}

#[test]
fn required_writes_succeed_in_order_after_any_number_of_failures() {
    let folder = tempfile::tempdir().unwrap();
    for failing in 0..12 {
        let folder = folder.path().join(failing.to_string());
        let (mut disk, _) = open_faulty(&folder, move |n| n < failing);
        let (sender, receiver) = mpsc::channel();
        let mut expected = Vec::new();
        for (i, id) in ["a", "b", "c", "d"].into_iter().enumerate() {
            if i % 2 == 0 {
                let sender = sender.clone();
                let number = disk.next_payload_number();
                let records = vec![Record::Request(request(id, number))];
                let payload = Some((number, Bytes::from_static(b"body")));
                disk.append_required(
                    records,
                    payload,
                    Box::new(move |written| drop(sender.send(written))),
                );
                expected.push(id);
            } else if append(&mut disk, id, b"body").is_ok() {
                expected.push(id);
            }
        }
        receiver.recv().unwrap().unwrap();
        receiver.recv().unwrap().unwrap();
        assert_eq!(disk.write_error(), None);
        drop(disk);
        assert_eq!(stored_ids(&folder), expected, "{failing}");
    }
}

#[test]
fn compaction_waits_for_outstanding_writes() {
    let folder = tempfile::tempdir().unwrap();
    let failing = Arc::new(AtomicBool::new(false));
    let fails = Arc::clone(&failing);
    let (mut disk, _) = open_faulty(folder.path(), move |_| fails.load(Ordering::Relaxed));
    let first = append(&mut disk, "old", &[7; 100]).unwrap();
    remove(&mut disk, &["old"]);
    failing.store(true, Ordering::Relaxed);
    let (sender, receiver) = mpsc::channel();
    let report = |what: &'static str| -> WriteCallback {
        let sender = sender.clone();
        Box::new(move |written| sender.send((what, written.is_ok())).unwrap())
    };
    let new = disk.next_payload_number();
    disk.append_required(
        vec![Record::Request(request("new", new))],
        Some((new, Bytes::new())),
        report("written"),
    );
    disk.barrier(report("barrier"));
    disk.compact(0, report("compacted"));
    assert_eq!(receiver.recv().unwrap(), ("barrier", false));
    assert_eq!(receiver.recv().unwrap(), ("compacted", false));
    assert!(disk.write_error().is_some());
    assert!(disk.reader().payload(first).is_ok());
    failing.store(false, Ordering::Relaxed);
    assert_eq!(receiver.recv().unwrap(), ("written", true));
    disk.compact(0, report("compacted"));
    assert_eq!(receiver.recv().unwrap(), ("compacted", true));
    assert!(disk.reader().payload(first).is_err());
    drop(disk);
    assert_eq!(stored_ids(folder.path()), ["new"]);
}

#[test]
fn a_closed_disk_runs_callbacks_on_another_thread() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    disk.close().unwrap().block();
    let (sender, receiver) = mpsc::channel();
    let own = std::thread::current().id();
    let report = |sender: mpsc::Sender<bool>| -> WriteCallback {
        Box::new(move |written| {
            sender.send(written.is_err() && std::thread::current().id() != own).unwrap();
        })
    };
    disk.append_required(vec![], None, report(sender.clone()));
    disk.barrier(report(sender));
    assert_eq!(receiver.iter().collect::<Vec<_>>(), [true, true]);
}

#[test]
fn an_oversized_payload_is_rejected_and_blocks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    let (sender, receiver) = mpsc::channel();
    let number = disk.next_payload_number();
    let long = Some((number, Bytes::from(vec![0; MAX_PAYLOAD + 1])));
    let records = vec![Record::Request(request("long", number))];
    disk.append_required(records, long, Box::new(move |written| sender.send(written).unwrap()));
    let error = receiver.recv().unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    append(&mut disk, "next", b"body").unwrap();
    assert_eq!(disk.write_error(), None);
}

/// Copies a database and its WAL as a crash would leave them.
pub fn crashed(from: &Path) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join(DATABASE);
    std::fs::copy(from, &to).unwrap();
    std::fs::copy(from.with_extension("sqlite-wal"), to.with_extension("sqlite-wal")).unwrap();
    (folder, to)
}

/// A failed flush leaves a complete commit in the WAL that the writer has reported as failed.
#[test]
fn a_failed_commit_is_not_applied_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(DATABASE);
    let mut writer = Database::open(&path).unwrap();
    writer.create_tables().unwrap();
    let commit = |database: &mut Database, id: &str, number: u64| {
        let record = Record::Request(request(id, number));
        database.write(|| Ok(()), [&record].into_iter(), Some(number + 1)).unwrap();
    };
    commit(&mut writer, "a", 1);
    let (_own, before) = crashed(&path);
    commit(&mut writer, "b", 2);
    let longer = path.with_extension("sqlite-wal");
    let wal = before.with_extension("sqlite-wal");
    let length = usize::try_from(std::fs::metadata(&wal).unwrap().len()).unwrap();
    let failed_commit = std::fs::read(longer).unwrap().split_off(length);

    let mut database = Database::open(&before).unwrap();
    assert_eq!(ids(&database.read().unwrap()), ["a"]);
    OpenOptions::new().append(true).open(&wal).unwrap().append(&failed_commit).unwrap();
    let after = |database: &Database| ids(&database.read().unwrap());
    assert_eq!(
        after(&Database::open(&crashed(&before).1).unwrap()),
        ["a", "b"],
        "without the repair the commit reappears"
    );
    assert_eq!(after(&database), ["a"]);
    database.needs_repair = true;
    database.repair().unwrap();
    assert!(!database.needs_repair());
    assert_eq!(after(&Database::open(&crashed(&before).1).unwrap()), ["a"]);
    commit(&mut database, "c", 2);
    assert_eq!(after(&Database::open(&crashed(&before).1).unwrap()), ["a", "c"]);
}

#[test]
fn a_panic_of_the_writer_thread_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(folder.path()).unwrap();
    let health = disk.server_health();
    assert_eq!(*health.borrow(), ServerHealth::Working);
    disk.barrier(Box::new(|_| panic!("a bug in a callback")));
    disk.close().unwrap().block();
    assert_eq!(*health.borrow(), ServerHealth::Panicked);
    assert!(append(&mut disk, "a", b"").is_err());
}

/// Opens a disk whose commits fail while the returned flag is true.
pub fn open_with_failing_commits(folder: &Path) -> (Disk, Arc<AtomicBool>) {
    let mut database = Database::open(&folder.join(DATABASE)).unwrap();
    if database.is_new() {
        database.create_tables().unwrap();
    }
    let next = database.next_payload_number().unwrap();
    let needed = database.needed_payloads().unwrap();
    let payloads = Payloads::open(&folder.join(PAYLOADS), next, &needed).unwrap();
    let failing = Arc::clone(&database.failing_commits);
    let reserve = Reserve::new(folder);
    (Disk::start(database, payloads, reserve, next, &Executor::threads()).unwrap(), failing)
}

/// Waits until the writer has attempted everything that was queued before. Returns whether all of
/// it is durable or rejected.
pub fn wait_for_writer(disk: &mut Disk) -> bool {
    let (sender, receiver) = mpsc::channel();
    disk.barrier(Box::new(move |result| drop(sender.send(result))));
    receiver.recv().unwrap().is_ok()
}

/// The rows of a commit whose flush failed twice may be on disk or not. A client that has received
/// an error could find the rows after a power loss.
#[test]
fn a_write_is_rejected_only_when_no_power_loss_can_restore_it() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, failing) = open_with_failing_commits(folder.path());
    failing.store(true, Ordering::Relaxed);
    let (sender, receiver) = mpsc::channel();
    let number = disk.next_payload_number();
    let payload = Some((number, Bytes::from_static(b"body")));
    let on_written = Box::new(move |result| drop(sender.send(result)));
    disk.append(vec![Record::Request(request("a", number))], payload, on_written);
    assert!(!wait_for_writer(&mut disk), "the outcome is not known yet");
    assert!(receiver.try_recv().is_err());
    assert!(append(&mut disk, "b", b"").is_err(), "nothing is written before the repair");
    assert!(receiver.try_recv().is_err());
    failing.store(false, Ordering::Relaxed);
    assert!(receiver.recv().unwrap().is_err());
    append(&mut disk, "c", b"").unwrap();
    drop(disk);
    assert_eq!(stored_ids(folder.path()), ["c"]);
}

/// Results that are shown after a start must survive a power loss.
#[test]
fn commits_are_shown_only_when_they_are_durable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(DATABASE);
    let mut writer = Database::open(&path).unwrap();
    writer.create_tables().unwrap();
    let record = Record::Request(request("a", 1));
    writer.write(|| Ok(()), [&record].into_iter(), Some(2)).unwrap();
    let (_own, copy) = crashed(&path);
    let opened = Database::open(&copy).unwrap();
    assert_eq!(ids(&opened.read().unwrap()), ["a"]);
    // The database file is complete without the WAL, and it was flushed.
    let other = tempfile::tempdir().unwrap();
    let alone = other.path().join(DATABASE);
    std::fs::copy(&copy, &alone).unwrap();
    assert_eq!(ids(&Database::open(&alone).unwrap().read().unwrap()), ["a"]);

    // Another program that reads an old state does not prevent the start.
    let reader = rusqlite::Connection::open(&path).unwrap();
    reader.execute_batch("BEGIN; SELECT count(*) FROM requests").unwrap();
    let record = Record::Request(request("b", 2));
    writer.write(|| Ok(()), [&record].into_iter(), Some(3)).unwrap();
    assert_eq!(ids(&Database::open(&path).unwrap().read().unwrap()), ["a", "b"]);
}

#[test]
fn payloads_are_written_and_read_while_the_file_is_compacted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(PAYLOADS);
    let mut payloads = Payloads::open(&path, 1, &HashSet::new()).unwrap();
    let write = |payloads: &mut Payloads, number: u64, length: usize| {
        let payload = (number, Bytes::from(vec![u8::try_from(number).unwrap(); length]));
        let appended = payloads.append([&payload].into_iter()).unwrap();
        payloads.commit(appended);
    };
    let big = 9 << 20;
    for number in 1..=4 {
        write(&mut payloads, number, big);
    }
    let reader = payloads.reader();
    let mut compaction = payloads.start_compaction([1, 3, 4].into()).unwrap();
    let mut number = 5;
    while !payloads.copy_part(&mut compaction).unwrap() {
        write(&mut payloads, number, 10);
        assert_eq!(reader.payload(number).unwrap().len(), 10);
        number += 1;
    }
    assert!(number > 6, "one part per large payload");
    payloads.switch_to(compaction).unwrap();
    write(&mut payloads, number, 10);
    assert_eq!(reader.payload(2).unwrap_err().kind(), io::ErrorKind::NotFound);
    let needed: HashSet<u64> = (1..=number).filter(|number| *number != 2).collect();
    for payloads in [payloads, Payloads::open(&path, number + 1, &needed).unwrap()] {
        for number in &needed {
            let expected = vec![u8::try_from(*number).unwrap(); if *number < 5 { big } else { 10 }];
            assert_eq!(payloads.reader().payload(*number).unwrap(), expected);
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), payloads.len());
    }
}

/// If the name is not durable, a power failure restores the old file without the payloads that were
/// appended to the new file, and the server cannot start. Found by simulation.
#[test]
fn payloads_are_appended_to_a_compacted_file_only_when_its_name_is_durable() {
    let folder = tempfile::tempdir().unwrap();
    let needed = std::collections::HashSet::new();
    let path = folder.path().join(PAYLOADS);
    let mut payloads = Payloads::open(&path, 1, &needed).unwrap();
    let failing = std::rc::Rc::new(std::cell::Cell::new(true));
    let fails = std::rc::Rc::clone(&failing);
    let _observer = tinkex_files::observe_thread(move |operation| match operation {
        tinkex_files::FileOperation::SyncFolder(_) if fails.get() => Err(io::Error::other("EIO")),
        _ => Ok(()),
    });
    let mut compaction = payloads.start_compaction(needed).unwrap();
    while !payloads.copy_part(&mut compaction).unwrap() {}
    assert!(payloads.switch_to(compaction).is_err());
    let payload = [(1, Bytes::from_static(b"body"))];
    assert!(payloads.append(payload.iter()).is_err(), "the name is not durable");
    failing.set(false);
    assert!(payloads.append(payload.iter()).is_ok());
}

/// Returns a folder with the request "a", and two servers on it: the second has claimed the folder.
fn two_servers() -> (tempfile::TempDir, Disk, Disk) {
    let folder = tempfile::tempdir().unwrap();
    let (mut first, _) = open(folder.path()).unwrap();
    append(&mut first, "a", b"body").unwrap();
    let (second, _) = open(folder.path()).unwrap();
    (folder, first, second)
}

#[test]
fn a_server_stops_when_another_server_has_claimed_the_folder() {
    let (folder, mut first, mut second) = two_servers();
    let number = append(&mut second, "b", b"of the second").unwrap();
    let path = folder.path().join(PAYLOADS);
    let bytes = std::fs::read(&path).unwrap();
    let error = append(&mut first, "c", b"of the first").unwrap_err();
    assert!(error.to_string().contains("another server"), "{error}");
    assert_eq!(*first.server_health().borrow(), ServerHealth::Superseded);
    assert_eq!(std::fs::read(&path).unwrap(), bytes, "the first server has appended nothing");
    // Required writes fail too: they would be retried forever.
    let (sender, receiver) = mpsc::channel();
    let required = first.next_payload_number();
    let records = vec![Record::Request(request("required", required))];
    let payload = Some((required, Bytes::from_static(b"required")));
    first.append_required(records, payload, Box::new(move |written| drop(sender.send(written))));
    assert!(receiver.recv().unwrap().is_err());
    assert!(!wait_for_writer(&mut first));
    drop(first);
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    append(&mut second, "d", b"").unwrap();
    assert_eq!(second.reader().payload(number).unwrap(), "of the second");
    drop(second);
    assert_eq!(stored_ids(folder.path()), ["a", "b", "d"]);
}

#[test]
fn a_superseded_server_neither_truncates_nor_replaces_the_payload_file() {
    let folder = tempfile::tempdir().unwrap();
    let (mut first, _) = open(folder.path()).unwrap();
    append(&mut first, "a", b"body").unwrap();
    append(&mut first, "large", &[0; 10_000]).unwrap();
    remove(&mut first, &["large"]);
    let (mut second, _) = open(folder.path()).unwrap();
    let number = append(&mut second, "b", b"of the second").unwrap();
    let path = folder.path().join(PAYLOADS);
    let bytes = std::fs::read(&path).unwrap();
    let error = compact(&mut first).unwrap_err();
    assert!(error.to_string().contains("another server"), "{error}");
    assert!(std::fs::read(&path).unwrap() == bytes, "the first server has changed the file");
    // The barrier of the expiry task notices the other server, also without a write.
    assert!(!wait_for_writer(&mut first));
    assert_eq!(*first.server_health().borrow(), ServerHealth::Superseded);
    drop(first);
    assert_eq!(second.reader().payload(number).unwrap(), "of the second");
    drop(second);
    assert_eq!(stored_ids(folder.path()), ["a", "b"]);
}

#[test]
fn a_full_disk_accepts_deletions_before_outstanding_results() {
    let folder = tempfile::tempdir().unwrap();
    let full = Arc::new(AtomicBool::new(true));
    let of_file = Arc::clone(&full);
    let (mut disk, _) = open_with(folder.path(), |file| Box::new(FullFile { file, full: of_file }));
    let (sender, results) = mpsc::channel();
    let report = |what: &'static str| -> WriteCallback {
        let sender = sender.clone();
        Box::new(move |written| sender.send((what, written.is_ok())).unwrap())
    };
    let number = disk.next_payload_number();
    let required = vec![Record::Request(request("required", number))];
    disk.append_required(required, Some((number, Bytes::from_static(b"x"))), report("required"));
    assert!(!wait_for_writer(&mut disk));
    let path = "tinker://m/weights/a".parse().unwrap();
    let deleted = Record::CheckpointDeleted { path, at: 1 };
    disk.append(vec![deleted], None, report("deleted"));
    assert_eq!(results.recv().unwrap(), ("deleted", true));
    assert!(append(&mut disk, "other", b"").is_err(), "other writes are rejected");
    // The removal of a run is written after the outstanding writes of the run.
    let run = Record::RunDeleted { id: "m".into() };
    let mut of_run = RequestRecord::clone(&request("of run", disk.next_payload_number()));
    of_run.scope = SequenceScope::Model("m".into());
    let number = of_run.number;
    let records = vec![Record::Request(Arc::new(of_run))];
    disk.append_required(records, Some((number, Bytes::from_static(b"x"))), report("required"));
    assert!(!wait_for_writer(&mut disk));
    disk.append(vec![run], None, report("run deleted"));
    assert_eq!(results.recv().unwrap(), ("run deleted", false));
    // A sample from the weights of a run logs its prompt, which the deletion must remove.
    disk.append_required(vec![sample_of("other-weights-a")], None, report("required"));
    assert!(!wait_for_writer(&mut disk));
    let run = Record::RunDeleted { id: "other".into() };
    disk.append(vec![run], None, report("run deleted"));
    assert_eq!(results.recv().unwrap(), ("run deleted", false));
    let run = Record::RunDeleted { id: "third".into() };
    disk.append(vec![run], None, report("run deleted"));
    assert_eq!(results.recv().unwrap(), ("run deleted", true));
    full.store(false, Ordering::Relaxed);
    for _ in 0..3 {
        assert_eq!(results.recv().unwrap(), ("required", true));
    }
}

/// Returns the history of a sample from an adapter.
fn sample_of(folder: &str) -> Record {
    let weights = LoggedWeights { base_model: "m".to_owned(), folder: Some(folder.to_owned()) };
    Record::History(Arc::new(HistoryRecord::Sample(Box::new(SampleHistory {
        finished_at: 1,
        queued: 1,
        computed: 1,
        weights,
        owner: UserId::default(),
        session: "s".into(),
        source: SampleSource::Tinker,
        prompt_tokens: 1,
        prompt: Some(vec![1]),
        completions: Vec::new(),
        error: None,
    }))))
}
