//! One record on disk: its number, a JSON head, and bytes that are nobody's business here.
//!
//! ```text
//! length u32 | checksum u32 | number u64 | head length u32 | head | body
//!              └──────────── covered by the checksum ───────────┘
//! ```

use std::io::{self, Read};

/// What a file begins with.
pub(crate) const MAGIC: &[u8; 8] = b"TNKXLOG1";
/// Length and checksum.
pub(crate) const PREFIX: usize = 8;
/// Number and length of the head.
pub(crate) const FIXED: usize = 12;
/// Nothing that we write is longer.
pub(super) const LONGEST: usize = 1 << 30;

/// A record as it was read.
#[derive(Debug, PartialEq)]
pub(crate) struct Frame {
    pub(crate) number: u64,
    pub(crate) head: Vec<u8>,
    pub(crate) body: Vec<u8>,
}

/// What comes next in a file.
#[derive(Debug, PartialEq)]
pub(crate) enum Next {
    Frame(Frame),
    /// The file ends here, after a whole record.
    End,
    /// The file ends inside a record, or the record is not what was written.
    Torn,
}

/// The part of a record before its body.
pub(crate) fn lead(number: u64, head: &[u8], body: &[u8]) -> io::Result<Vec<u8>> {
    let length = FIXED + head.len() + body.len();
    let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "the record is too long");
    if length > LONGEST {
        return Err(too_long());
    }
    let mut out = Vec::with_capacity(PREFIX + FIXED + head.len() + body.len().min(1 << 16));
    out.extend_from_slice(&u32::try_from(length).map_err(|_| too_long())?.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&number.to_le_bytes());
    out.extend_from_slice(&u32::try_from(head.len()).map_err(|_| too_long())?.to_le_bytes());
    out.extend_from_slice(head);
    let mut crc = Crc::new();
    crc.update(&out[PREFIX..]);
    crc.update(body);
    out[4..PREFIX].copy_from_slice(&crc.finish().to_le_bytes());
    Ok(out)
}

/// Reads the next record.
pub(crate) fn read(from: &mut impl Read) -> io::Result<Next> {
    let mut prefix = [0; PREFIX];
    match fill(from, &mut prefix)? {
        0 => return Ok(Next::End),
        PREFIX => {}
        _ => return Ok(Next::Torn),
    }
    let [l0, l1, l2, l3, c0, c1, c2, c3] = prefix;
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if !(FIXED..=LONGEST).contains(&length) {
        return Ok(Next::Torn);
    }
    let mut rest = Vec::new();
    // Not what the length claims at once: it may be a lie.
    if from.take(length as u64).read_to_end(&mut rest)? < length {
        return Ok(Next::Torn);
    }
    let mut crc = Crc::new();
    crc.update(&rest);
    if crc.finish() != u32::from_le_bytes([c0, c1, c2, c3]) {
        return Ok(Next::Torn);
    }
    let Some((number, tail)) = rest.split_first_chunk::<8>() else { return Ok(Next::Torn) };
    let Some((head_len, tail)) = tail.split_first_chunk::<4>() else { return Ok(Next::Torn) };
    let head_len = u32::from_le_bytes(*head_len) as usize;
    if head_len > tail.len() {
        return Ok(Next::Torn);
    }
    let (head, body) = tail.split_at(head_len);
    let number = u64::from_le_bytes(*number);
    Ok(Next::Frame(Frame { number, head: head.to_vec(), body: body.to_vec() }))
}

/// Reads until the buffer is full or the file ends; says how much that was.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match from.read(&mut buffer[done..]) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// CRC-32 (IEEE), eight bytes at a time.
struct Crc(u32);

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

impl Crc {
    fn new() -> Self {
        Self(!0)
    }

    fn update(&mut self, bytes: &[u8]) {
        let (eights, rest) = bytes.as_chunks::<8>();
        for [a, b, c, d, e, f, g, h] in eights {
            let [s0, s1, s2, s3] = self.0.to_le_bytes();
            let at = |table: usize, byte: u8| TABLES[table][byte as usize];
            self.0 = at(7, a ^ s0)
                ^ at(6, b ^ s1)
                ^ at(5, c ^ s2)
                ^ at(4, d ^ s3)
                ^ at(3, *e)
                ^ at(2, *f)
                ^ at(1, *g)
                ^ at(0, *h);
        }
        for byte in rest {
            self.0 = TABLES[0][((self.0 ^ u32::from(*byte)) & 0xFF) as usize] ^ (self.0 >> 8);
        }
    }

    fn finish(self) -> u32 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_usual_one() {
        let mut crc = Crc::new();
        crc.update(b"123456789");
        assert_eq!(crc.finish(), 0xCBF4_3926);
    }

    #[test]
    fn a_record_cut_anywhere_or_changed_anywhere_is_torn() {
        let mut bytes = lead(7, b"{}", b"body").unwrap();
        bytes.extend_from_slice(b"body");
        let whole = Frame { number: 7, head: b"{}".to_vec(), body: b"body".to_vec() };
        assert_eq!(read(&mut &bytes[..]).unwrap(), Next::Frame(whole));
        assert_eq!(read(&mut &bytes[..0]).unwrap(), Next::End);
        for cut in 1..bytes.len() {
            assert_eq!(read(&mut &bytes[..cut]).unwrap(), Next::Torn, "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_eq!(read(&mut &changed[..]).unwrap(), Next::Torn, "changed at {at}");
        }
    }
}
