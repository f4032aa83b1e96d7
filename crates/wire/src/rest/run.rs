//! Training runs.

use serde::{Deserialize, Serialize};

use crate::codec::query;
use crate::ids::{ModelId, SamplerId};
use crate::metadata::Metadata;
use crate::request::{bare_request, json_response};
use crate::time::Timestamp;

use super::{AccessScope, Checkpoint, Cursor, ScopeQuery};

/// Asks for a page of training runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListTrainingRuns {
    /// How many at most.
    pub limit: u64,
    /// How many to skip.
    pub offset: u64,
    /// Whose.
    pub access_scope: AccessScope,
    /// Only those of this project.
    #[serde(skip_serializing_if = "query::is_blank")]
    pub project_id: Option<String>,
}

impl Default for ListTrainingRuns {
    fn default() -> Self {
        Self { limit: 20, offset: 0, access_scope: AccessScope::Owned, project_id: None }
    }
}

/// A page of training runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainingRunPage {
    /// The runs, newest first.
    pub training_runs: Vec<TrainingRun>,
    /// Where the page stands.
    pub cursor: Cursor,
}

/// Asks for one training run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetTrainingRun {
    /// The run.
    pub run_id: ModelId,
    /// Whose runs may be looked at.
    pub query: ScopeQuery,
}

/// A model's history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainingRun {
    /// Its id: the model's.
    pub training_run_id: ModelId,
    /// What it started from.
    pub base_model: String,
    /// Whose it is.
    pub model_owner: String,
    /// Whether an adapter was trained.
    pub is_lora: bool,
    /// Whether its state was lost.
    #[serde(default)]
    pub corrupted: bool,
    /// The adapter's rank.
    #[serde(default)]
    pub lora_rank: Option<u32>,
    /// When it was last used.
    pub last_request_time: Timestamp,
    /// Its newest training checkpoint.
    #[serde(default)]
    pub last_checkpoint: Option<Checkpoint>,
    /// Its newest checkpoint to sample from.
    #[serde(default)]
    pub last_sampler_checkpoint: Option<Checkpoint>,
    /// What was remembered with it.
    #[serde(default)]
    pub user_metadata: Option<Metadata>,
}

/// Asks for one sampling session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetSampler {
    /// The sampling session.
    pub sampler_id: SamplerId,
}

/// What a sampling session samples from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerInfo {
    /// Its id.
    pub sampler_id: SamplerId,
    /// The base model.
    pub base_model: String,
    /// The checkpoint, if any.
    #[serde(default)]
    pub model_path: Option<String>,
    /// Which tokenizer to use. Only servers of our own say so; others leave it to the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer_id: Option<String>,
}

json_response!(TrainingRunPage, TrainingRun, SamplerInfo);

bare_request! {
    ListTrainingRuns: ListTrainingRuns => TrainingRunPage, |c| params [], query c;
    GetTrainingRun: GetTrainingRun => TrainingRun, |c| params [c.run_id.as_str()], query &c.query;
    GetSampler: GetSampler => SamplerInfo, |c| params [c.sampler_id.as_str()];
}
