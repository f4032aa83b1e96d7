//! [`StepLog`]: a file of JSON Lines that is truncated to the step of the checkpoint when a run
//! resumes.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Log of a run with one JSON object per line, each with the number of its step in the field
/// `step`.
///
/// Lines are appended in the order of steps. Opening the log at the step of a checkpoint removes
/// the lines of later steps, which the resumed run repeats.
#[derive(Debug)]
pub struct StepLog {
    file: File,
}

/// Field `step` of a line; other fields are ignored.
#[derive(Deserialize)]
struct LineStep {
    step: u64,
}

impl StepLog {
    /// Opens or creates the log of a run that continues after `step` steps. Truncates the log
    /// before the first line that is incomplete or belongs to a later step, and calls `keep` with
    /// every remaining line.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn open(path: &Path, step: u64, mut keep: impl FnMut(&str)) -> io::Result<Self> {
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut reader = BufReader::new(&mut file);
        let mut line = Vec::new();
        let mut end = 0;
        loop {
            line.clear();
            let length = reader.read_until(b'\n', &mut line)?;
            let Ok(text) = std::str::from_utf8(&line) else { break };
            let in_order = serde_json::from_str::<LineStep>(text).is_ok_and(|it| it.step <= step);
            if !text.ends_with('\n') || !in_order {
                break;
            }
            keep(text.trim_end());
            end += length as u64;
        }
        drop(reader);
        file.set_len(end)?;
        file.seek(SeekFrom::Start(end))?;
        Ok(Self { file })
    }

    /// Appends a line in one write, so that readers that follow the file see complete lines.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn append(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_of_later_steps_and_incomplete_lines_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = StepLog::open(&path, 0, |_| ()).unwrap();
        for step in 1..=4 {
            log.append(&json!({ "step": step })).unwrap();
        }
        drop(log);
        let mut kept = Vec::new();
        let mut log = StepLog::open(&path, 2, |line| kept.push(line.to_owned())).unwrap();
        assert_eq!(kept, [r#"{"step":1}"#, r#"{"step":2}"#]);
        log.append(&json!({ "step": 3 })).unwrap();
        drop(log);
        std::fs::write(&path, [&std::fs::read(&path).unwrap()[..], b"{\"step\":4"].concat())
            .unwrap();
        StepLog::open(&path, 9, |_| ()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
    }
}
