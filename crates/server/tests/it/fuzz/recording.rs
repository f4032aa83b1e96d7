//! Recorded requests of the reference SDK, which the fuzz test mutates.

use std::path::Path;

use base64::Engine as _;
use serde_json::Value;

/// Session id in the recordings.
pub(super) const RECORDED_SESSION: &str = "11111111-2222-4333-8444-555555555555";

/// Headers that change how the server decodes a request or encodes its response.
const RELEVANT_HEADERS: [&str; 3] = ["content-type", "content-encoding", "accept"];

/// A recorded HTTP request.
pub(super) struct Recording {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: RecordedBody,
}

pub(super) enum RecordedBody {
    None,
    Json(Value),
    /// A training pass in the protobuf encoding.
    Proto(Vec<u8>),
}

impl Recording {
    /// Reads all recordings, ordered by file name.
    pub(super) fn all() -> Vec<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wire");
        let mut paths: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.to_string_lossy().ends_with(".request.json"))
            .collect();
        paths.sort();
        paths.iter().map(|path| Self::read(path)).collect()
    }

    fn read(path: &Path) -> Self {
        let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let text = |key: &str| file[key].as_str().unwrap().to_owned();
        let headers = file["headers"].as_object().into_iter().flatten();
        let headers = headers
            .filter(|(name, _)| RELEVANT_HEADERS.contains(&name.as_str()))
            .map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()))
            .collect();
        let body = match (&file["body"], file["body_base64"].as_str()) {
            (_, Some(text)) => {
                RecordedBody::Proto(base64::engine::general_purpose::STANDARD.decode(text).unwrap())
            }
            (Value::Null, None) => RecordedBody::None,
            (value, None) => RecordedBody::Json(value.clone()),
        };
        Self { method: text("method"), path: text("path"), headers, body }
    }
}
