use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use super::frame::{LONGEST, MAGIC, PREFIX};
use super::writer::BUFFER;
use super::*;

fn append(journal: &mut Journal, head: &str, body: &[u8]) -> io::Result<u64> {
    let (sent, received) = mpsc::channel();
    let then = Box::new(move |result| drop(sent.send(result)));
    let record = vec![(head.as_bytes().to_vec(), Bytes::copy_from_slice(body))];
    let number = journal.append(record, then);
    received.recv().unwrap().map(|()| number)
}

fn heads(found: &[Found]) -> Vec<String> {
    found.iter().map(|found| String::from_utf8(found.head.clone()).unwrap()).collect()
}

#[test]
fn what_was_appended_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let (mut journal, found) = Journal::open(&path).unwrap();
    assert!(found.is_empty());
    append(&mut journal, "a", b"").unwrap();
    let big = vec![7; 2 * BUFFER];
    let number = append(&mut journal, "b", &big).unwrap();
    assert_eq!(journal.reader().body(number).unwrap(), big);
    drop(journal);

    let (mut journal, found) = Journal::open(&path).unwrap();
    assert_eq!(heads(&found), ["a", "b"]);
    assert_eq!(journal.reader().body(found[1].number).unwrap(), big);
    assert!(append(&mut journal, "c", b"").unwrap() > number);
}

#[test]
fn a_torn_end_is_dropped_and_a_torn_middle_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let (mut journal, _) = Journal::open(&path).unwrap();
    for head in ["a", "b", "c"] {
        append(&mut journal, head, b"body").unwrap();
    }
    drop(journal);
    let bytes = std::fs::read(&path).unwrap();

    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let (mut journal, found) = Journal::open(&path).unwrap();
    assert_eq!(heads(&found), ["a", "b"]);
    append(&mut journal, "d", b"").unwrap();
    drop(journal);
    assert_eq!(heads(&Journal::open(&path).unwrap().1), ["a", "b", "d"]);

    // Its number, and each byte of its length.
    for at in [PREFIX, 0, 1, 2, 3] {
        let mut damaged = bytes.clone();
        damaged[MAGIC.len() + at] ^= 0x15;
        std::fs::write(&path, &damaged).unwrap();
        let Err(error) = Journal::open(&path) else { panic!("opened") };
        assert!(error.to_string().contains("damaged"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), damaged, "it stays as it was");
    }
}

#[test]
fn a_hole_that_a_power_cut_left_is_cut_off_and_put_aside() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let (mut journal, _) = Journal::open(&path).unwrap();
    append(&mut journal, "a", b"body").unwrap();
    let at = usize::try_from(journal.len()).unwrap();
    append(&mut journal, "b", &[7; 4_096]).unwrap();
    append(&mut journal, "c", b"body").unwrap();
    drop(journal);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at..4_096].fill(0);
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(heads(&Journal::open(&path).unwrap().1), ["a"]);
    let aside = std::fs::read(path.with_extension(format!("torn-{at}"))).unwrap();
    assert_eq!(aside, bytes[at..]);
}

#[test]
fn only_live_records_are_kept_and_numbers_stay() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let (mut journal, _) = Journal::open(&path).unwrap();
    let numbers: Vec<u64> =
        ["a", "b", "c"].map(|head| append(&mut journal, head, head.as_bytes()).unwrap()).into();
    let before = journal.len();
    let (sent, received) = mpsc::channel();
    journal.keep([numbers[1]].into(), Box::new(move |result| drop(sent.send(result))));
    let last = append(&mut journal, "d", b"d").unwrap();
    received.recv().unwrap().unwrap();
    assert!(journal.len() < before);
    assert_eq!(journal.reader().body(numbers[1]).unwrap(), "b");
    assert!(journal.reader().body(numbers[0]).is_err());
    drop(journal);
    let (journal, found) = Journal::open(&path).unwrap();
    assert_eq!(heads(&found), ["b", "d"]);
    assert_eq!(journal.reader().body(last).unwrap(), "d");
}

/// A disk that fails at some of its operations, each time after part of the work.
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

impl Disk for Faulty {
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

fn faulty(path: &Path, fails: impl Fn(usize) -> bool + Send + 'static) -> Journal {
    drop(Journal::open(path).unwrap());
    let mut file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let length = file.seek(SeekFrom::End(0)).unwrap();
    let index = Index { path: path.to_owned(), places: BTreeMap::new(), length, trouble: None };
    let disk = Faulty { file, operation: 0, fails: Box::new(fails) };
    Journal::with_disk(Box::new(disk), index, 1, path).unwrap()
}

#[test]
fn a_full_disk_is_told_and_leaves_no_gap() {
    let folder = tempfile::tempdir().unwrap();
    // One operation fails, or two in a row, or three: also the cutting, also the flush.
    for (at, count) in (0..8).flat_map(|at| (1..4).map(move |count| (at, count))) {
        let path = folder.path().join(format!("journal-{at}-{count}"));
        let mut journal = faulty(&path, move |n| (at..at + count).contains(&n));
        let mut kept = Vec::new();
        for head in ["a", "b", "c", "d", "e"] {
            match append(&mut journal, head, b"body") {
                Ok(number) => {
                    assert_eq!(journal.reader().body(number).unwrap(), "body");
                    kept.push(head.to_owned());
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        assert!(kept.len() >= 2, "{at} {count}: {kept:?}");
        drop(journal);
        let (_, found) = Journal::open(&path).unwrap();
        assert_eq!(heads(&found), kept, "{at} {count}");
    }
}

#[test]
fn what_is_owed_is_written_in_its_place_however_often_the_disk_fails() {
    let folder = tempfile::tempdir().unwrap();
    for failing in 0..12 {
        let path = folder.path().join(format!("journal-{failing}"));
        let mut journal = faulty(&path, move |n| n < failing);
        let (sent, received) = mpsc::channel();
        let mut expected = Vec::new();
        for (i, head) in ["a", "b", "c", "d"].into_iter().enumerate() {
            let record = vec![(head.as_bytes().to_vec(), Bytes::from_static(b"body"))];
            if i % 2 == 0 {
                let sent = sent.clone();
                journal.owe(record, Box::new(move |written| drop(sent.send(written))));
                expected.push(head);
            } else if append(&mut journal, head, b"body").is_ok() {
                expected.push(head);
            }
        }
        received.recv().unwrap().unwrap();
        received.recv().unwrap().unwrap();
        assert_eq!(journal.trouble(), None);
        drop(journal);
        assert_eq!(heads(&Journal::open(&path).unwrap().1), expected, "{failing}");
    }
}

#[test]
fn nothing_is_dropped_while_something_is_owed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let failing = Arc::new(AtomicBool::new(false));
    let fails = Arc::clone(&failing);
    let mut journal = faulty(&path, move |_| fails.load(Ordering::Relaxed));
    let first = append(&mut journal, "old", b"").unwrap();
    failing.store(true, Ordering::Relaxed);
    let (sent, received) = mpsc::channel();
    let tell = |what: &'static str| -> Then {
        let sent = sent.clone();
        Box::new(move |written| sent.send((what, written.is_ok())).unwrap())
    };
    let new = journal.owe(vec![(b"new".to_vec(), Bytes::new())], tell("owed"));
    journal.settled(tell("settled"));
    journal.keep([new].into(), tell("kept"));
    assert_eq!(received.recv().unwrap(), ("settled", false));
    assert_eq!(received.recv().unwrap(), ("kept", false));
    assert!(journal.trouble().is_some());
    failing.store(false, Ordering::Relaxed);
    assert_eq!(received.recv().unwrap(), ("owed", true));
    // A record that is nowhere on disk cannot stand for one that is.
    journal.keep([new, new + 7].into(), tell("kept"));
    assert_eq!(received.recv().unwrap(), ("kept", false));
    assert_eq!(journal.reader().body(first).unwrap(), "");
    journal.keep([new].into(), tell("kept"));
    assert_eq!(received.recv().unwrap(), ("kept", true));
    drop(journal);
    assert_eq!(heads(&Journal::open(&path).unwrap().1), ["new"]);
}

#[test]
fn a_closed_journal_does_not_call_back_on_the_callers_stack() {
    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(&folder.path().join("journal")).unwrap();
    journal.close().unwrap().join().unwrap();
    let (sent, received) = mpsc::channel();
    let own = std::thread::current().id();
    let tell = |sent: mpsc::Sender<bool>| -> Then {
        Box::new(move |written| {
            sent.send(written.is_err() && std::thread::current().id() != own).unwrap();
        })
    };
    journal.owe(vec![(b"late".to_vec(), Bytes::new())], tell(sent.clone()));
    journal.settled(tell(sent));
    assert_eq!(received.iter().collect::<Vec<_>>(), [true, true]);
}

#[test]
fn what_is_too_long_is_told_and_holds_nothing_up() {
    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(&folder.path().join("journal")).unwrap();
    let (sent, received) = mpsc::channel();
    let long = vec![(b"long".to_vec(), Bytes::from(vec![0; LONGEST]))];
    journal.owe(long, Box::new(move |written| sent.send(written).unwrap()));
    let error = received.recv().unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    append(&mut journal, "next", b"body").unwrap();
    assert_eq!(journal.trouble(), None);
}
