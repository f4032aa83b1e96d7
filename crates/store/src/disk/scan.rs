//! Finds the payloads of a payload file by following the headers, and finds the next header behind
//! damaged bytes.
//!
//! Numbers increase in the file. Behind damaged bytes this order is not required: the first header
//! that the search finds may be content of a client, with the number of a later payload. A number
//! that occurs twice is used for neither payload, so such content never replaces a payload that can
//! be read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::Path;

use super::frame::{FrameHeader, HEADER_LEN, MAGIC, MAX_PAYLOAD};
use super::payloads::{BUFFER, PayloadExtent, invalid_data};
use crate::log;

/// Payloads and damaged bytes of a payload file.
#[derive(Debug, Default)]
pub(super) struct PayloadScan {
    /// Payloads with numbers below the limit of the scan. Their content is checked when it is read.
    pub(super) extents: BTreeMap<u64, PayloadExtent>,
    /// End of the last of these payloads in bytes; 0 for a file without a complete magic number.
    pub(super) end: u64,
    /// Length of the file in bytes.
    pub(super) total: u64,
    /// Parts of the file without a readable payload. The last part may be a write that a crash
    /// interrupted.
    pub(super) damaged: Vec<Range<u64>>,
    /// Numbers of the payloads whose headers have one wrong byte.
    pub(super) corrected: Vec<u64>,
    /// First payload number that no header in the file has.
    pub(super) first_free: u64,
    /// Numbers that several payloads have.
    pub(super) repeated: BTreeSet<u64>,
}

impl PayloadScan {
    /// Scans `file`. Payloads with numbers from `next` on were not committed and are left out.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is not a payload file.
    pub(super) fn read(file: &File, path: &Path, next: u64) -> io::Result<Self> {
        let total = file.metadata()?.len();
        let mut scan = Self { total, first_free: 1, ..Self::default() };
        if total < MAGIC.len() as u64 {
            // A new file, or a file whose creation was interrupted by a crash.
            return Ok(scan);
        }
        let mut reader = BufReader::with_capacity(1 << 16, file);
        reader.seek(SeekFrom::Start(0))?;
        let mut magic = [0; MAGIC.len()];
        reader.read_exact(&mut magic)?;
        let wrong = magic.iter().zip(MAGIC).filter(|(found, expected)| found != expected).count();
        if wrong > 1 {
            return Err(invalid_data(path, "not a payload file of this server"));
        }
        scan.end = MAGIC.len() as u64;
        let mut position = scan.end;
        let mut last = 0;
        // Number of the payload in front of the first damaged bytes.
        let mut last_before_damage = None;
        // Last payload that was found by its header alone, until its checksum was compared.
        let mut unverified: Option<FollowedPayload> = None;
        loop {
            let mut bytes = if position < total { read_header(&mut reader)? } else { None };
            let found = bytes.and_then(FrameHeader::from_bytes);
            let found = found.filter(|header| header.number > last);
            if let Some(header) = found {
                scan.first_free = scan.first_free.max(header.number.saturating_add(1));
            }
            if let Some(header) = found.filter(|header| header.frame_length() <= total - position) {
                let extent = PayloadExtent { start: position, header };
                unverified = Some(FollowedPayload { extent, last, end: scan.end });
                if header.number < next {
                    scan.add(extent);
                    scan.end = position + header.frame_length();
                }
                last = header.number;
                position += header.frame_length();
                reader.seek_relative(i64::from(header.length))?;
                continue;
            }
            // No header follows. The payload in front may be incomplete, and contain the start of
            // the payload that was appended next. Search again behind its header.
            let mut search = position < total;
            if let Some(FollowedPayload { extent, last: last_before, end }) = unverified.take() {
                reader.seek(SeekFrom::Start(extent.start + HEADER_LEN as u64))?;
                if !extent.header.matches_next(&mut reader)? {
                    scan.extents.remove(&extent.header.number);
                    scan.end = end;
                    last = last_before;
                    position = extent.start;
                    bytes = None;
                    search = true;
                }
            }
            if !search {
                break;
            }
            // The damaged bytes may be content of clients. Accept only headers whose payloads have
            // the right checksum.
            let lowest = last_before_damage.unwrap_or(last);
            let mut accept = |start: u64, header: FrameHeader| -> io::Result<bool> {
                if header.number <= lowest
                    || header.number >= next
                    || header.frame_length() > total - start
                {
                    return Ok(false);
                }
                reader.seek(SeekFrom::Start(start + HEADER_LEN as u64))?;
                header.matches_next(&mut reader)
            };
            let mut corrected = None;
            for header in bytes.into_iter().flat_map(FrameHeader::corrections) {
                if accept(position, header)? {
                    corrected = Some(header);
                    break;
                }
            }
            let (start, header) = match corrected {
                Some(header) => {
                    scan.corrected.push(header.number);
                    (position, header)
                }
                None => match find_header(file, position..total, accept)? {
                    Some((start, header)) => {
                        // A lower number than the payload in front has may follow directly.
                        if position < start {
                            scan.damaged.push(position..start);
                        }
                        last_before_damage = Some(lowest);
                        (start, header)
                    }
                    None => {
                        scan.damaged.push(position..total);
                        break;
                    }
                },
            };
            scan.add(PayloadExtent { start, header });
            last = header.number;
            scan.first_free = scan.first_free.max(last.saturating_add(1));
            position = start + header.frame_length();
            scan.end = position;
            reader.seek(SeekFrom::Start(position))?;
        }
        Ok(scan)
    }

    /// Adds a payload, unless its number occurs twice.
    fn add(&mut self, extent: PayloadExtent) {
        let number = extent.header.number;
        if self.repeated.contains(&number) {
            return;
        }
        if self.extents.insert(number, extent).is_some() {
            self.extents.remove(&number);
            self.repeated.insert(number);
        }
    }

    /// Logs the damage in front of the last payload. Damage behind it is usually a write that a
    /// crash interrupted.
    pub(super) fn log(&self) {
        for number in &self.corrected {
            tracing::warn!(
                target: log::STORAGE,
                payload = number,
                "the payload file has a damaged header, which was corrected"
            );
        }
        for number in &self.repeated {
            tracing::error!(
                target: log::STORAGE,
                payload = number,
                "the payload file has two payloads with the same number behind damaged bytes; \
                 neither is used"
            );
        }
        for part in self.damaged.iter().filter(|part| part.end <= self.end) {
            tracing::error!(
                target: log::STORAGE,
                start = part.start,
                bytes = part.end - part.start,
                "a part of the payload file is damaged"
            );
        }
    }
}

/// A payload whose header followed the payload in front of it.
struct FollowedPayload {
    extent: PayloadExtent,
    /// Number of the payload in front of it.
    last: u64,
    /// End of the payloads in front of it.
    end: u64,
}

/// Reads the bytes of a header; `None` at the end of the file.
fn read_header(reader: &mut BufReader<&File>) -> io::Result<Option<[u8; HEADER_LEN]>> {
    let mut bytes = [0; HEADER_LEN];
    match reader.read_exact(&mut bytes) {
        Ok(()) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the first header in a part of the file that `accept` accepts, with its position.
fn find_header(
    mut file: &File,
    part: Range<u64>,
    mut accept: impl FnMut(u64, FrameHeader) -> io::Result<bool>,
) -> io::Result<Option<(u64, FrameHeader)>> {
    let mut buffer = vec![0; BUFFER];
    let mut start = part.start;
    while start + HEADER_LEN as u64 <= part.end {
        let length = usize::try_from(part.end - start).map_or(BUFFER, |rest| rest.min(BUFFER));
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut buffer[..length])?;
        for (offset, bytes) in buffer[..length].array_windows::<HEADER_LEN>().enumerate() {
            // Check the length and the number first: computing a checksum at every position is slow.
            let payload = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            if payload as usize > MAX_PAYLOAD || bytes[11] != 0 {
                continue;
            }
            let position = start + offset as u64;
            if let Some(header) = FrameHeader::from_bytes(*bytes)
                && accept(position, header)?
            {
                return Ok(Some((position, header)));
            }
        }
        // The parts overlap, so that a header at their border is found.
        start += (length - (HEADER_LEN - 1)) as u64;
    }
    Ok(None)
}
