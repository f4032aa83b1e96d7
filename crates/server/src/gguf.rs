//! GGUF files as base models: their configuration and their tokenizer.

use std::path::{Path, PathBuf};

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
/// The tokenizer is that of `tokenizer.json` beside the file, if there is one. Otherwise the
/// tokenizer of the file is written to a folder in `tokenizer_dir`, so that other programs can load
/// it. If the tokenizer is not supported, a warning says so: only requests that contain text need
/// it.
///
/// # Errors
/// As [`GgufModel::open`], and if the tokenizer cannot be written.
pub(crate) fn open(name: &str, path: &Path, tokenizer_dir: &Path) -> Result<GgufBase, Error> {
    let model = GgufModel::open(path)?;
    let mut warnings = model.warnings().to_vec();
    let beside = path.parent().unwrap_or(Path::new(""));
    let tokenizer = if beside.join("tokenizer.json").is_file() {
        beside.to_owned()
    } else {
        let folder = tokenizer_dir.join("gguf").join(file_name(name));
        match model.tokenizer_files() {
            Ok(files) => {
                std::fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
                replace(&folder.join("tokenizer.json"), &files.tokenizer)?;
                replace(&folder.join("tokenizer_config.json"), &files.config)?;
            }
            Err(error) => {
                // An earlier file of this name may have left a tokenizer there.
                let _ = std::fs::remove_dir_all(&folder);
                warnings.push(format!("clients cannot use the tokenizer of {name}: {error}"));
            }
        }
        folder
    };
    let tokenizer = std::path::absolute(&tokenizer).unwrap_or(tokenizer);
    Ok(GgufBase { config: model.config().clone(), tokenizer, warnings })
}

/// Writes a file unless it already has this content.
fn replace(path: &Path, text: &str) -> Result<(), Error> {
    if std::fs::read(path).is_ok_and(|old| old == text.as_bytes()) {
        return Ok(());
    }
    write_file(path, |out| out.write_all(text.as_bytes()))
}

/// Returns a file name for a model name, distinct from those of other names: other bytes than
/// letters, digits, `-` and `_` are percent-encoded.
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
