//! Training runs and sampling sessions.

use serde::{Deserialize, Serialize};

use crate::codec::query;
use crate::ids::{ModelId, SamplerId};
use crate::metadata::Metadata;
use crate::request::{bare_request, json_response};
use crate::setters::setters;
use crate::time::Timestamp;

use super::{AccessScope, Checkpoint, Cursor, ScopeQuery};

/// Lists training runs, one page at a time.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::rest::{AccessScope, ListTrainingRuns};
///
/// let second_page = ListTrainingRuns::default().offset(20).access_scope(AccessScope::Accessible);
/// assert_eq!(second_page.limit, 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ListTrainingRuns {
    /// Maximum number of runs to return. Defaults to 20.
    pub limit: u64,
    /// Number of runs to skip. Defaults to 0.
    pub offset: u64,
    /// Ownership filter. Defaults to [`AccessScope::Owned`].
    pub access_scope: AccessScope,
    /// Restricts the list to one project.
    #[serde(skip_serializing_if = "query::is_blank")]
    pub project_id: Option<String>,
}

impl Default for ListTrainingRuns {
    fn default() -> Self {
        Self { limit: 20, offset: 0, access_scope: AccessScope::Owned, project_id: None }
    }
}

setters!(ListTrainingRuns {
    limit: u64;
    offset: u64;
    access_scope: AccessScope;
    project_id: impl Into<String> => Some(project_id.into());
});

/// One page of training runs: the response to [`ListTrainingRuns`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrainingRunPage {
    /// Training runs, newest first.
    pub training_runs: Vec<TrainingRun>,
    /// Position of the page.
    pub cursor: Cursor,
}

impl TrainingRunPage {
    /// Creates a page.
    #[must_use]
    pub fn new(training_runs: Vec<TrainingRun>, cursor: Cursor) -> Self {
        Self { training_runs, cursor }
    }
}

/// Returns one training run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GetTrainingRun {
    /// Id of the run.
    pub run_id: ModelId,
    /// Ownership filter.
    pub query: ScopeQuery,
}

impl GetTrainingRun {
    /// Requests the run `run_id` if it belongs to the caller.
    pub fn new(run_id: impl Into<ModelId>) -> Self {
        Self { run_id: run_id.into(), query: ScopeQuery::default() }
    }
}

setters!(GetTrainingRun { query: impl Into<ScopeQuery> => query.into(); });

/// Deletes a training run and its checkpoints. An extension of `tinkex` servers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeleteTrainingRun {
    /// Id of the run.
    pub run_id: ModelId,
}

impl DeleteTrainingRun {
    /// Requests the deletion of the run `run_id`.
    pub fn new(run_id: impl Into<ModelId>) -> Self {
        Self { run_id: run_id.into() }
    }
}

/// A training run: one model, from its creation on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrainingRun {
    /// Id of the run, which is the id of its model.
    pub training_run_id: ModelId,
    /// Name of the base model.
    pub base_model: String,
    /// Owner of the model.
    pub model_owner: String,
    /// Whether the run trains a LoRA adapter.
    pub is_lora: bool,
    /// Whether the server lost the state of the model.
    #[serde(default)]
    pub corrupted: bool,
    /// Rank of the LoRA adapter.
    #[serde(default)]
    pub lora_rank: Option<u32>,
    /// Time of the last request for this model.
    pub last_request_time: Timestamp,
    /// Latest training checkpoint.
    #[serde(default)]
    pub last_checkpoint: Option<Checkpoint>,
    /// Latest sampler checkpoint.
    #[serde(default)]
    pub last_sampler_checkpoint: Option<Checkpoint>,
    /// Metadata that the user attached to the run.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
}

impl TrainingRun {
    /// Creates a run without an adapter, checkpoints or metadata.
    pub fn new(
        training_run_id: ModelId,
        base_model: impl Into<String>,
        model_owner: impl Into<String>,
        last_request_time: Timestamp,
    ) -> Self {
        Self {
            training_run_id,
            base_model: base_model.into(),
            model_owner: model_owner.into(),
            is_lora: false,
            corrupted: false,
            lora_rank: None,
            last_request_time,
            last_checkpoint: None,
            last_sampler_checkpoint: None,
            user_metadata: None,
        }
    }
}

setters!(TrainingRun {
    is_lora: bool;
    corrupted: bool;
    lora_rank: Option<u32>;
    last_checkpoint: Option<Checkpoint>;
    last_sampler_checkpoint: Option<Checkpoint>;
    user_metadata: Option<Metadata>;
});

/// Returns one sampling session.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GetSampler {
    /// Id of the sampling session.
    pub sampler_id: SamplerId,
}

impl GetSampler {
    /// Requests the sampling session `sampler_id`.
    pub fn new(sampler_id: impl Into<SamplerId>) -> Self {
        Self { sampler_id: sampler_id.into() }
    }
}

/// Ends a sampling session, and releases the weights that were saved for it. An extension of
/// `tinkex` servers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CloseSampler {
    /// Id of the sampling session.
    pub sampler_id: SamplerId,
}

impl CloseSampler {
    /// Requests the end of the sampling session `sampler_id`.
    pub fn new(sampler_id: impl Into<SamplerId>) -> Self {
        Self { sampler_id: sampler_id.into() }
    }
}

/// Model and checkpoint of a sampling session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SamplerInfo {
    /// Id of the sampling session.
    pub sampler_id: SamplerId,
    /// Name of the base model.
    pub base_model: String,
    /// `tinker://` path of the checkpoint; `None` for the base model itself.
    #[serde(default)]
    pub model_path: Option<String>,
    /// Tokenizer of the model. The local server sends it; other servers leave clients to derive the
    /// tokenizer from the name of the base model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer_id: Option<String>,
    /// Folder or GGUF file with the weights of the base model, on the machine of the server. Only
    /// `tinkex` servers send it, and only to clients on the same machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model_path: Option<String>,
}

impl SamplerInfo {
    /// Describes a sampling session of the base model itself.
    pub fn new(sampler_id: SamplerId, base_model: impl Into<String>) -> Self {
        let model_path = None;
        let tokenizer_id = None;
        let base_model_path = None;
        let base_model = base_model.into();
        Self { sampler_id, base_model, model_path, tokenizer_id, base_model_path }
    }
}

setters!(SamplerInfo {
    model_path: Option<String>;
    tokenizer_id: Option<String>;
    base_model_path: Option<String>;
});

json_response!(TrainingRunPage, TrainingRun, SamplerInfo);

bare_request! {
    ListTrainingRuns: ListTrainingRuns => TrainingRunPage, |r| params [], query r;
    GetTrainingRun: GetTrainingRun => TrainingRun, |r| params [r.run_id.as_str()], query &r.query;
    DeleteTrainingRun: DeleteTrainingRun => (), |r| params [r.run_id.as_str()];
    CloseSampler: CloseSampler => (), |r| params [r.sampler_id.as_str()];
    GetSampler: GetSampler => SamplerInfo, |r| params [r.sampler_id.as_str()];
}
