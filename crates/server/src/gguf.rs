//! GGUF files as base models: their configuration and their tokenizer.

use std::path::{Path, PathBuf};

use tinkex_text::files::{CONFIG, SPECIAL, TEMPLATE, TIKTOKEN, TOKENIZER, has_chat_template};
use tinkex_weights::{Error, GgufModel, ModelConfig, write_file};

/// Configuration and tokenizer of a GGUF file that the server offers as a base model.
pub(crate) struct GgufBase {
    pub(crate) config: ModelConfig,
    /// Folder of the tokenizer.
    pub(crate) tokenizer: PathBuf,
    pub(crate) warnings: Vec<String>,
}

/// Checks the GGUF file `path`, which is served as `name`.
///
/// The tokenizer is the first of these that exists:
///
/// 1. the tokenizer in the folder `given`;
/// 2. `tokenizer.json` beside the file;
/// 3. the tokenizer in the file, which is converted and written to a folder in `tokenizer_dir`, so
///    that other programs can load it. If it is not supported, the result has a warning instead of
///    an error: only requests that contain text need a tokenizer.
///
/// If 1 or 2 has no chat template, it is copied to a folder in `tokenizer_dir`, together with the
/// chat template of the file.
///
/// # Errors
/// The errors of [`GgufModel::open`], and an error if the tokenizer cannot be read or written.
pub(crate) fn open(
    name: &str,
    path: &Path,
    given: Option<&Path>,
    tokenizer_dir: &Path,
) -> Result<GgufBase, Error> {
    let model = GgufModel::open(path)?;
    let mut warnings = model.warnings().to_vec();
    let beside = path.parent().unwrap_or(Path::new(""));
    let found = given.or_else(|| beside.join(TOKENIZER).is_file().then_some(beside));
    let folder = tokenizer_dir.join("gguf").join(file_name(name));
    let config = model.config().clone();
    if let Some(found) = found {
        // A malformed file is reported when the tokenizer is checked.
        let needs_template = matches!(has_chat_template(found), Ok(false));
        let Some(template) = model.chat_template().filter(|_| needs_template) else {
            return Ok(GgufBase { config, tokenizer: found.to_owned(), warnings });
        };
        let mut files = vec![(TEMPLATE, template.as_bytes().to_vec())];
        for name in COPIED {
            let path = found.join(name);
            if path.is_file() {
                files.push((name, std::fs::read(&path).map_err(Error::io("read", &path))?));
            }
        }
        fill(&folder, &files)?;
    } else {
        match model.tokenizer_files() {
            Ok(files) => fill(
                &folder,
                &[(TOKENIZER, files.tokenizer.into_bytes()), (CONFIG, files.config.into_bytes())],
            )?,
            Err(error) => {
                fill(&folder, &[])?;
                warnings.push(format!(
                    "clients cannot use the tokenizer of {name}: {error}; put tokenizer.json beside \
                     the file, or pass the folder that has it to tinkex serve, as --tokenizer \
                     {name}=FOLDER"
                ));
            }
        }
    }
    Ok(GgufBase { config, tokenizer: folder, warnings })
}

/// Files of a tokenizer that are copied, if they exist.
const COPIED: [&str; 8] = [
    TOKENIZER,
    TIKTOKEN,
    CONFIG,
    SPECIAL,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Writes the files of a folder of `tokenizer_dir`, and removes the files that an earlier start
/// wrote for another tokenizer. Files that already have their content are not rewritten.
fn fill(folder: &Path, files: &[(&str, Vec<u8>)]) -> Result<(), Error> {
    std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    for (name, content) in files {
        let path = folder.join(name);
        if !std::fs::read(&path).is_ok_and(|old| old == *content) {
            write_file(&path, |out| out.write_all(content))?;
        }
    }
    for name in COPIED.into_iter().chain([TEMPLATE]) {
        if files.iter().all(|(other, _)| *other != name) {
            let path = folder.join(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io("remove", &path)(error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Returns a file name for a model name, distinct from the file names of other models: other bytes
/// than letters, digits, `-` and `_` are percent-encoded.
fn file_name(name: &str) -> String {
    let mut out = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_".contains(&byte) {
            out.push(byte.into());
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_models_become_distinct_file_names() {
        assert_eq!(file_name("Qwen/Qwen3-0.6B"), "Qwen%2FQwen3-0%2E6B");
        assert_eq!(file_name(".."), "%2E%2E");
    }
}
