//! [`JsonRecords`]: the JSON values of a file, which is JSON Lines or one JSON array.

use std::io::{self, BufRead, Read as _};

use super::example_format::Advice;

/// Maximum length of a record in bytes: 256 MiB.
const MAX_RECORD: usize = 256 << 20;

/// JSON value of a file. It may be invalid: only its end is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JsonRecord {
    /// Number of its first line, from 1.
    pub(super) line: u64,
    pub(super) json: Vec<u8>,
}

/// Iterator over the values of a file: its lines, or the elements of an array.
pub(super) struct JsonRecords<R> {
    reader: R,
    /// Number of the current line, from 1.
    line: u64,
    layout: Layout,
}

enum Layout {
    /// Nothing was read yet.
    Unknown,
    Lines,
    Array {
        /// Whether an element was read, after which a comma must follow.
        after_element: bool,
    },
    End,
}

/// Error that ends the records: the file cannot be read, or is neither JSON Lines nor a JSON array.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RecordsError {
    /// Number of the line, from 1.
    pub(super) line: u64,
    pub(super) reason: String,
    pub(super) advice: Advice,
}

impl<R: BufRead> JsonRecords<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { reader, line: 1, layout: Layout::Unknown }
    }

    fn error<T>(&mut self, reason: impl Into<String>) -> Result<T, RecordsError> {
        self.layout = Layout::End;
        Err(RecordsError { line: self.line, reason: reason.into(), advice: Advice::Layout })
    }

    fn failed<T>(&mut self, error: &io::Error) -> Result<T, RecordsError> {
        self.layout = Layout::End;
        let reason = format!("cannot read the rest of the file: {error}");
        Err(RecordsError { line: self.line, reason, advice: Advice::Damaged })
    }

    /// Returns the next byte without consuming it.
    fn peek(&mut self) -> Result<Option<u8>, RecordsError> {
        loop {
            match self.reader.fill_buf() {
                Ok(bytes) => return Ok(bytes.first().copied()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.failed(&error),
            }
        }
    }

    /// Consumes white space and returns the byte after it.
    fn skip_space(&mut self) -> Result<Option<u8>, RecordsError> {
        while let Some(byte) = self.peek()? {
            if !byte.is_ascii_whitespace() {
                return Ok(Some(byte));
            }
            self.line += u64::from(byte == b'\n');
            self.reader.consume(1);
        }
        Ok(None)
    }

    /// Determines the layout by the first character.
    fn start(&mut self) -> Result<(), RecordsError> {
        for expected in b"\xEF\xBB\xBF" {
            if self.peek()? == Some(*expected) {
                self.reader.consume(1);
            }
        }
        self.layout = match self.skip_space()? {
            Some(b'[') => {
                self.reader.consume(1);
                Layout::Array { after_element: false }
            }
            _ => Layout::Lines,
        };
        Ok(())
    }

    fn next_line(&mut self) -> Result<Option<JsonRecord>, RecordsError> {
        loop {
            let mut json = Vec::new();
            let mut line = self.reader.by_ref().take(MAX_RECORD as u64 + 1);
            let read = match line.read_until(b'\n', &mut json) {
                Ok(read) => read,
                Err(error) => return self.failed(&error),
            };
            if read == 0 {
                self.layout = Layout::End;
                return Ok(None);
            }
            if json.len() > MAX_RECORD {
                return self.error("the line is longer than 256 MiB");
            }
            let record = JsonRecord { line: self.line, json };
            self.line += 1;
            if !record.json.trim_ascii().is_empty() {
                return Ok(Some(record));
            }
        }
    }

    fn next_element(&mut self, after_element: bool) -> Result<Option<JsonRecord>, RecordsError> {
        let mut next = self.skip_space()?;
        if after_element && next == Some(b',') {
            self.reader.consume(1);
            next = self.skip_space()?;
            if next == Some(b']') {
                return self
                    .error("expected an example after the comma, found the end of the array");
            }
        } else if after_element && !matches!(next, Some(b']') | None) {
            return self.error("expected a comma between the elements of the array");
        }
        match next {
            None => self.error("the array is not closed: expected `]` at the end of the file"),
            Some(b']') => {
                self.reader.consume(1);
                if self.skip_space()?.is_some() {
                    return self.error("unexpected text after the end of the array");
                }
                self.layout = Layout::End;
                Ok(None)
            }
            Some(_) => {
                let record = self.element()?;
                self.layout = Layout::Array { after_element: true };
                Ok(Some(record))
            }
        }
    }

    /// Reads an element up to the comma, bracket or white space after it.
    fn element(&mut self) -> Result<JsonRecord, RecordsError> {
        let first_line = self.line;
        let mut json = Vec::new();
        let mut depth = 0_usize;
        let mut in_string = false;
        let mut escaped = false;
        while let Some(byte) = self.peek()? {
            let ends_scalar = byte == b',' || byte == b']' || byte.is_ascii_whitespace();
            if depth == 0 && !in_string && ends_scalar {
                break;
            }
            self.reader.consume(1);
            // Replace line breaks between tokens: the record is read as one line of JSON Lines.
            let is_break = !in_string && matches!(byte, b'\n' | b'\r');
            json.push(if is_break { b' ' } else { byte });
            if json.len() > MAX_RECORD {
                return self.error("the element is longer than 256 MiB");
            }
            self.line += u64::from(byte == b'\n');
            match byte {
                _ if escaped => escaped = false,
                b'\\' if in_string => escaped = true,
                b'"' => in_string = !in_string,
                _ if in_string => {}
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 && matches!(byte, b'}' | b']') && !in_string {
                break;
            }
        }
        Ok(JsonRecord { line: first_line, json })
    }
}

impl<R: BufRead> Iterator for JsonRecords<R> {
    type Item = Result<JsonRecord, RecordsError>;

    /// Returns the next record. An error is the last item.
    fn next(&mut self) -> Option<Self::Item> {
        if matches!(self.layout, Layout::Unknown)
            && let Err(error) = self.start()
        {
            return Some(Err(error));
        }
        match self.layout {
            Layout::Lines => self.next_line().transpose(),
            Layout::Array { after_element } => self.next_element(after_element).transpose(),
            Layout::Unknown | Layout::End => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Line and text of a record or of an error.
    type LineText = (u64, String);

    /// Returns the records, and the error that ended the file.
    fn records(text: &str) -> (Vec<LineText>, Option<LineText>) {
        let mut all = Vec::new();
        let mut end = None;
        // A small buffer, so that records cross its boundaries.
        let reader = io::BufReader::with_capacity(3, text.as_bytes());
        for record in JsonRecords::new(reader) {
            assert!(end.is_none(), "a record follows an error");
            match record {
                Ok(record) => {
                    let json = String::from_utf8(record.json).unwrap();
                    all.push((record.line, json.trim().to_owned()));
                }
                Err(error) => end = Some((error.line, error.reason)),
            }
        }
        (all, end)
    }

    fn list(all: &[(u64, &str)]) -> Vec<LineText> {
        all.iter().map(|(line, text)| (*line, (*text).to_owned())).collect()
    }

    #[test]
    fn lines_and_arrays_are_split_into_records() {
        for (text, expected) in [
            ("", &[][..]),
            (" \n\n", &[]),
            ("{\"a\":1}\n\n{\"b\":2}", &[(1, "{\"a\":1}"), (3, "{\"b\":2}")]),
            ("\u{FEFF}\n{\"a\":1}\r\nnonsense\n", &[(2, "{\"a\":1}"), (3, "nonsense")]),
            ("[]", &[]),
            (
                "\n[ {\"a\": [1, {}]},\n {\"b\":\n \"]},\\\"{\"}\n, 5]\n",
                &[(2, "{\"a\": [1, {}]}"), (3, "{\"b\":  \"]},\\\"{\"}"), (5, "5")],
            ),
            ("[\"x\",[2],null]", &[(1, "\"x\""), (1, "[2]"), (1, "null")]),
        ] {
            assert_eq!(records(text), (list(expected), None), "{text:?}");
        }
    }

    #[test]
    fn malformed_arrays_are_reported_with_the_line() {
        for (text, count, line, reason) in [
            ("[{}\n,{}", 2, 2, "the array is not closed"),
            ("[{\"a\": \"b", 1, 1, "the array is not closed"),
            ("[{}\n{}]", 1, 2, "expected a comma"),
            ("[{},\n]", 1, 2, "found the end of the array"),
            ("[{}]\n{}", 1, 2, "unexpected text after the end of the array"),
        ] {
            let (all, end) = records(text);
            let (at, found) = end.expect(text);
            assert_eq!((all.len(), at), (count, line), "{text:?}: {found}");
            assert!(found.contains(reason), "{text:?}: {found}");
        }
    }
}
