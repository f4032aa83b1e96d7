//! Saving and loading weights.

use serde::{Deserialize, Serialize};

use crate::future::SubmitResponse;
use crate::ids::{ModelId, SamplerId, Seq, SessionId};
use crate::metadata::Metadata;
use crate::optim::OptimizerConfig;
use crate::request::{json_output, json_request, json_response};
use crate::secret::Secret;
use crate::setters::setters;
use crate::training::LoraConfig;
use crate::{InvalidInput, JsonObject};

/// Saves a model's weights and optimizer state as a training checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights")]
#[non_exhaustive]
pub struct SaveWeights {
    /// Id of the model.
    pub model_id: ModelId,
    /// Name of the checkpoint; chosen by the server if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Sequence number among the requests of the model. The server executes them in this order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// Seconds until the server deletes the checkpoint; `None` keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// Whether to replace an existing checkpoint of that name. Defaults to `false`.
    #[serde(default)]
    pub overwrite: bool,
    /// Metadata to store with the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<Metadata>,
}

impl SaveWeights {
    /// Saves a permanent checkpoint that replaces no other.
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

setters!(SaveWeights {
    ttl_seconds: Option<u64>;
    overwrite: bool;
    user_metadata: Option<Metadata>;
});

/// Result of [`SaveWeights`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights")]
#[non_exhaustive]
pub struct WeightsSaved {
    /// `tinker://` path of the checkpoint.
    pub path: String,
}

impl WeightsSaved {
    /// Creates a result for the checkpoint at `path`.
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into() }
    }
}

/// Saves a model's weights for sampling: as a named checkpoint, or only for a sampling session that
/// the same request creates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights_for_sampler")]
#[non_exhaustive]
pub struct SaveWeightsForSampler {
    /// Id of the model.
    pub model_id: ModelId,
    /// Name of the checkpoint; `None` for an ephemeral checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Sequence number of the sampling session to create for an ephemeral checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_session_seq_id: Option<u32>,
    /// Sequence number among the requests of the model. The server executes them in this order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// Seconds until the server deletes the checkpoint; `None` keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// Metadata to store with the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<Metadata>,
}

impl SaveWeightsForSampler {
    /// Saves a permanent named checkpoint.
    pub fn named(model_id: ModelId, seq_id: Seq, name: impl Into<String>) -> Self {
        Self { path: Some(name.into()), ..Self::without_name(model_id, seq_id) }
    }

    /// Saves an ephemeral checkpoint and creates sampling session number `n` of the session for it.
    #[must_use]
    pub fn ephemeral(model_id: ModelId, seq_id: Seq, n: u32) -> Self {
        Self { sampling_session_seq_id: Some(n), ..Self::without_name(model_id, seq_id) }
    }

    fn without_name(model_id: ModelId, seq_id: Seq) -> Self {
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

setters!(SaveWeightsForSampler {
    sampling_session_seq_id: Option<u32>;
    ttl_seconds: Option<u64>;
    user_metadata: Option<Metadata>;
});

/// Result of [`SaveWeightsForSampler`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights_for_sampler")]
#[non_exhaustive]
pub struct SamplerWeightsSaved {
    /// `tinker://` path of a named checkpoint.
    #[serde(default)]
    pub path: Option<String>,
    /// Sampling session of an ephemeral checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_session_id: Option<SamplerId>,
}

impl SamplerWeightsSaved {
    /// Creates a result for a named checkpoint.
    pub fn named(path: impl Into<String>) -> Self {
        Self { path: Some(path.into()), sampling_session_id: None }
    }

    /// Creates a result for an ephemeral checkpoint.
    #[must_use]
    pub fn ephemeral(sampling_session_id: SamplerId) -> Self {
        Self { path: None, sampling_session_id: Some(sampling_session_id) }
    }
}

/// Saves a model's weights as files for download.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights_external")]
#[non_exhaustive]
pub struct SaveWeightsExternal {
    /// Id of the model.
    pub model_id: ModelId,
    /// Name of the checkpoint.
    pub path: String,
    /// Sequence number among the requests of the model. The server executes them in this order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// Seconds until the server deletes the checkpoint; `None` keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// `age` public keys for which the files are encrypted; `None` leaves them unencrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_encryption_recipients: Option<Vec<String>>,
}

impl SaveWeightsExternal {
    /// Saves a permanent checkpoint without encryption.
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

setters!(SaveWeightsExternal {
    ttl_seconds: Option<u64>;
    age_encryption_recipients: Option<Vec<String>>;
});

/// Result of [`SaveWeightsExternal`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "save_weights_external")]
#[non_exhaustive]
pub struct ExternalWeightsSaved {
    /// `tinker://` path of the checkpoint.
    #[serde(default)]
    pub path: Option<String>,
    /// Total size of the files in bytes.
    #[serde(default)]
    pub size_bytes: Option<u64>,
}

impl ExternalWeightsSaved {
    /// Creates a result for the checkpoint at `path`.
    pub fn new(path: impl Into<String>, size_bytes: u64) -> Self {
        Self { path: Some(path.into()), size_bytes: Some(size_bytes) }
    }
}

/// Loads a checkpoint into an existing model, or creates a model from it.
///
/// `model_id` and `seq_id` address an existing model, `session_id` and `model_seq_id` a new one.
/// Use [`LoadWeights::into_model`] and [`LoadWeights::as_new_model`] to set the right pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "load_weights")]
#[non_exhaustive]
pub struct LoadWeights {
    /// Id of the existing model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<ModelId>,
    /// Sequence number among the requests of the existing model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// Session of the new model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Sequence number of the new model within the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_seq_id: Option<u32>,
    /// Base model of the new model; the checkpoint's base model if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// Metadata to store with the new model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<JsonObject>,
    /// `tinker://` path of the checkpoint.
    pub path: String,
    /// Whether to load the optimizer state too.
    pub optimizer: bool,
    /// Optimizer of the new model; the checkpoint's optimizer if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer_config: Option<OptimizerConfig>,
    /// API key with access to the checkpoint, if the caller's key has none.
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

    /// Loads weights without optimizer state into an existing model.
    #[must_use]
    pub fn into_model(model_id: ModelId, seq_id: Seq, path: impl Into<String>) -> Self {
        Self { model_id: Some(model_id), seq_id: Some(seq_id), ..Self::new(path) }
    }

    /// Creates model number `n` of the session from a checkpoint's weights.
    #[must_use]
    pub fn as_new_model(session_id: SessionId, n: u32, path: impl Into<String>) -> Self {
        Self { session_id: Some(session_id), model_seq_id: Some(n), ..Self::new(path) }
    }

    fn validate_target(&self) -> Result<(), InvalidInput> {
        let new = (self.session_id.is_some(), self.model_seq_id.is_some());
        if !matches!((self.model_id.is_some(), new), (true, (false, false)) | (false, (true, true)))
        {
            let reason = "set either model_id, or session_id and model_seq_id";
            return Err(InvalidInput::new("model_id", reason));
        }
        Ok(())
    }
}

setters!(LoadWeights {
    base_model: Option<String>;
    user_metadata: Option<JsonObject>;
    optimizer: bool;
    optimizer_config: Option<OptimizerConfig>;
    weights_access_token: Option<Secret>;
});

/// Result of [`LoadWeights`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "load_weights")]
#[non_exhaustive]
pub struct WeightsLoaded {
    /// `tinker://` path of the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Id of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<ModelId>,
}

setters!(WeightsLoaded {
    path: Option<String>;
    model_id: Option<ModelId>;
});

/// Returns the training configuration of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WeightsInfoRequest {
    /// `tinker://` path of the checkpoint.
    pub tinker_path: String,
}

impl WeightsInfoRequest {
    /// Requests the configuration of the checkpoint at `tinker_path`.
    pub fn new(tinker_path: impl Into<String>) -> Self {
        Self { tinker_path: tinker_path.into() }
    }
}

/// Training configuration of a checkpoint: the response to [`WeightsInfoRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WeightsInfo {
    /// Name of the base model.
    pub base_model: String,
    /// Optimizer of the model.
    #[serde(default)]
    pub optimizer_config: OptimizerConfig,
    /// Whether the checkpoint is a LoRA adapter.
    pub is_lora: bool,
    /// Rank of the adapter.
    #[serde(default)]
    pub lora_rank: Option<u32>,
    /// Whether the adapter covers the unembedding.
    #[serde(default)]
    pub train_unembed: Option<bool>,
    /// Whether the adapter covers the MLP layers.
    #[serde(default)]
    pub train_mlp: Option<bool>,
    /// Whether the adapter covers the attention layers.
    #[serde(default)]
    pub train_attn: Option<bool>,
}

impl WeightsInfo {
    /// Describes a checkpoint of a fully trained model.
    pub fn new(base_model: impl Into<String>, optimizer_config: OptimizerConfig) -> Self {
        Self {
            base_model: base_model.into(),
            optimizer_config,
            is_lora: false,
            lora_rank: None,
            train_unembed: None,
            train_mlp: None,
            train_attn: None,
        }
    }

    /// Describes a checkpoint of a LoRA adapter.
    #[must_use]
    pub fn lora(self, lora: LoraConfig) -> Self {
        Self {
            is_lora: true,
            lora_rank: Some(lora.rank),
            train_unembed: Some(lora.train_unembed),
            train_mlp: Some(lora.train_mlp),
            train_attn: Some(lora.train_attn),
            ..self
        }
    }
}

/// Copies a checkpoint into another project.
///
/// If the caller's API key cannot read the source, send a key that can in
/// [`header::WEIGHTS_ACCESS_TOKEN`](crate::header::WEIGHTS_ACCESS_TOKEN).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CopyWeights {
    /// Destination session, as an alternative to a project.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Sequence number of the copy within the destination session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_seq_id: Option<u32>,
    /// Destination project.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination_project_id: Option<String>,
    /// `tinker://` path of the checkpoint.
    pub source_path: String,
    /// Seconds until the server deletes the copy; `None` keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// API key with access to the source. Clients send the header instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_access_token: Option<Secret>,
}

impl CopyWeights {
    /// Copies a checkpoint into a project, permanently.
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

setters!(CopyWeights { ttl_seconds: Option<u64>; });

/// Response to [`CopyWeights`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WeightsCopied {
    /// `tinker://` path of the copy.
    pub tinker_path: String,
}

impl WeightsCopied {
    /// Creates a response for the copy at `tinker_path`.
    pub fn new(tinker_path: impl Into<String>) -> Self {
        Self { tinker_path: tinker_path.into() }
    }
}

json_response!(WeightsInfo, WeightsCopied);

json_request! {
    SaveWeights: SaveWeights => SubmitResponse;
    SaveWeightsForSampler: SaveWeightsForSampler => SubmitResponse;
    SaveWeightsExternal: SaveWeightsExternal => SubmitResponse;
    LoadWeights: LoadWeights => SubmitResponse, validate LoadWeights::validate_target;
    WeightsInfoRequest: WeightsInfo => WeightsInfo;
    CopyWeights: CopyWeights => WeightsCopied;
}

json_output! {
    SaveWeights: "SaveWeights" => WeightsSaved = "save_weights";
    SaveWeightsForSampler: "SaveWeightsForSampler" => SamplerWeightsSaved = "save_weights_for_sampler";
    SaveWeightsExternal: "SaveWeightsExternal" => ExternalWeightsSaved = "save_weights_external";
    LoadWeights: "LoadWeights" => WeightsLoaded = "load_weights";
}
