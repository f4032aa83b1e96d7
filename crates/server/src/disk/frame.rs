//! One payload on disk: what is in front of it.
//!
//! ```text
//! length u32 | number u64 | checksum of the payload u32 | checksum of these 16 bytes u32 | payload
//! ```

use std::io::{self, Read};

/// What a file begins with.
pub(super) const MAGIC: &[u8; 8] = b"TNKXPAY1";
/// Bytes of a head.
pub(super) const HEAD: usize = 20;
/// Nothing that we write is longer.
pub(super) const LONGEST: usize = 1 << 30;

/// What stands in front of a payload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Head {
    pub(super) number: u64,
    pub(super) length: u32,
    checksum: u32,
}

impl Head {
    pub(super) fn of(number: u64, payload: &[u8]) -> io::Result<Self> {
        match u32::try_from(payload.len()) {
            Ok(length) if payload.len() <= LONGEST => {
                Ok(Self { number, length, checksum: checksum(payload) })
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "the payload is too long")),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEAD] {
        let mut out = [0; HEAD];
        out[..4].copy_from_slice(&self.length.to_le_bytes());
        out[4..12].copy_from_slice(&self.number.to_le_bytes());
        out[12..16].copy_from_slice(&self.checksum.to_le_bytes());
        let own = checksum(&out[..16]);
        out[16..].copy_from_slice(&own.to_le_bytes());
        out
    }

    /// Nothing if these are not the bytes of a head.
    fn from_bytes(bytes: [u8; HEAD]) -> Option<Self> {
        let [l0, l1, l2, l3, number @ .., c0, c1, c2, c3, o0, o1, o2, o3] = bytes;
        let own = u32::from_le_bytes([o0, o1, o2, o3]);
        (own == checksum(&bytes[..16])).then(|| Self {
            number: u64::from_le_bytes(number),
            length: u32::from_le_bytes([l0, l1, l2, l3]),
            checksum: u32::from_le_bytes([c0, c1, c2, c3]),
        })
    }

    /// Reads one; nothing if the file ends, or says something else.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut bytes = [0; HEAD];
        match from.read_exact(&mut bytes) {
            Ok(()) => Ok(Self::from_bytes(bytes)),
            Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Whether this is the payload that was written.
    pub(super) fn fits(&self, payload: &[u8]) -> bool {
        payload.len() == self.length as usize && checksum(payload) == self.checksum
    }
}

/// CRC-32 (IEEE), eight bytes at a time.
fn checksum(bytes: &[u8]) -> u32 {
    let mut crc: u32 = !0;
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
    !crc
}

const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut all = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "a byte")]
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
    fn the_checksum_is_the_usual_one() {
        assert_eq!(checksum(b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn a_head_cut_anywhere_or_changed_anywhere_is_none() {
        let head = Head::of(7, b"payload").unwrap();
        let bytes = head.to_bytes();
        assert_eq!(Head::read(&mut &bytes[..]).unwrap(), Some(head));
        for cut in 0..HEAD {
            assert_eq!(Head::read(&mut &bytes[..cut]).unwrap(), None, "cut at {cut}");
        }
        for at in 0..HEAD {
            let mut changed = bytes;
            changed[at] ^= 1;
            assert_eq!(Head::read(&mut &changed[..]).unwrap(), None, "changed at {at}");
        }
        assert!(head.fits(b"payload") && !head.fits(b"Payload") && !head.fits(b"payloa"));
    }
}
