use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek as _, SeekFrom};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;

use super::frame::{HEADER_LEN, LONGEST, MAGIC};
use super::payloads::{BUFFER, PayloadIndex, AppendFile};
use super::*;
use crate::record::{ResultKind, ResultRecord, RequestKind, SequenceScope, RequestRecord};

/// A request whose id is `id` and whose body has number `number`.
fn request(id: &str, number: u64) -> Arc<RequestRecord> {
    Arc::new(RequestRecord {
        number,
        id: id.into(),
        kind: RequestKind::Sample,
        session: "s".into(),
        line: SequenceScope::Sampler("s:sample:0".into()),
        seq: u64::MAX - 1,
        digest: "d".to_owned(),
        seed: u64::MAX,
        samples: 1,
        at: 1,
    })
}

/// Has a request written, and waits for it.
fn append(disk: &mut Disk, id: &str, body: &[u8]) -> io::Result<u64> {
    let (sent, received) = mpsc::channel();
    let number = disk.number();
    let payload = Some((number, Bytes::copy_from_slice(body)));
    let then = Box::new(move |result| drop(sent.send(result)));
    disk.append(vec![Record::Request(request(id, number))], payload, then);
    received.recv().unwrap().map(|()| number)
}

fn forget(disk: &mut Disk, ids: &[&str]) {
    let (sent, received) = mpsc::channel();
    let ids = ids.iter().map(|id| (*id).into()).collect();
    let then = Box::new(move |result| drop(sent.send(result)));
    disk.append(vec![Record::RequestsRemoved { ids }], None, then);
    received.recv().unwrap().unwrap();
}

fn tidy(disk: &mut Disk) -> io::Result<()> {
    let (sent, received) = mpsc::channel();
    disk.tidy(0, Box::new(move |result| drop(sent.send(result))));
    received.recv().unwrap()
}

fn ids(found: &Found) -> Vec<String> {
    found.requests.iter().map(|(row, _)| row.id.to_string()).collect()
}

/// UsageMeter is found in a folder.
fn found(folder: &Path) -> Vec<String> {
    ids(&Disk::open(folder).unwrap().1)
}

fn refused(folder: &Path) -> String {
    match Disk::open(folder) {
        Ok(_) => panic!("opened"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_was_written_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, found) = Disk::open(folder.path()).unwrap();
    assert!(found.requests.is_empty());
    append(&mut disk, "a", b"").unwrap();
    let big = vec![7; 2 * BUFFER];
    let number = append(&mut disk, "b", &big).unwrap();
    assert_eq!(disk.reader().payload(number).unwrap(), big);
    assert_eq!(disk.commits(), 2);
    drop(disk);

    let (mut disk, found) = Disk::open(folder.path()).unwrap();
    assert_eq!(ids(&found), ["a", "b"]);
    let row = &found.requests[1].0;
    assert_eq!((row.number, row.seq, row.seed), (number, u64::MAX - 1, u64::MAX));
    assert_eq!(disk.reader().payload(number).unwrap(), big);
    assert!(append(&mut disk, "c", b"").unwrap() > number);
}

#[test]
fn numbers_grow_also_when_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = Disk::open(folder.path()).unwrap();
    let number = append(&mut disk, "a", b"body").unwrap();
    forget(&mut disk, &["a"]);
    tidy(&mut disk).unwrap();
    assert_eq!(disk.payload_bytes(), MAGIC.len() as u64);
    drop(disk);
    let (mut disk, found) = Disk::open(folder.path()).unwrap();
    assert!(found.requests.is_empty());
    assert!(disk.number() > number);
}

/// A folder in which a crash came between the payloads and the rows.
#[test]
fn a_payload_that_no_row_refers_to_does_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = Disk::open(folder.path()).unwrap();
    append(&mut disk, "a", b"body").unwrap();
    let (length, next) = (disk.payload_bytes(), disk.number());
    drop(disk);
    let path = folder.path().join(PAYLOADS);
    let whole = std::fs::read(&path).unwrap();
    let mut more = whole.clone();
    more.extend_from_slice(&frame::Head::of(next, b"lost").unwrap().to_bytes());
    more.extend_from_slice(b"lost");
    for cut in whole.len()..=more.len() {
        std::fs::write(&path, &more[..cut]).unwrap();
        let (mut disk, found) = Disk::open(folder.path()).unwrap();
        assert_eq!(ids(&found), ["a"]);
        assert_eq!(disk.payload_bytes(), length);
        assert_eq!(disk.number(), next);
        drop(disk);
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }
}

#[test]
fn a_payload_that_is_needed_and_gone_is_told_and_nothing_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = Disk::open(folder.path()).unwrap();
    let numbers = ["a", "b", "c"].map(|id| append(&mut disk, id, b"body").unwrap());
    drop(disk);
    let path = folder.path().join(PAYLOADS);
    let whole = std::fs::read(&path).unwrap();
    let mut broken = vec![Vec::new(), whole[..4].to_vec(), whole[..whole.len() - 1].to_vec()];
    // Each byte of the second one's head.
    let second = MAGIC.len() + HEADER_LEN + 4;
    broken.extend((second..second + HEADER_LEN).map(|at| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x15;
        bytes
    }));
    for bytes in broken {
        std::fs::write(&path, &bytes).unwrap();
        let message = refused(folder.path());
        assert!(message.contains("damaged") && message.contains("backup"), "{message}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "it stays as it was");
    }
    // UsageMeter nobody needs may be gone.
    std::fs::write(&path, &whole).unwrap();
    let (mut disk, _) = Disk::open(folder.path()).unwrap();
    forget(&mut disk, &["c"]);
    drop(disk);
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let (disk, found) = Disk::open(folder.path()).unwrap();
    assert_eq!(ids(&found), ["a", "b"]);
    drop(disk);

    // A payload that is there and is another one fails whoever needs it.
    let mut bytes = whole;
    bytes[second + HEADER_LEN] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let (disk, _) = Disk::open(folder.path()).unwrap();
    let message = disk.reader().payload(numbers[1]).unwrap_err();
    assert_eq!(message.kind(), io::ErrorKind::InvalidData, "{message}");
    assert_eq!(disk.reader().payload(numbers[0]).unwrap(), "body");
}

#[test]
fn nothing_is_begun_where_something_was() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(JOURNAL), "TNKXLOG1").unwrap();
    let message = refused(folder.path());
    assert!(message.contains("earlier form") && message.contains("another data folder"), "{message}");
    assert!(!folder.path().join(DATABASE).exists());

    let folder = tempfile::tempdir().unwrap();
    append(&mut Disk::open(folder.path()).unwrap().0, "a", b"body").unwrap();
    let payloads = std::fs::read(folder.path().join(PAYLOADS)).unwrap();
    // Gone, or emptied.
    let path = folder.path().join(DATABASE);
    for lose in [|path: &Path| std::fs::remove_file(path), |path: &Path| std::fs::write(path, "")] {
        lose(&path).unwrap();
        let message = refused(folder.path());
        assert!(message.contains("the database that belongs to it is gone"), "{message}");
        assert_eq!(std::fs::read(folder.path().join(PAYLOADS)).unwrap(), payloads);
    }

    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(PAYLOADS), "somebody else's").unwrap();
    assert!(refused(folder.path()).contains("payloads"));

    // Weights alone: a server that knows none of them would remove them.
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join(WEIGHTS);
    std::fs::create_dir_all(weights.join("c1")).unwrap();
    assert!(refused(folder.path()).contains("the database that knows them is gone"));
    assert!(!folder.path().join(DATABASE).exists());
    std::fs::remove_dir(weights.join("c1")).unwrap();
    drop(Disk::open(folder.path()).unwrap());
}

#[cfg(unix)]
#[test]
fn only_their_owner_reads_the_files() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = Disk::open(folder.path()).unwrap();
    append(&mut disk, "a", b"a prompt").unwrap();
    forget(&mut disk, &["a"]);
    tidy(&mut disk).unwrap();
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{:?}: {mode:o}", entry.file_name());
    }
}

#[test]
fn databases_of_others_and_of_later_versions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(DATABASE);
    drop(Disk::open(folder.path()).unwrap());
    let change = |sql: &str| rusqlite::Connection::open(&path).unwrap().execute_batch(sql).unwrap();
    change("PRAGMA user_version = 2");
    let message = refused(folder.path());
    assert!(message.contains("schema 2, this one knows 1"), "{message}");
    change("PRAGMA user_version = 1; PRAGMA application_id = 0");
    assert!(refused(folder.path()).contains("is not a database of this server"));
    std::fs::write(&path, "somebody else's file").unwrap();
    assert!(refused(folder.path()).contains("not a database"));
}

#[test]
fn only_needed_payloads_are_kept_and_numbers_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = Disk::open(folder.path()).unwrap();
    let numbers: Vec<u64> =
        ["a", "b", "c"].map(|id| append(&mut disk, id, id.as_bytes()).unwrap()).into();
    // The answer of the second takes the place of its body.
    let answer = disk.number();
    let done = Record::Result(ResultRecord {
        request: request("b", numbers[1]),
        number: answer,
        size: 6,
        answer: ResultKind::Json,
        changed: false,
        at: 2,
        used: vec![],
    });
    disk.owe(vec![done], Some((answer, Bytes::from_static(b"answer"))), Box::new(|_| {}));
    forget(&mut disk, &["a", "c"]);
    let before = disk.payload_bytes();
    tidy(&mut disk).unwrap();
    let last = append(&mut disk, "d", b"d").unwrap();
    assert!(disk.payload_bytes() < before);
    assert_eq!(disk.reader().payload(answer).unwrap(), "answer");
    for number in numbers {
        let gone = disk.reader().payload(number).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }
    drop(disk);
    let (disk, found) = Disk::open(folder.path()).unwrap();
    assert_eq!(ids(&found), ["b", "d"]);
    assert_eq!(found.requests[0].1.as_ref().unwrap().number, answer);
    assert_eq!(disk.reader().payload(last).unwrap(), "d");
}

/// A file that fails at some of its operations, each time after part of the work.
struct Faulty {
    file: File,
    operation: usize,
    fails: Box<dyn Fn(usize) -> bool + Send>,
}

impl Faulty {
    fn next(&mut self) -> bool {
        self.operation += 1;
        (self.fails)(self.operation - 1)
    }
}

impl AppendFile for Faulty {
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

    fn cut(&mut self, length: u64) -> io::Result<()> {
        if self.next() { Err(io::ErrorKind::Other.into()) } else { self.file.cut(length) }
    }
}

/// A disk whose file of payloads fails, and what says how many pages the database may have.
fn faulty(folder: &Path, fails: impl Fn(usize) -> bool + Send + 'static) -> (Disk, Arc<AtomicU32>) {
    std::fs::create_dir_all(folder).unwrap();
    drop(Disk::open(folder).unwrap());
    let path = folder.join(PAYLOADS);
    let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let length = file.seek(SeekFrom::End(0)).unwrap();
    let database = Database::open(&folder.join(DATABASE)).unwrap();
    let room = Arc::clone(&database.room);
    let medium = Faulty { file, operation: 0, fails: Box::new(fails) };
    let payloads = Payloads::on(Box::new(medium), PayloadIndex { path, places: BTreeMap::new(), length });
    (Disk::start(database, payloads, 1).unwrap(), room)
}

#[test]
fn a_full_disk_is_told_and_leaves_no_gap() {
    let folder = tempfile::tempdir().unwrap();
    // ActiveSample operation fails, or two in a row, or three: also the cutting, also the flush.
    for (at, count) in (0..8).flat_map(|at| (1..4).map(move |count| (at, count))) {
        let folder = folder.path().join(format!("{at}-{count}"));
        let (mut disk, _) = faulty(&folder, move |n| (at..at + count).contains(&n));
        let mut entry = Vec::new();
        for id in ["a", "b", "c", "d", "e"] {
            match append(&mut disk, id, b"body") {
                Ok(number) => {
                    assert_eq!(disk.reader().payload(number).unwrap(), "body");
                    entry.push(id.to_owned());
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        assert!(entry.len() >= 2, "{at} {count}: {entry:?}");
        drop(disk);
        assert_eq!(found(&folder), entry, "{at} {count}");
    }
}

#[test]
fn a_database_that_is_full_is_told_and_its_payloads_are_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, room) = faulty(folder.path(), |_| false);
    append(&mut disk, "a", b"body").unwrap();
    let length = disk.payload_bytes();
    // No more pages than there are.
    room.store(1, Ordering::Relaxed);
    let mut entry = vec!["a".to_owned()];
    let mut told = None;
    for n in 0..1_000 {
        let id = format!("r{n}");
        match append(&mut disk, &id, b"body") {
            Ok(_) => entry.push(id),
            Err(error) => {
                told = Some(reason);
                break;
            }
        }
    }
    let told = told.unwrap();
    assert_eq!(told.kind(), io::ErrorKind::StorageFull, "{told}");
    let rows = (entry.len() - 1) as u64;
    let path = folder.path().join(PAYLOADS);
    assert_eq!(disk.payload_bytes(), length + rows * (HEADER_LEN as u64 + 4));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), disk.payload_bytes());
    // UsageMeter is owed waits, and with it what comes later.
    let (sent, received) = mpsc::channel();
    let number = disk.number();
    let owed = vec![Record::Request(request("owed", number))];
    let payload = Some((number, Bytes::from_static(b"owed")));
    disk.owe(owed, payload, Box::new(move |written| drop(sent.send(written))));
    assert!(append(&mut disk, "late", b"body").is_err());
    assert!(disk.trouble().unwrap().contains("full"));
    room.store(u32::MAX, Ordering::Relaxed);
    received.recv().unwrap().unwrap();
    assert_eq!(disk.trouble(), None);
    drop(disk);
    entry.push("owed".to_owned());
    let (disk, again) = Disk::open(folder.path()).unwrap();
    assert_eq!(ids(&again), entry);
    assert_eq!(disk.reader().payload(number).unwrap(), "owed");
}

#[test]
fn what_is_owed_is_written_in_its_place_however_often_the_disk_fails() {
    let folder = tempfile::tempdir().unwrap();
    for failing in 0..12 {
        let folder = folder.path().join(failing.to_string());
        let (mut disk, _) = faulty(&folder, move |n| n < failing);
        let (sent, received) = mpsc::channel();
        let mut expected = Vec::new();
        for (i, id) in ["a", "b", "c", "d"].into_iter().enumerate() {
            if i % 2 == 0 {
                let (sent, number) = (sent.clone(), disk.number());
                let records = vec![Record::Request(request(id, number))];
                let payload = Some((number, Bytes::from_static(b"body")));
                disk.owe(records, payload, Box::new(move |written| drop(sent.send(written))));
                expected.push(id);
            } else if append(&mut disk, id, b"body").is_ok() {
                expected.push(id);
            }
        }
        received.recv().unwrap().unwrap();
        received.recv().unwrap().unwrap();
        assert_eq!(disk.trouble(), None);
        drop(disk);
        assert_eq!(found(&folder), expected, "{failing}");
    }
}

#[test]
fn nothing_is_dropped_while_something_is_owed() {
    let folder = tempfile::tempdir().unwrap();
    let failing = Arc::new(AtomicBool::new(false));
    let fails = Arc::clone(&failing);
    let (mut disk, _) = faulty(folder.path(), move |_| fails.load(Ordering::Relaxed));
    let first = append(&mut disk, "old", &[7; 100]).unwrap();
    forget(&mut disk, &["old"]);
    failing.store(true, Ordering::Relaxed);
    let (sent, received) = mpsc::channel();
    let tell = |what: &'static str| -> WriteCallback {
        let sent = sent.clone();
        Box::new(move |written| sent.send((what, written.is_ok())).unwrap())
    };
    let new = disk.number();
    disk.owe(vec![Record::Request(request("new", new))], Some((new, Bytes::new())), tell("owed"));
    disk.outcome(tell("outcome"));
    disk.tidy(0, tell("tidied"));
    assert_eq!(received.recv().unwrap(), ("outcome", false));
    assert_eq!(received.recv().unwrap(), ("tidied", false));
    assert!(disk.trouble().is_some());
    assert!(disk.reader().payload(first).is_ok());
    failing.store(false, Ordering::Relaxed);
    assert_eq!(received.recv().unwrap(), ("owed", true));
    disk.tidy(0, tell("tidied"));
    assert_eq!(received.recv().unwrap(), ("tidied", true));
    assert!(disk.reader().payload(first).is_err());
    drop(disk);
    assert_eq!(found(folder.path()), ["new"]);
}

#[test]
fn a_closed_disk_does_not_call_back_on_the_callers_stack() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = Disk::open(folder.path()).unwrap();
    disk.close().unwrap().join().unwrap();
    let (sent, received) = mpsc::channel();
    let own = std::thread::current().id();
    let tell = |sent: mpsc::Sender<bool>| -> WriteCallback {
        Box::new(move |written| {
            sent.send(written.is_err() && std::thread::current().id() != own).unwrap();
        })
    };
    disk.owe(vec![], None, tell(sent.clone()));
    disk.outcome(tell(sent));
    assert_eq!(received.iter().collect::<Vec<_>>(), [true, true]);
}

#[test]
fn what_is_too_long_is_told_and_holds_nothing_up() {
    let folder = tempfile::tempdir().unwrap();
    let (mut disk, _) = Disk::open(folder.path()).unwrap();
    let (sent, received) = mpsc::channel();
    let number = disk.number();
    let long = Some((number, Bytes::from(vec![0; LONGEST + 1])));
    let records = vec![Record::Request(request("long", number))];
    disk.owe(records, long, Box::new(move |written| sent.send(written).unwrap()));
    let error = received.recv().unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    append(&mut disk, "next", b"body").unwrap();
    assert_eq!(disk.trouble(), None);
}

/// The files of a database as a crash leaves them.
fn crashed(from: &Path) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join(DATABASE);
    std::fs::copy(from, &to).unwrap();
    std::fs::copy(from.with_extension("sqlite-wal"), to.with_extension("sqlite-wal")).unwrap();
    (folder, to)
}

/// A flush of the WAL that fails leaves a whole commit in it, which its writer thinks undone.
#[test]
fn a_commit_that_was_refused_is_not_found_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(DATABASE);
    let mut writer = Database::open(&path).unwrap();
    writer.begin().unwrap();
    let commit = |database: &mut Database, id: &str, number: u64| {
        let record = Record::Request(request(id, number));
        database.write([&record].into_iter(), Some(number + 1)).unwrap();
    };
    commit(&mut writer, "a", 1);
    let (_own, before) = crashed(&path);
    commit(&mut writer, "b", 2);
    let (wal, longer) = (before.with_extension("sqlite-wal"), path.with_extension("sqlite-wal"));
    let length = usize::try_from(std::fs::metadata(&wal).unwrap().len()).unwrap();
    let refused = std::fs::read(longer).unwrap().split_off(length);

    let mut database = Database::open(&before).unwrap();
    assert_eq!(ids(&database.read().unwrap()), ["a"]);
    OpenOptions::new().append(true).open(&wal).unwrap().append(&refused).unwrap();
    let after = |database: &Database| ids(&database.read().unwrap());
    assert_eq!(after(&Database::open(&crashed(&before).1).unwrap()), ["a", "b"], "the danger");
    assert_eq!(after(&database), ["a"]);
    database.doubtful = true;
    database.mend().unwrap();
    assert!(!database.is_doubtful());
    assert_eq!(after(&Database::open(&crashed(&before).1).unwrap()), ["a"]);
    commit(&mut database, "c", 2);
    assert_eq!(after(&Database::open(&crashed(&before).1).unwrap()), ["a", "c"]);
}
