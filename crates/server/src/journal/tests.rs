use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::*;

fn append(journal: &mut Journal, head: &str, body: &[u8]) -> io::Result<u64> {
    let (sent, received) = mpsc::channel();
    let then = Box::new(move |result| drop(sent.send(result)));
    let number = journal.append(head.as_bytes().to_vec(), Bytes::copy_from_slice(body), then);
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

    let mut damaged = bytes;
    damaged[MAGIC.len() + PREFIX] ^= 1;
    std::fs::write(&path, &damaged).unwrap();
    let Err(error) = Journal::open(&path) else { panic!("opened") };
    assert!(error.to_string().contains("damaged"), "{error}");
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

/// A disk that writes part of something and then is full, for a while.
struct Full {
    file: File,
    left: AtomicUsize,
}

impl Disk for Full {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.file.append(&bytes[..bytes.len() / 2])?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.append(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.file.cut(length)
    }
}

#[test]
fn a_full_disk_is_told_and_leaves_no_gap() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    drop(Journal::open(&path).unwrap());
    let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let length = file.seek(SeekFrom::End(0)).unwrap();
    let index = Index { file: File::open(&path).unwrap(), places: BTreeMap::new(), length };
    let disk = Full { file, left: AtomicUsize::new(2) };
    let mut journal = Journal::with_disk(Box::new(disk), index, 1, path.clone()).unwrap();
    append(&mut journal, "a", b"1").unwrap();
    let error = append(&mut journal, "b", b"2").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    append(&mut journal, "c", b"3").unwrap();
    drop(journal);
    assert_eq!(heads(&Journal::open(&path).unwrap().1), ["a", "c"]);
}
