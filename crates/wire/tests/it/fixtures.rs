//! Access to the recorded exchanges and golden cases in `fixtures/`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use bytes::Bytes;
use serde_json::Value;

/// Returns the path of `fixtures/<name>`.
pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// Returns the names of all JSON files in a folder.
pub(crate) fn files(name: &str) -> BTreeSet<String> {
    std::fs::read_dir(folder(name))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|file| file.ends_with(".json"))
        .collect()
}

/// Reads a JSON file.
pub(crate) fn load(folder_name: &str, file: &str) -> Value {
    let path = folder(folder_name).join(file);
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Request or response of a recorded exchange.
pub(crate) struct Recorded(pub(crate) Value);

impl Recorded {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.0["headers"][name].as_str()
    }

    pub(crate) fn json(&self) -> &Value {
        &self.0["body"]
    }

    /// Returns the recorded body; JSON is re-encoded.
    pub(crate) fn body(&self) -> Bytes {
        if let Some(text) = self.0["body_base64"].as_str() {
            return base64::engine::general_purpose::STANDARD.decode(text).unwrap().into();
        }
        match self.json() {
            Value::Null => Bytes::new(),
            body => serde_json::to_vec(body).unwrap().into(),
        }
    }

    /// Returns the decompressed body.
    pub(crate) fn plain_body(&self) -> Bytes {
        match self.header("content-encoding") {
            None => self.body(),
            Some("zstd") => {
                tinkex_wire::codec::compress::decompress(&self.body(), 1 << 20).unwrap()
            }
            Some(other) => panic!("unexpected encoding {other}"),
        }
    }
}
