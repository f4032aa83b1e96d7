//! Frame of a payload in the payload file. All integers are little-endian:
//!
//! ```text
//! length u32 | number u64 | checksum of the payload u32 | checksum of these 16 bytes u32 | payload
//! ```

use std::io::{self, Read};

use super::payloads::BUFFER;

/// First bytes of a payload file.
pub(super) const MAGIC: &[u8; 8] = b"TNKXPAY1";
/// Size of a frame header in bytes.
pub(super) const HEADER_LEN: usize = 20;
/// Maximum size of a payload in bytes.
pub(super) const MAX_PAYLOAD: usize = 1 << 30;

/// Header in front of each payload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct FrameHeader {
    pub(super) number: u64,
    /// Size of the payload in bytes.
    pub(super) length: u32,
    /// Checksum of the payload.
    pub(super) checksum: u32,
}

impl FrameHeader {
    pub(super) fn new(number: u64, payload: &[u8]) -> io::Result<Self> {
        match u32::try_from(payload.len()) {
            Ok(length) if payload.len() <= MAX_PAYLOAD => {
                Ok(Self { number, length, checksum: checksum(payload) })
            }
            _ => Err(oversized()),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[..4].copy_from_slice(&self.length.to_le_bytes());
        out[4..12].copy_from_slice(&self.number.to_le_bytes());
        out[12..16].copy_from_slice(&self.checksum.to_le_bytes());
        let header_checksum = checksum(&out[..16]);
        out[16..].copy_from_slice(&header_checksum.to_le_bytes());
        out
    }

    /// Decodes a header; `None` if its own checksum does not match.
    pub(super) fn from_bytes(bytes: [u8; HEADER_LEN]) -> Option<Self> {
        let [l0, l1, l2, l3, number @ .., c0, c1, c2, c3, h0, h1, h2, h3] = bytes;
        let header_checksum = u32::from_le_bytes([h0, h1, h2, h3]);
        (header_checksum == checksum(&bytes[..16])).then(|| Self {
            number: u64::from_le_bytes(number),
            length: u32::from_le_bytes([l0, l1, l2, l3]),
            checksum: u32::from_le_bytes([c0, c1, c2, c3]),
        })
    }

    /// Returns the headers that differ from `bytes` in one byte and whose own checksum matches. The
    /// checksum of the payload decides whether one of them is the header that was written.
    pub(super) fn corrections(bytes: [u8; HEADER_LEN]) -> impl Iterator<Item = Self> {
        (0..HEADER_LEN).flat_map(move |at| {
            (1..=u8::MAX).filter_map(move |difference| {
                let mut corrected = bytes;
                corrected[at] ^= difference;
                Self::from_bytes(corrected)
            })
        })
    }

    /// Returns the bytes of the header and of its payload.
    pub(super) fn frame_length(&self) -> u64 {
        HEADER_LEN as u64 + u64::from(self.length)
    }

    /// Reads a payload from `from` and returns whether it has the recorded length and checksum.
    pub(super) fn matches_next(&self, from: &mut impl Read) -> io::Result<bool> {
        let mut remaining = u64::from(self.length);
        let mut computed = Checksum::new();
        let mut buffer = vec![0; BUFFER.min(self.length as usize)];
        while remaining > 0 {
            let part =
                usize::try_from(remaining).map_or(buffer.len(), |rest| rest.min(buffer.len()));
            match from.read(&mut buffer[..part])? {
                0 => return Ok(false),
                read => {
                    computed.update(&buffer[..read]);
                    remaining -= read as u64;
                }
            }
        }
        Ok(computed.finish() == self.checksum)
    }

    /// Returns whether `payload` has the recorded length and checksum.
    pub(super) fn matches(&self, payload: &[u8]) -> bool {
        payload.len() == self.length as usize && checksum(payload) == self.checksum
    }
}

/// Returns the error for a payload above [`MAX_PAYLOAD`].
pub(super) fn oversized() -> io::Error {
    let message = format!("payload exceeds the limit of {} MiB", MAX_PAYLOAD >> 20);
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

/// Computes the CRC-32 (IEEE) of `bytes`.
fn checksum(bytes: &[u8]) -> u32 {
    let mut computed = Checksum::new();
    computed.update(bytes);
    computed.finish()
}

/// CRC-32 (IEEE) of bytes that arrive in parts, eight bytes per step.
struct Checksum(u32);

impl Checksum {
    fn new() -> Self {
        Self(!0)
    }

    fn update(&mut self, bytes: &[u8]) {
        let mut crc = self.0;
        let (eights, rest) = bytes.as_chunks::<8>();
        for [a, b, c, d, e, f, g, h] in eights {
            let [s0, s1, s2, s3] = crc.to_le_bytes();
            let at = |table: usize, byte: u8| TABLES[table][byte as usize];
            crc = at(7, a ^ s0)
                ^ at(6, b ^ s1)
                ^ at(5, c ^ s2)
                ^ at(4, d ^ s3)
                ^ at(3, *e)
                ^ at(2, *f)
                ^ at(1, *g)
                ^ at(0, *h);
        }
        for byte in rest {
            crc = TABLES[0][((crc ^ u32::from(*byte)) & 0xFF) as usize] ^ (crc >> 8);
        }
        self.0 = crc;
    }

    fn finish(&self) -> u32 {
        !self.0
    }
}

/// Lookup tables of the checksum: `TABLES[n][byte]` is the remainder of `byte` followed by `n` zero
/// bytes.
const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut all = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "the loop bound is 256")]
        let mut value = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { 0xEDB8_8320 ^ (value >> 1) } else { value >> 1 };
            bit += 1;
        }
        all[0][byte] = value;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = all[table - 1][byte];
            all[table][byte] = (before >> 8) ^ all[0][(before & 0xFF) as usize];
            byte += 1;
        }
        table += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32_ieee() {
        assert_eq!(checksum(b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn a_modified_header_is_rejected_and_one_wrong_byte_is_corrected() {
        let header = FrameHeader::new(7, b"payload").unwrap();
        let bytes = header.to_bytes();
        assert_eq!(FrameHeader::from_bytes(bytes), Some(header));
        for at in 0..HEADER_LEN {
            for difference in [1, 0x15, 0xFF] {
                let mut changed = bytes;
                changed[at] ^= difference;
                assert_eq!(FrameHeader::from_bytes(changed), None, "changed at {at}");
                let corrected: Vec<FrameHeader> = FrameHeader::corrections(changed).collect();
                assert!(corrected.contains(&header), "changed at {at}: {corrected:?}");
            }
        }
        assert!(
            header.matches(b"payload") && !header.matches(b"Payload") && !header.matches(b"payloa")
        );
        assert!(header.matches_next(&mut &b"payload and more"[..]).unwrap());
        assert!(!header.matches_next(&mut &b"paylo"[..]).unwrap());
    }
}
