//! Saving and loading weights.

use serde::{Deserialize, Serialize};

use crate::future::SubmitResponse;
use crate::ids::{ModelId, SamplerId, Seq, SessionId};
use crate::metadata::Metadata;
use crate::optim::OptimizerConfig;
use crate::request::{json_output, json_request, json_response};
use crate::secret::Secret;
use crate::{InvalidInput, JsonObject};

/// Saves a model's weights and optimizer state as a training checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights")]
pub struct SaveWeights {
    /// The model.
    pub model_id: ModelId,
    /// The checkpoint's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Its place among the model's requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// How long to keep it, in seconds; for ever if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// Whether a checkpoint of that name may be replaced.
    #[serde(default)]
    pub overwrite: bool,
    /// Anything to remember with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<Metadata>,
}

impl SaveWeights {
    /// Saves under a name that is not taken yet, for ever.
    pub fn new(model_id: ModelId, seq_id: Seq, name: impl Into<String>) -> Self {
        Self {
            model_id,
            path: Some(name.into()),
            seq_id: Some(seq_id),
            ttl_seconds: None,
            overwrite: false,
            user_metadata: None,
        }
    }
}

/// A training checkpoint was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights")]
pub struct WeightsSaved {
    /// Its `tinker://` address.
    pub path: String,
}

/// Saves a model's weights to sample from: under a name, or only for a sampling session made along
/// with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights_for_sampler")]
pub struct SaveWeightsForSampler {
    /// The model.
    pub model_id: ModelId,
    /// The checkpoint's name, if it is to have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The number of the sampling session to make, if it has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_session_seq_id: Option<u32>,
    /// Its place among the model's requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// How long to keep it, in seconds; for ever if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// Anything to remember with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<Metadata>,
}

impl SaveWeightsForSampler {
    /// Saves under a name, for ever.
    pub fn named(model_id: ModelId, seq_id: Seq, name: impl Into<String>) -> Self {
        Self { path: Some(name.into()), ..Self::unnamed(model_id, seq_id) }
    }

    /// Saves only for a sampling session made along with it, the session's `n`th.
    #[must_use]
    pub fn ephemeral(model_id: ModelId, seq_id: Seq, n: u32) -> Self {
        Self { sampling_session_seq_id: Some(n), ..Self::unnamed(model_id, seq_id) }
    }

    fn unnamed(model_id: ModelId, seq_id: Seq) -> Self {
        Self {
            model_id,
            path: None,
            sampling_session_seq_id: None,
            seq_id: Some(seq_id),
            ttl_seconds: None,
            user_metadata: None,
        }
    }
}

/// Weights to sample from were saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights_for_sampler")]
pub struct SamplerWeightsSaved {
    /// Their `tinker://` address, if they have a name.
    #[serde(default)]
    pub path: Option<String>,
    /// The sampling session made along with them, if they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_session_id: Option<SamplerId>,
}

/// Saves a model's weights as files to download.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights_external")]
pub struct SaveWeightsExternal {
    /// The model.
    pub model_id: ModelId,
    /// The checkpoint's name.
    pub path: String,
    /// Its place among the model's requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// How long to keep it, in seconds; for ever if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// Whom to encrypt the files for, as `age` public keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_encryption_recipients: Option<Vec<String>>,
}

impl SaveWeightsExternal {
    /// Saves under a name, for ever, for anyone to read who has the URLs.
    pub fn new(model_id: ModelId, seq_id: Seq, name: impl Into<String>) -> Self {
        Self {
            model_id,
            path: name.into(),
            seq_id: Some(seq_id),
            ttl_seconds: None,
            age_encryption_recipients: None,
        }
    }
}

/// Files to download were saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights_external")]
pub struct ExternalWeightsSaved {
    /// Their `tinker://` address.
    #[serde(default)]
    pub path: Option<String>,
    /// How large they are.
    #[serde(default)]
    pub size_bytes: Option<u64>,
}

/// Loads a checkpoint into a model, or makes a new model of it.
///
/// An existing model is named by `model_id` and `seq_id`; a new one by `session_id` and
/// `model_seq_id`. [`LoadWeights::into_model`] and [`LoadWeights::as_new_model`] set the right ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "load_weights")]
pub struct LoadWeights {
    /// The model to load into.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<ModelId>,
    /// Its place among that model's requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// The session of the new model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// The new model's number within it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_seq_id: Option<u32>,
    /// The new model's base model, if not the checkpoint's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// Anything to remember with the new model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<JsonObject>,
    /// The checkpoint's `tinker://` address.
    pub path: String,
    /// Whether the optimizer state is loaded too.
    pub optimizer: bool,
    /// The new model's optimizer, if not the checkpoint's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer_config: Option<OptimizerConfig>,
    /// A key that may read the checkpoint, if the caller's own may not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_access_token: Option<Secret>,
}

impl LoadWeights {
    fn new(path: impl Into<String>) -> Self {
        Self {
            model_id: None,
            seq_id: None,
            session_id: None,
            model_seq_id: None,
            base_model: None,
            user_metadata: None,
            path: path.into(),
            optimizer: false,
            optimizer_config: None,
            weights_access_token: None,
        }
    }

    /// Loads weights alone into an existing model.
    #[must_use]
    pub fn into_model(model_id: ModelId, seq_id: Seq, path: impl Into<String>) -> Self {
        Self { model_id: Some(model_id), seq_id: Some(seq_id), ..Self::new(path) }
    }

    /// Makes the session's `n`th model of a checkpoint's weights.
    #[must_use]
    pub fn as_new_model(session_id: SessionId, n: u32, path: impl Into<String>) -> Self {
        Self { session_id: Some(session_id), model_seq_id: Some(n), ..Self::new(path) }
    }

    fn check_target(&self) -> Result<(), InvalidInput> {
        let new = (self.session_id.is_some(), self.model_seq_id.is_some());
        if !matches!((self.model_id.is_some(), new), (true, (false, false)) | (false, (true, true)))
        {
            let why = "give either a model_id, or a session_id and model_seq_id";
            return Err(InvalidInput::new("model_id", why));
        }
        Ok(())
    }
}

/// A checkpoint was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "load_weights")]
pub struct WeightsLoaded {
    /// The checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<ModelId>,
}

/// Asks what a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightsInfoRequest {
    /// The checkpoint's `tinker://` address.
    pub tinker_path: String,
}

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightsInfo {
    /// The model it was trained from.
    pub base_model: String,
    /// The optimizer it was trained with.
    #[serde(default)]
    pub optimizer_config: OptimizerConfig,
    /// Whether it is an adapter.
    pub is_lora: bool,
    /// The adapter's rank.
    #[serde(default)]
    pub lora_rank: Option<u32>,
    /// Whether the unembedding was trained.
    #[serde(default)]
    pub train_unembed: Option<bool>,
    /// Whether the MLP layers were trained.
    #[serde(default)]
    pub train_mlp: Option<bool>,
    /// Whether the attention layers were trained.
    #[serde(default)]
    pub train_attn: Option<bool>,
}

/// Copies a checkpoint into another project.
///
/// The key of the source, if it needs its own, travels in a header: see
/// [`header::WEIGHTS_ACCESS_TOKEN`](crate::header::WEIGHTS_ACCESS_TOKEN).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyWeights {
    /// The session to copy into, in place of a project.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// The number of the copy within that session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_seq_id: Option<u32>,
    /// The project to copy into.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination_project_id: Option<String>,
    /// The checkpoint's `tinker://` address.
    pub source_path: String,
    /// How long to keep the copy, in seconds; for ever if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// A key that may read the checkpoint; clients send the header instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_access_token: Option<Secret>,
}

impl CopyWeights {
    /// Copies into a project.
    #[must_use]
    pub fn into_project(source_path: impl Into<String>, project_id: impl Into<String>) -> Self {
        Self {
            session_id: None,
            model_seq_id: None,
            destination_project_id: Some(project_id.into()),
            source_path: source_path.into(),
            ttl_seconds: None,
            weights_access_token: None,
        }
    }
}

/// A checkpoint was copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightsCopied {
    /// The copy's `tinker://` address.
    pub tinker_path: String,
}

json_response!(WeightsInfo, WeightsCopied);

json_request! {
    SaveWeights: SaveWeights => SubmitResponse;
    SaveWeightsForSampler: SaveWeightsForSampler => SubmitResponse;
    SaveWeightsExternal: SaveWeightsExternal => SubmitResponse;
    LoadWeights: LoadWeights => SubmitResponse, validate LoadWeights::check_target;
    WeightsInfoRequest: WeightsInfo => WeightsInfo;
    CopyWeights: CopyWeights => WeightsCopied;
}

json_output! {
    SaveWeights: "SaveWeights" => WeightsSaved = "save_weights";
    SaveWeightsForSampler: "SaveWeightsForSampler" => SamplerWeightsSaved = "save_weights_for_sampler";
    SaveWeightsExternal: "SaveWeightsExternal" => ExternalWeightsSaved = "save_weights_external";
    LoadWeights: "LoadWeights" => WeightsLoaded = "load_weights";
}
