//! [`GgufCursor`]: reads the numbers and strings of a header.

use std::io::{self, Read};

/// Why a header cannot be parsed.
#[derive(Debug)]
pub(super) enum ParseError {
    Io(io::Error),
    /// The content is invalid.
    Invalid(String),
}

impl From<String> for ParseError {
    fn from(reason: String) -> Self {
        Self::Invalid(reason)
    }
}

impl From<io::Error> for ParseError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl ParseError {
    /// Adds the name of the invalid part of the header.
    pub(super) fn at(self, part: impl std::fmt::Display) -> Self {
        match self {
            Self::Io(error) => Self::Io(error),
            Self::Invalid(reason) => Self::Invalid(format!("{part}: {reason}")),
        }
    }
}

/// Reads a header. Checks every length against the rest of the file before it allocates memory.
pub(super) struct GgufCursor<'a> {
    reader: &'a mut dyn Read,
    at: u64,
    /// Length of the file in bytes.
    end: u64,
}

impl<'a> GgufCursor<'a> {
    pub(super) fn new(reader: &'a mut dyn Read, end: u64) -> Self {
        Self { reader, at: 0, end }
    }

    /// Returns the number of bytes before the cursor.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Advances the position by `len` bytes, which the file must have.
    fn take(&mut self, len: u64) -> Result<(), ParseError> {
        match self.at.checked_add(len) {
            Some(at) if at <= self.end => {
                self.at = at;
                Ok(())
            }
            _ => Err(format!(
                "the file is truncated: {len} bytes at byte {} exceed its {} bytes",
                self.at, self.end
            )
            .into()),
        }
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], ParseError> {
        self.take(N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, ParseError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, ParseError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads `len` bytes.
    fn bytes(&mut self, len: u64) -> Result<Vec<u8>, ParseError> {
        self.take(len)?;
        let len = usize::try_from(len).map_err(|_| format!("{len} bytes are too many"))?;
        let mut bytes = vec![0; len];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn string(&mut self) -> Result<String, ParseError> {
        let start = self.at;
        let len = self.u64()?;
        String::from_utf8(self.bytes(len)?)
            .map_err(|_| format!("the string at byte {start} is not UTF-8").into())
    }

    /// Reads `count` elements of at least `min_bytes` bytes each.
    pub(super) fn repeat<T>(
        &mut self,
        count: u64,
        min_bytes: u64,
        mut read: impl FnMut(&mut Self) -> Result<T, ParseError>,
    ) -> Result<Vec<T>, ParseError> {
        let left = self.end - self.at;
        if count > left / min_bytes {
            let reason =
                format!("{count} elements at byte {} exceed the {left} bytes left", self.at);
            return Err(reason.into());
        }
        // No capacity is reserved: an element may take more bytes in memory than in the file.
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(read(self)?);
        }
        Ok(all)
    }
}
