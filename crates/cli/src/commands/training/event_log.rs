//! [`EventLog`]: metrics of a run as an event file of TensorBoard.
//!
//! The file is a sequence of records: the length as a 64-bit number, its checksum, a protobuf
//! message `Event`, and its checksum. All numbers are little-endian.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message as _;
use tinkex_runs::{MetricsLine, metric};

/// Name of the file. TensorBoard reads files whose names contain `tfevents`.
pub(crate) const EVENT_FILE: &str = "events.out.tfevents.tinkex";
/// Maximum length of an event that is read, in bytes. The events of this program are far shorter.
const MAX_EVENT: u64 = 1 << 20;
/// Length of the parts of a record before and after the event, in bytes.
const HEADER: usize = 12;
const FOOTER: usize = 4;

/// `tensorflow.Event`, as far as scalars need it.
#[derive(Clone, PartialEq, prost::Message)]
struct Event {
    /// Seconds since the Unix epoch.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    /// Version of the format, in the first event only.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, prost::Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<ScalarValue>,
}

/// `tensorflow.Summary.Value`.
#[derive(Clone, PartialEq, prost::Message)]
struct ScalarValue {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// Event file of a run.
#[derive(Debug)]
pub(crate) struct EventLog {
    file: File,
}

impl EventLog {
    /// Opens or creates the file of a run that continues after `step` steps. Events of later steps,
    /// which the run repeats, and an incomplete event at the end are removed.
    pub(crate) fn open(path: &Path, step: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        let mut end = 0;
        while let Some((event, length)) = read_event(&mut file)? {
            if u64::try_from(event.step).is_ok_and(|at| at > step) {
                break;
            }
            end += length;
        }
        file.set_len(end)?;
        file.seek(SeekFrom::Start(end))?;
        let mut log = Self { file };
        if end == 0 {
            let version = Some("brain.Event:2".to_owned());
            log.write(&Event { wall_time: now(), step: 0, file_version: version, summary: None })?;
        }
        Ok(log)
    }

    /// Appends the metrics of a step or of an evaluation, as `train/NAME` or `eval/NAME`.
    pub(crate) fn append(&mut self, line: &MetricsLine) -> io::Result<()> {
        let scalar = |(name, value): (&str, f64)| ScalarValue {
            tag: match name.strip_prefix(metric::EVAL_PREFIX) {
                Some(name) => format!("eval/{name}"),
                None => format!("train/{name}"),
            },
            #[expect(clippy::cast_possible_truncation, reason = "the format has 32-bit numbers")]
            simple_value: Some(value as f32),
        };
        let summary = Some(Summary { value: line.iter().map(scalar).collect() });
        let step = i64::try_from(line.step).unwrap_or(i64::MAX);
        self.write(&Event { wall_time: now(), step, file_version: None, summary })
    }

    /// Appends an event in one write, so that readers that follow the file see complete records.
    fn write(&mut self, event: &Event) -> io::Result<()> {
        let data = event.encode_to_vec();
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(HEADER + data.len() + FOOTER);
        record.extend(length);
        record.extend(masked_checksum(&length).to_le_bytes());
        record.extend(&data);
        record.extend(masked_checksum(&data).to_le_bytes());
        self.file.write_all(&record)
    }
}

/// Reads an event and the length of its record. Returns `None` at the end of the file, and before a
/// record that is incomplete or damaged.
fn read_event(file: &mut File) -> io::Result<Option<(Event, u64)>> {
    let mut header = [0; HEADER];
    if !read_complete(file, &mut header)? {
        return Ok(None);
    }
    let (length, checksum) = header.split_at(8);
    let is_intact = masked_checksum(length).to_le_bytes() == *checksum;
    let length = length.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    if !is_intact || length > MAX_EVENT {
        return Ok(None);
    }
    let mut data = vec![0; usize::try_from(length).unwrap_or(0) + FOOTER];
    if !read_complete(file, &mut data)? {
        return Ok(None);
    }
    let (event, checksum) = data.split_at(data.len() - FOOTER);
    if masked_checksum(event).to_le_bytes() != *checksum {
        return Ok(None);
    }
    Ok(Event::decode(event).ok().map(|event| (event, (HEADER + data.len()) as u64)))
}

/// Fills the buffer. Returns false if the file ends before.
fn read_complete(file: &mut File, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Returns the checksum of a record: CRC-32C, rotated and offset as the format demands.
fn masked_checksum(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

/// Returns the CRC-32C (Castagnoli) of some bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let divisor = if crc & 1 == 1 { 0x82F6_3B78 } else { 0 };
            crc = crc >> 1 ^ divisor;
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(path: &Path) -> Vec<Event> {
        let mut file = File::open(path).unwrap();
        std::iter::from_fn(|| read_event(&mut file).unwrap().map(|(event, _)| event)).collect()
    }

    #[test]
    fn the_checksum_of_the_standard_text_is_the_standard_value() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn a_resumed_run_replaces_later_and_damaged_events() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(EVENT_FILE);
        let mut log = EventLog::open(&path, 0).unwrap();
        for step in 1..=4 {
            log.append(&MetricsLine::new(step).with("loss", 2.5).with("margin", 0.5)).unwrap();
        }
        drop(log);
        let written = events(&path);
        assert_eq!(written.len(), 5);
        assert_eq!(written[0].file_version.as_deref(), Some("brain.Event:2"));
        let first = &written[1].summary.as_ref().unwrap().value[0];
        assert_eq!((first.tag.as_str(), first.simple_value), ("train/loss", Some(2.5)));

        drop(EventLog::open(&path, 2).unwrap());
        let steps: Vec<i64> = events(&path).iter().map(|event| event.step).collect();
        assert_eq!(steps, [0, 1, 2]);
        for damage in [&b"half a record"[..], &u64::MAX.to_le_bytes()] {
            let mut file = OpenOptions::new().append(true).open(&path).unwrap();
            file.write_all(damage).unwrap();
            drop(EventLog::open(&path, 9).unwrap());
            assert_eq!(events(&path).len(), 3);
        }
        let mut log = EventLog::open(&path, 9).unwrap();
        log.append(&MetricsLine::new(3).with("eval_loss", 1.0)).unwrap();
        let written = events(&path);
        assert_eq!(written.len(), 4);
        assert_eq!(written[3].summary.as_ref().unwrap().value[0].tag, "eval/loss");
    }
}
