//! Reading a journal when it is opened, and telling a torn end from a damaged middle.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::frame::{self, FIXED, LONGEST, MAGIC, Next, PREFIX};
use super::{Found, Place};

/// What a disk writes whole or not at all.
const SECTOR: usize = 512;

/// Reads a whole journal; returns the records, where they lie, and where the good part ends.
pub(super) fn scan(
    file: &mut File,
    path: &Path,
) -> io::Result<(Vec<Found>, BTreeMap<u64, Place>, u64)> {
    let total = file.metadata()?.len();
    if total < MAGIC.len() as u64 {
        // New, or cut off while it was begun.
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(MAGIC)?;
        return Ok((Vec::new(), BTreeMap::new(), MAGIC.len() as u64));
    }
    let mut reader = BufReader::with_capacity(1 << 18, &*file);
    let mut magic = [0; MAGIC.len()];
    reader.read_exact(&mut magic)?;
    let wrong = |why: String| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
    };
    if magic != *MAGIC {
        return Err(wrong("is not a journal of this server".to_owned()));
    }
    let (mut found, mut places) = (Vec::new(), BTreeMap::new());
    let mut at = MAGIC.len() as u64;
    loop {
        match frame::read(&mut reader)? {
            Next::End => break,
            Next::Torn => {
                let last = found.last().map_or(0, |last: &Found| last.number);
                let Some(next) = behind(path, at, last, total)? else { break };
                if has_hole(path, at, next)? {
                    put_aside(path, at)?;
                } else {
                    let why = format!(
                        "is damaged at byte {at}, and more follows; restore it from a backup, or move it away to begin anew"
                    );
                    return Err(wrong(why));
                }
                break;
            }
            Next::Frame(frame) => {
                let lead = PREFIX + FIXED + frame.head.len();
                let place = Place { start: at, lead, body: frame.body.len() };
                places.insert(frame.number, place);
                found.push(Found {
                    number: frame.number,
                    head: frame.head,
                    body_len: frame.body.len(),
                });
                at += place.len();
            }
        }
    }
    Ok((found, places, at))
}

/// Where the first whole record begins behind the damaged one at `at`: one with a higher number than
/// `last`, wherever it is, since the damaged one's own length may be what is damaged.
fn behind(path: &Path, at: u64, last: u64, total: u64) -> io::Result<Option<u64>> {
    let mut file = BufReader::with_capacity(1 << 20, File::open(path)?);
    file.seek(SeekFrom::Start(at + 1))?;
    let mut start = at + 1;
    let mut head = [0; PREFIX + FIXED];
    if file.read_exact(&mut head).is_err() {
        return Ok(None);
    }
    loop {
        if may_begin(&head, last, total - start) {
            let mut record = BufReader::new(File::open(path)?);
            record.seek(SeekFrom::Start(start))?;
            if matches!(frame::read(&mut record)?, Next::Frame(_)) {
                return Ok(Some(start));
            }
        }
        let mut next = [0];
        if file.read(&mut next)? == 0 {
            return Ok(None);
        }
        head.rotate_left(1);
        head[PREFIX + FIXED - 1] = next[0];
        start += 1;
    }
}

/// Whether a record behind `last` may begin like this, with `left` bytes to the end of the file.
fn may_begin(head: &[u8; PREFIX + FIXED], last: u64, left: u64) -> bool {
    let [l0, l1, l2, l3, _, _, _, _, number @ .., h0, h1, h2, h3] = *head;
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    let number = u64::from_le_bytes(number);
    let head_len = u32::from_le_bytes([h0, h1, h2, h3]) as usize;
    (FIXED..=LONGEST).contains(&length)
        && (PREFIX + length) as u64 <= left
        && FIXED + head_len <= length
        // Numbers grow one by one; that many more would be chance.
        && (1..1 << 32).contains(&number.wrapping_sub(last))
}

/// Whether a sector from `from` to `to` was never written: then a power cut came before the flush
/// that all of this waited for, and nobody was promised anything.
fn has_hole(path: &Path, from: u64, to: u64) -> io::Result<bool> {
    let mut file = BufReader::new(File::open(path)?);
    let first = from.next_multiple_of(SECTOR as u64);
    file.seek(SeekFrom::Start(first))?;
    for _ in 0..to.saturating_sub(first) / SECTOR as u64 {
        let mut sector = [0; SECTOR];
        file.read_exact(&mut sector)?;
        if sector.iter().all(|byte| *byte == 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Copies what is behind `at` into a file beside the journal, from which it is cut off.
fn put_aside(path: &Path, at: u64) -> io::Result<()> {
    let aside = path.with_extension(format!("torn-{at}"));
    let mut from = File::open(path)?;
    from.seek(SeekFrom::Start(at))?;
    let mut to = File::create(&aside)?;
    io::copy(&mut from, &mut to)?;
    to.sync_all()?;
    crate::log::warn(format_args!(
        "{} was not written to the end when the power went; the rest is in {}",
        path.display(),
        aside.display()
    ));
    Ok(())
}
