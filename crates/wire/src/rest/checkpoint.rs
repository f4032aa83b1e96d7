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
use crate::secret::Address;
use crate::time::Timestamp;

use super::Cursor;

/// Asks for all checkpoints of a training run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListCheckpoints {
    /// The run.
    pub run_id: ModelId,
}

/// Asks for a page of all the caller's checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListUserCheckpoints {
    /// How many at most.
    pub limit: u64,
    /// How many to skip.
    pub offset: u64,
}

impl Default for ListUserCheckpoints {
    fn default() -> Self {
        Self { limit: 100, offset: 0 }
    }
}

/// Checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointPage {
    /// The checkpoints.
    pub checkpoints: Vec<Checkpoint>,
    /// Where the page stands, if this is one.
    #[serde(default)]
    pub cursor: Option<Cursor>,
}

/// Saved weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Kind and name: `weights/step-100`.
    pub checkpoint_id: String,
    /// What it is for.
    pub checkpoint_type: CheckpointKind,
    /// When it was saved.
    pub time: Timestamp,
    /// Its `tinker://` address.
    pub tinker_path: String,
    /// How large it is.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Whether everyone may read it.
    #[serde(default)]
    pub public: bool,
    /// What was remembered with it.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
    /// When it will be deleted.
    #[serde(default)]
    pub expires_at: Option<Timestamp>,
}

/// Deletes a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeleteCheckpoint {
    /// The checkpoint.
    pub path: TinkerPath,
}

/// Lets everyone read a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishCheckpoint {
    /// The checkpoint.
    pub path: TinkerPath,
}

/// Lets only its owner read a checkpoint again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnpublishCheckpoint {
    /// The checkpoint.
    pub path: TinkerPath,
}

/// Sets when a checkpoint is deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetCheckpointTtl {
    /// The checkpoint.
    pub path: TinkerPath,
    /// When.
    pub ttl: CheckpointTtl,
}

/// The body of [`SetCheckpointTtl`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointTtl {
    /// In this many seconds; never if null, which is sent. It must be said: nobody should make a
    /// checkpoint permanent by forgetting a field.
    #[serde(deserialize_with = "Option::deserialize")]
    pub ttl_seconds: Option<u64>,
}

/// Asks where to download the files of a checkpoint saved for that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalWeightsUrlsRequest {
    /// The checkpoint.
    pub path: TinkerPath,
}

/// Where to download files, without a credential: whoever has a URL has the file.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExternalWeightsUrls {
    /// From a file's relative path to its URL. Never log the URLs.
    pub urls: BTreeMap<String, String>,
    /// Until when the URLs work.
    pub expires: Timestamp,
}

impl fmt::Debug for ExternalWeightsUrls {
    /// Names the files and who has them, without the way in: a signature may stand in the path.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let urls: BTreeMap<_, _> =
            self.urls.iter().map(|(file, url)| (file, Address::Host(url))).collect();
        f.debug_struct("ExternalWeightsUrls")
            .field("urls", &urls)
            .field("expires", &self.expires)
            .finish()
    }
}

fn params(path: &TinkerPath) -> Vec<&str> {
    vec![path.run().as_str(), path.kind().segment(), path.name()]
}

macro_rules! checkpoint_call {
    ($($type:ty: $route:ident;)*) => {$(
        impl ApiRequest for $type {
            type Response = ();
            const ROUTE: Route = Route::$route;

            fn params(&self) -> Vec<&str> {
                params(&self.path)
            }

            fn body(&self) -> Result<RequestBody, InvalidInput> {
                Ok(RequestBody::Empty)
            }
        }
    )*};
}

checkpoint_call! {
    DeleteCheckpoint: DeleteCheckpoint;
    PublishCheckpoint: PublishCheckpoint;
    UnpublishCheckpoint: UnpublishCheckpoint;
}

impl ApiRequest for SetCheckpointTtl {
    type Response = ();
    const ROUTE: Route = Route::SetCheckpointTtl;

    fn params(&self) -> Vec<&str> {
        params(&self.path)
    }

    fn body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(&self.ttl)?))
    }
}

impl ApiRequest for ExternalWeightsUrlsRequest {
    type Response = ExternalWeightsUrls;
    const ROUTE: Route = Route::ExternalWeightsUrls;

    fn validate(&self) -> Result<(), InvalidInput> {
        if self.path.kind() == CheckpointKind::External {
            return Ok(());
        }
        let why = format!("{} is not a checkpoint saved for download", self.path);
        Err(InvalidInput::new("tinker_path", why))
    }

    fn params(&self) -> Vec<&str> {
        params(&self.path)
    }

    fn body(&self) -> Result<RequestBody, InvalidInput> {
        self.validate()?;
        Ok(RequestBody::Empty)
    }
}

json_response!(CheckpointPage, ExternalWeightsUrls);

bare_request! {
    ListCheckpoints: ListCheckpoints => CheckpointPage, |c| params [c.run_id.as_str()];
    ListUserCheckpoints: ListUserCheckpoints => CheckpointPage, |c| params [], query c;
}
