//! [`InputFile`]: a file of examples, plain or compressed, or standard input.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Seek as _};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::context::CommandContext;
use crate::error::CommandError;

/// Name of the file in a run folder that keeps what was read from standard input.
pub(crate) const STDIN_COPY: &str = "stdin.jsonl";

/// Name of standard input in messages.
const STDIN_NAME: &str = "standard input";

/// What the examples of a file are used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataFile {
    Training,
    Evaluation,
    /// Prompts of `tinkex rl`.
    Prompts,
    /// Prompts of `train --sample-prompts`, which cannot be standard input.
    SamplePrompts,
}

impl DataFile {
    fn as_str(self) -> &'static str {
        match self {
            Self::Training => "training file",
            Self::Evaluation => "evaluation file",
            Self::Prompts | Self::SamplePrompts => "prompts file",
        }
    }
}

/// File of examples, and its name in messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InputFile {
    pub(crate) path: PathBuf,
    /// Path as the user knows it: `standard input` for a copy of it.
    pub(crate) name: String,
    kind: DataFile,
}

impl AsRef<Path> for InputFile {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl InputFile {
    pub(crate) fn new(kind: DataFile, path: &Path) -> Self {
        Self { path: path.to_owned(), name: path.display().to_string(), kind }
    }

    /// Creates the input of a file that contains what was read from standard input.
    pub(crate) fn of_stdin(kind: DataFile, copy: &Path) -> Self {
        Self { path: copy.to_owned(), name: STDIN_NAME.to_owned(), kind }
    }

    /// Describes the file in a message: `training file examples.jsonl`.
    pub(crate) fn describe(&self) -> String {
        format!("{} {}", self.kind.as_str(), self.name)
    }

    /// Returns the path for a command line, or `FILE` for standard input.
    pub(super) fn shell_name(&self) -> String {
        match self.name.as_str() {
            STDIN_NAME => "FILE".to_owned(),
            name => crate::format::shell_quote(name),
        }
    }

    /// Creates an error about the file: `cannot read {file}: {reason}`.
    pub(crate) fn error(&self, reason: &str) -> CommandError {
        CommandError::usage(format!("cannot read {}: {reason}", self.describe()))
    }

    /// Checks that the file can be opened and is not of an unsupported format.
    pub(crate) fn check(&self) -> Result<(), CommandError> {
        self.open().map(|_| ())
    }

    /// Opens the file. gzip and Zstandard are recognized by their first bytes and decompressed.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read, and for files that are certainly not JSON, with
    /// the way to convert them.
    pub(crate) fn open(&self) -> Result<Box<dyn BufRead>, CommandError> {
        let failed = |error: io::Error| {
            CommandError::file("read", self.describe(), &error).hint(match self.kind {
                DataFile::SamplePrompts => "Pass the path of a JSON Lines file.",
                DataFile::Training | DataFile::Evaluation | DataFile::Prompts => {
                    "Pass the path of a JSON Lines file, or - for standard input."
                }
            })
        };
        // Before the file is opened: opening a pipe waits for its writer.
        let metadata = std::fs::metadata(&self.path).map_err(failed)?;
        if metadata.is_dir() {
            return Err(self.error("it is a folder").hint(match self.kind {
                DataFile::Evaluation | DataFile::SamplePrompts => "Pass a JSON Lines file.",
                DataFile::Training | DataFile::Prompts => {
                    "Pass a JSON Lines file. To resume the run in a folder, pass --resume DIR."
                }
            }));
        }
        if !metadata.is_file() {
            return Err(self.error("it is a pipe or a device").hint(match self.kind {
                DataFile::SamplePrompts => "Write the prompts to a file and pass its path.",
                DataFile::Training | DataFile::Evaluation | DataFile::Prompts => {
                    "Pass - as the file to read a pipe from standard input."
                }
            }));
        }
        let mut file = File::open(&self.path).map_err(failed)?;
        let mut start = Vec::new();
        (&mut file).take(8).read_to_end(&mut start).map_err(failed)?;
        file.rewind().map_err(failed)?;
        if let Some((found, advice)) = self.unsupported(&start) {
            return Err(self.error(found).hint(advice));
        }
        let file = BufReader::new(file);
        Ok(if start.starts_with(&[0x1F, 0x8B]) {
            // A file may have several members, for example if it was appended to.
            Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(file)))
        } else if start.starts_with(&ZSTD) {
            let decoder = zstd::stream::read::Decoder::with_buffer(file).map_err(failed)?;
            Box::new(BufReader::new(decoder))
        } else {
            Box::new(file)
        })
    }

    /// Recognizes files that are not text: what was found, and how to convert it.
    fn unsupported(&self, start: &[u8]) -> Option<(&'static str, String)> {
        let name = self.shell_name();
        let pandas = |function: &str| {
            format!(
                "Convert it to JSON Lines, for example with pandas: python3 -c 'import pandas, sys; \
                 pandas.{function}(sys.argv[1]).to_json(sys.argv[2], orient=\"records\", \
                 lines=True)' {name} examples.jsonl"
            )
        };
        let extension = self.path.extension().unwrap_or_default().to_string_lossy();
        Some(match start {
            [b'P', b'A', b'R', b'1', ..] => ("it is a Parquet file", pandas("read_parquet")),
            [b'A', b'R', b'R', b'O', b'W', b'1', ..] => {
                ("it is an Arrow file", pandas("read_feather"))
            }
            [b'P', b'K', 3 | 5, 4 | 6, ..] if extension == "xlsx" => {
                ("it is an Excel file", pandas("read_excel"))
            }
            [b'P', b'K', 3 | 5, 4 | 6, ..] => {
                ("it is a ZIP archive", format!("Extract it first: unzip {name}"))
            }
            [0xFD, b'7', b'z', b'X', b'Z', ..] => (
                "it is compressed with xz",
                format!("Decompress it to a pipe and pass - as the file: xz -dc {name} | …"),
            ),
            [b'B', b'Z', b'h', ..] => (
                "it is compressed with bzip2",
                format!("Decompress it to a pipe and pass - as the file: bzip2 -dc {name} | …"),
            ),
            [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] => (
                "it is UTF-16",
                format!("Convert it to UTF-8: iconv -f utf-16 -t utf-8 {name} > examples.jsonl"),
            ),
            _ if matches!(&*extension, "csv" | "tsv") && !matches!(start, [b'{' | b'[', ..]) => {
                // `read_table` separates columns at tabs.
                let function = if extension == "tsv" { "read_table" } else { "read_csv" };
                ("it is a table, not JSON Lines", pandas(function))
            }
            _ => return None,
        })
    }
}

/// Path that stands for standard input.
const STDIN: &str = "-";

/// Files of a run: the training files, and the evaluation file.
#[derive(Debug, Default)]
pub(crate) struct RunInputs {
    pub(crate) train: Vec<InputFile>,
    pub(crate) eval: Option<InputFile>,
    /// Copy of standard input, if the path of a file is `-`.
    stdin: Option<NamedTempFile>,
}

impl RunInputs {
    /// Creates the inputs of a run whose files are known by their paths.
    pub(crate) fn of_paths(kind: DataFile, train: &[PathBuf], eval: Option<&Path>) -> Self {
        let train = train.iter().map(|path| InputFile::new(kind, path)).collect();
        let eval = eval.map(|path| InputFile::new(DataFile::Evaluation, path));
        Self { train, eval, stdin: None }
    }

    /// Makes the paths of a new run absolute and checks that the files can be read. The path `-` is
    /// standard input, which is read to its end here.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read, or if standard input is given twice.
    pub(crate) async fn open(
        context: &mut CommandContext<'_>,
        kind: DataFile,
        train: &mut [PathBuf],
        eval: Option<&mut PathBuf>,
    ) -> Result<Self, CommandError> {
        let mut inputs = Self::default();
        let train = train.iter_mut().map(|path| (kind, path));
        for (kind, path) in train.chain(eval.map(|path| (DataFile::Evaluation, path))) {
            let file = if path.as_os_str() != STDIN {
                let resolved = context.environment.path(path);
                *path = std::path::absolute(&resolved).unwrap_or(resolved);
                InputFile::new(kind, path)
            } else if inputs.stdin.is_none() {
                let copy = inputs.stdin.insert(copy_stdin(context).await?);
                InputFile::of_stdin(kind, copy.path())
            } else {
                return Err(CommandError::usage("standard input (-) is given twice")
                    .hint("Pass - once, and the paths of the other files."));
            };
            file.check()?;
            match kind {
                DataFile::Evaluation => inputs.eval = Some(file),
                DataFile::Training | DataFile::Prompts | DataFile::SamplePrompts => {
                    inputs.train.push(file);
                }
            }
        }
        Ok(inputs)
    }

    /// Returns the path that the run is named after.
    pub(crate) fn first_path(&self) -> PathBuf {
        match self.train.first() {
            Some(file) if self.is_stdin(file) => STDIN_COPY.into(),
            Some(file) => file.path.clone(),
            None => PathBuf::new(),
        }
    }

    /// Returns whether the file is the copy of standard input.
    pub(crate) fn is_stdin(&self, file: &InputFile) -> bool {
        self.stdin_copy().is_some_and(|copy| copy == file.path)
    }

    /// Returns the path of the copy of standard input, if the path of a file is `-`. The copy is
    /// deleted when this value is dropped.
    pub(crate) fn stdin_copy(&self) -> Option<&Path> {
        self.stdin.as_ref().map(|copy| copy.path())
    }
}

/// Copies standard input, which may be larger than the memory, to a temporary file.
async fn copy_stdin(context: &mut CommandContext<'_>) -> Result<NamedTempFile, CommandError> {
    let failed = |error: io::Error| CommandError::file("read", "standard input", &error);
    if context.environment.terminals.input {
        context.notice("reading examples from standard input; end them with Ctrl-D");
    }
    let copy = NamedTempFile::new().map_err(failed)?;
    let file = copy.reopen().map_err(failed)?;
    context.environment.input.clone().copy_to(file).await.map_err(failed)?;
    Ok(copy)
}

/// First bytes of a Zstandard frame.
const ZSTD: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn input(folder: &Path, name: &str, bytes: &[u8]) -> InputFile {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        InputFile::new(DataFile::Training, &path)
    }

    #[test]
    fn compressed_files_are_recognized_by_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let read = |file: &InputFile| {
            let mut text = String::new();
            file.open().unwrap().read_to_string(&mut text).map(|_| text)
        };
        let gzip = |text: &[u8]| {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(text).unwrap();
            encoder.finish().unwrap()
        };
        let members = [gzip(b"first\n"), gzip(b"second\n")].concat();
        assert_eq!(read(&input(folder.path(), "a.jsonl", &members)).unwrap(), "first\nsecond\n");
        let cut = &members[..members.len() - 5];
        assert!(read(&input(folder.path(), "a.gz", cut)).is_err(), "a truncated file was accepted");
        let frame = zstd::encode_all(&b"text\n"[..], 1).unwrap();
        assert_eq!(read(&input(folder.path(), "a.zst", &frame)).unwrap(), "text\n");
        assert!(read(&input(folder.path(), "a.zst", &frame[..frame.len() - 3])).is_err());
        assert_eq!(read(&input(folder.path(), "empty", b"")).unwrap(), "");
    }

    #[test]
    fn other_formats_are_named_with_the_way_to_convert_them() {
        let folder = tempfile::tempdir().unwrap();
        for (name, start, found, advice) in [
            ("a.parquet", &b"PAR1xxxx"[..], "it is a Parquet file", "pandas.read_parquet("),
            ("a.arrow", b"ARROW1xx", "it is an Arrow file", "pandas.read_feather("),
            ("a.xlsx", b"PK\x03\x04xx", "it is an Excel file", "pandas.read_excel("),
            ("a.zip", b"PK\x03\x04xx", "it is a ZIP archive", "unzip "),
            ("a.jsonl.xz", b"\xFD7zXZ\0", "it is compressed with xz", "xz -dc "),
            ("a.bz2", b"BZh91AY", "it is compressed with bzip2", "bzip2 -dc "),
            ("a.jsonl", b"\xFF\xFE{\0", "it is UTF-16", "iconv -f utf-16"),
            ("a.csv", b"prompt,c", "it is a table, not JSON Lines", "pandas.read_csv("),
            ("a.tsv", b"prompt\tc", "it is a table, not JSON Lines", "pandas.read_table("),
        ] {
            let error = input(folder.path(), name, start).check().unwrap_err();
            assert!(error.to_string().ends_with(&format!(": {found}")), "{error}");
            assert!(error.hint_text().unwrap().contains(advice), "{error:?}");
        }
        // Only the content decides whether a table is JSON.
        input(folder.path(), "b.csv", b"{\"text\": 1}").check().unwrap();
    }
}
