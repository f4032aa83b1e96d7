//! Checkpoints.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::InvalidInput;
use crate::codec::json;
use crate::ids::ModelId;
use crate::metadata::Metadata;
use crate::path::{CheckpointKind, TinkerPath};
use crate::request::{ApiRequest, RequestBody, bare_request, json_response};
use crate::route::Route;
use crate::secret::RedactedUrl;
use crate::setters::setters;
use crate::time::Timestamp;

use super::Cursor;

/// Lists all checkpoints of a training run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListCheckpoints {
    /// Id of the run.
    pub run_id: ModelId,
}

impl ListCheckpoints {
    /// Lists the checkpoints of the run `run_id`.
    pub fn new(run_id: impl Into<ModelId>) -> Self {
        Self { run_id: run_id.into() }
    }
}

/// Lists all checkpoints of the caller, one page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ListUserCheckpoints {
    /// Maximum number of checkpoints to return. Defaults to 100.
    pub limit: u64,
    /// Number of checkpoints to skip. Defaults to 0.
    pub offset: u64,
}

impl Default for ListUserCheckpoints {
    fn default() -> Self {
        Self { limit: 100, offset: 0 }
    }
}

setters!(ListUserCheckpoints {
    limit: u64;
    offset: u64;
});

/// Checkpoints of a training run, or one page of the caller's checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CheckpointPage {
    /// Checkpoints in the order of the server.
    pub checkpoints: Vec<Checkpoint>,
    /// Position of the page; `None` if the list is complete.
    #[serde(default)]
    pub cursor: Option<Cursor>,
}

impl CheckpointPage {
    /// Creates a page, or a complete list if `cursor` is `None`.
    #[must_use]
    pub fn new(checkpoints: Vec<Checkpoint>, cursor: Option<Cursor>) -> Self {
        Self { checkpoints, cursor }
    }
}

/// A checkpoint: weights, and for training checkpoints the optimizer state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Checkpoint {
    /// Kind and name, for example `weights/step-100`.
    pub checkpoint_id: String,
    /// Purpose of the checkpoint.
    pub checkpoint_type: CheckpointKind,
    /// Time at which the checkpoint was saved.
    pub time: Timestamp,
    /// `tinker://` path.
    pub tinker_path: String,
    /// Size in bytes.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Whether every user may read the checkpoint.
    #[serde(default)]
    pub public: bool,
    /// Metadata that the user attached to the checkpoint.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
    /// Time at which the server deletes the checkpoint; `None` if it is permanent.
    #[serde(default)]
    pub expires_at: Option<Timestamp>,
}

impl Checkpoint {
    /// Describes a private, permanent checkpoint of unknown size.
    #[must_use]
    pub fn new(path: &TinkerPath, time: Timestamp) -> Self {
        Self {
            checkpoint_id: path.checkpoint_id(),
            checkpoint_type: path.kind(),
            time,
            tinker_path: path.to_string(),
            size_bytes: None,
            public: false,
            user_metadata: None,
            expires_at: None,
        }
    }
}

setters!(Checkpoint {
    size_bytes: Option<u64>;
    public: bool;
    user_metadata: Option<Metadata>;
    expires_at: Option<Timestamp>;
});

/// Deletes a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeleteCheckpoint {
    /// Path of the checkpoint.
    pub path: TinkerPath,
}

/// Makes a checkpoint readable for every user.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublishCheckpoint {
    /// Path of the checkpoint.
    pub path: TinkerPath,
}

/// Makes a published checkpoint private again.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnpublishCheckpoint {
    /// Path of the checkpoint.
    pub path: TinkerPath,
}

/// Sets the time to live of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetCheckpointTtl {
    /// Path of the checkpoint.
    pub path: TinkerPath,
    /// Request body: the new time to live.
    pub ttl: CheckpointTtl,
}

impl SetCheckpointTtl {
    /// Deletes the checkpoint in `ttl_seconds` seconds, or makes it permanent if `None`.
    #[must_use]
    pub fn new(path: TinkerPath, ttl_seconds: Option<u64>) -> Self {
        Self { path, ttl: CheckpointTtl { ttl_seconds } }
    }
}

/// Body of [`SetCheckpointTtl`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointTtl {
    /// Seconds until the checkpoint is deleted; `null` makes it permanent. The field is required,
    /// so that a client cannot make a checkpoint permanent by omitting it.
    #[serde(deserialize_with = "Option::deserialize")]
    pub ttl_seconds: Option<u64>,
}

/// Returns download URLs for the files of a checkpoint saved with
/// [`SaveWeightsExternal`](crate::SaveWeightsExternal).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExternalWeightsUrlsRequest {
    /// Path of the checkpoint, of kind [`CheckpointKind::External`] or [`CheckpointKind::Sampler`].
    /// The hosted service accepts external checkpoints only.
    pub path: TinkerPath,
}

/// Download URLs of a checkpoint. Each URL grants access to its file without a credential.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ExternalWeightsUrls {
    /// URL by relative file path. Never log the URLs.
    pub urls: BTreeMap<String, String>,
    /// Time at which the URLs expire.
    pub expires: Timestamp,
}

impl ExternalWeightsUrls {
    /// Creates a response with URLs that are valid until `expires`.
    #[must_use]
    pub fn new(urls: BTreeMap<String, String>, expires: Timestamp) -> Self {
        Self { urls, expires }
    }
}

impl fmt::Debug for ExternalWeightsUrls {
    /// Prints the file names and hosts, and omits paths and queries, which contain the signature.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let urls: BTreeMap<_, _> =
            self.urls.iter().map(|(file, url)| (file, RedactedUrl::Host(url))).collect();
        f.debug_struct("ExternalWeightsUrls")
            .field("urls", &urls)
            .field("expires", &self.expires)
            .finish()
    }
}

fn params(path: &TinkerPath) -> Vec<&str> {
    vec![path.run().as_str(), path.kind().segment(), path.name()]
}

macro_rules! checkpoint_request {
    ($($type:ident => $response:ty;)*) => {$(
        impl $type {
            /// Creates a request for the checkpoint at `path`.
            #[must_use]
            pub fn new(path: TinkerPath) -> Self {
                Self { path }
            }
        }

        impl ApiRequest for $type {
            type Response = $response;
            const ROUTE: Route = Route::$type;

            fn params(&self) -> Vec<&str> {
                params(&self.path)
            }

            fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
                Ok(RequestBody::Empty)
            }
        }
    )*};
}

checkpoint_request! {
    DeleteCheckpoint => ();
    PublishCheckpoint => ();
    UnpublishCheckpoint => ();
}

impl ApiRequest for SetCheckpointTtl {
    type Response = ();
    const ROUTE: Route = Route::SetCheckpointTtl;

    fn params(&self) -> Vec<&str> {
        params(&self.path)
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(&self.ttl)?))
    }
}

impl ExternalWeightsUrlsRequest {
    /// Creates a request for the checkpoint at `path`.
    #[must_use]
    pub fn new(path: TinkerPath) -> Self {
        Self { path }
    }
}

impl ApiRequest for ExternalWeightsUrlsRequest {
    type Response = ExternalWeightsUrls;
    const ROUTE: Route = Route::ExternalWeightsUrls;

    fn validate(&self) -> Result<(), InvalidInput> {
        if self.path.kind() != CheckpointKind::Training {
            return Ok(());
        }
        let reason = format!(
            "{} has the kind {}, expected {} or {}",
            self.path,
            self.path.kind(),
            CheckpointKind::External,
            CheckpointKind::Sampler
        );
        Err(InvalidInput::new("tinker_path", reason))
    }

    fn params(&self) -> Vec<&str> {
        params(&self.path)
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Empty)
    }
}

json_response!(CheckpointPage, ExternalWeightsUrls);

bare_request! {
    ListCheckpoints: ListCheckpoints => CheckpointPage, |r| params [r.run_id.as_str()];
    ListUserCheckpoints: ListUserCheckpoints => CheckpointPage, |r| params [], query r;
}
