//! Model creation, and forward and backward passes.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize};

use crate::codec::json;
use crate::datum::Datum;
use crate::future::{ResultPayload, SubmitResponse};
use crate::ids::{ModelId, Seq, SessionId};
use crate::loss::{LossConfig, LossFn};
use crate::optim::OptimizerConfig;
use crate::output::LossOutputs;
use crate::request::{
    ApiRequest, RequestBody, SubmitRequest, json_output, json_request, json_response,
};
use crate::route::Route;
use crate::setters::setters;
use crate::{DecodeError, InvalidInput, JsonObject};

/// Metrics by name. A metric that could not be computed is NaN.
pub type Metrics = BTreeMap<String, f64>;

/// Decodes metrics, in which JSON represents NaN as null.
fn metrics<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Metrics, D::Error> {
    let numbers = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(numbers.into_iter().map(|(name, number)| (name, number.unwrap_or(f64::NAN))).collect())
}

/// Decodes metrics that may be null or missing.
pub(crate) fn some_metrics<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Metrics>, D::Error> {
    #[derive(Deserialize)]
    struct NullableMetrics(#[serde(deserialize_with = "metrics")] Metrics);
    Ok(Option::<NullableMetrics>::deserialize(deserializer)?.map(|metrics| metrics.0))
}

/// Creates a model for training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_model")]
#[non_exhaustive]
pub struct CreateModel {
    /// Session of the model.
    pub session_id: SessionId,
    /// Sequence number of the model within the session, starting at 0.
    pub model_seq_id: u32,
    /// Name of the base model.
    pub base_model: String,
    /// Metadata to store with the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<JsonObject>,
    /// LoRA adapter to train; `None` trains all weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora_config: Option<LoraConfig>,
    /// Optimizer of the model.
    #[serde(default)]
    pub optimizer_config: OptimizerConfig,
}

impl CreateModel {
    /// Creates model number `n` of the session, with the default adapter and optimizer.
    pub fn new(session_id: SessionId, n: u32, base_model: impl Into<String>) -> Self {
        Self {
            session_id,
            model_seq_id: n,
            base_model: base_model.into(),
            user_metadata: None,
            lora_config: Some(LoraConfig::default()),
            optimizer_config: OptimizerConfig::default(),
        }
    }

    fn validate_lora(&self) -> Result<(), InvalidInput> {
        self.lora_config
            .map_or(Ok(()), |lora| lora.validate())
            .map_err(|error| error.within("lora_config"))
    }
}

setters!(CreateModel {
    user_metadata: Option<JsonObject>;
    lora_config: Option<LoraConfig>;
    optimizer_config: OptimizerConfig;
});

/// Rank and layers of a LoRA adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LoraConfig {
    /// Rank of the adapter, at least 1. Defaults to 32.
    pub rank: u32,
    /// Seed of the random initialization; chosen by the server if `None`.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::seed::deserialize"
    )]
    pub seed: Option<u64>,
    /// Whether the adapter covers the unembedding. Defaults to `true`.
    #[serde(default = "yes")]
    pub train_unembed: bool,
    /// Whether the adapter covers the MLP layers. Defaults to `true`.
    #[serde(default = "yes")]
    pub train_mlp: bool,
    /// Whether the adapter covers the attention layers. Defaults to `true`.
    #[serde(default = "yes")]
    pub train_attn: bool,
}

fn yes() -> bool {
    true
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self { rank: 32, seed: None, train_unembed: true, train_mlp: true, train_attn: true }
    }
}

impl LoraConfig {
    /// Returns an adapter of the given rank on all layers.
    #[must_use]
    pub fn with_rank(rank: u32) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Checks the rank, and that at least one group of layers is trained.
    ///
    /// # Errors
    /// Returns an error that names the invalid field.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        if self.rank == 0 {
            return Err(InvalidInput::new("rank", "must be at least 1"));
        }
        if !(self.train_unembed || self.train_mlp || self.train_attn) {
            let reason = "at least one of train_unembed, train_mlp and train_attn must be true";
            return Err(InvalidInput::new("train_attn", reason));
        }
        Ok(())
    }
}

setters!(LoraConfig {
    rank: u32;
    seed: Option<u64>;
    train_unembed: bool;
    train_mlp: bool;
    train_attn: bool;
});

/// Result of [`CreateModel`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_model")]
#[non_exhaustive]
pub struct ModelCreated {
    /// Id of the model.
    pub model_id: ModelId,
}

impl ModelCreated {
    /// Creates a result for the model `model_id`.
    #[must_use]
    pub fn new(model_id: ModelId) -> Self {
        Self { model_id }
    }
}

/// Returns the properties of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "get_info")]
#[non_exhaustive]
pub struct GetInfo {
    /// Id of the model.
    pub model_id: ModelId,
}

impl GetInfo {
    /// Requests the properties of the model `model_id`.
    pub fn new(model_id: impl Into<ModelId>) -> Self {
        Self { model_id: model_id.into() }
    }
}

/// Properties of a model: the response to [`GetInfo`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "get_info")]
#[non_exhaustive]
pub struct ModelInfo {
    /// Properties of the base model.
    pub model_data: ModelData,
    /// Id of the model.
    pub model_id: ModelId,
    /// Optimizer of the model.
    #[serde(default)]
    pub optimizer_config: OptimizerConfig,
    /// Whether the model trains a LoRA adapter.
    #[serde(default)]
    pub is_lora: Option<bool>,
    /// Rank of the adapter.
    #[serde(default)]
    pub lora_rank: Option<u32>,
    /// Name of the base model.
    #[serde(default)]
    pub model_name: Option<String>,
}

impl ModelInfo {
    /// Describes a model without an adapter.
    #[must_use]
    pub fn new(
        model_id: ModelId,
        model_data: ModelData,
        optimizer_config: OptimizerConfig,
    ) -> Self {
        Self {
            model_name: model_data.model_name.clone(),
            model_data,
            model_id,
            optimizer_config,
            is_lora: None,
            lora_rank: None,
        }
    }
}

setters!(ModelInfo {
    is_lora: Option<bool>;
    lora_rank: Option<u32>;
});

/// Properties of a base model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ModelData {
    /// Architecture of the model.
    pub arch: Option<String>,
    /// Name of the model.
    pub model_name: Option<String>,
    /// Tokenizer of the model, optionally followed by `:` and a revision.
    pub tokenizer_id: Option<String>,
}

setters!(ModelData {
    arch: Option<String>;
    model_name: Option<String>;
    tokenizer_id: Option<String>;
});

/// Computation of a training pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PassMode {
    /// Computes the loss only.
    Forward,
    /// Computes the loss and adds its gradient to the accumulated gradient of the model.
    #[default]
    ForwardBackward,
}

/// Computes the loss of a batch, and its gradient unless [`mode`](Self::mode) is
/// [`PassMode::Forward`].
///
/// ```
/// use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};
///
/// let data = vec![Datum::completion([1, 2], [3])?];
/// let request =
///     ForwardBackward::new("s:train:0", data, LossFn::CrossEntropy).seq_id(Seq::FIRST);
/// let bytes = request.to_proto()?;
/// assert_eq!(ForwardBackward::from_proto(&bytes).unwrap(), request);
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ForwardBackward {
    /// Id of the model.
    pub model_id: ModelId,
    /// Sequence number among the requests of the model. The server executes them in this order.
    pub seq_id: Option<Seq>,
    /// Training examples.
    pub data: Vec<Datum>,
    /// Loss function.
    pub loss_fn: LossFn,
    /// Settings of the loss function.
    pub loss_fn_config: LossConfig,
    /// Whether to compute the gradient. Defaults to [`PassMode::ForwardBackward`].
    pub mode: PassMode,
}

impl ForwardBackward {
    /// Creates a pass that computes the gradient, with the default settings of the loss function
    /// and without a sequence number.
    pub fn new(model_id: impl Into<ModelId>, data: Vec<Datum>, loss_fn: LossFn) -> Self {
        Self {
            model_id: model_id.into(),
            seq_id: None,
            data,
            loss_fn,
            loss_fn_config: LossConfig::new(),
            mode: PassMode::ForwardBackward,
        }
    }
}

setters!(ForwardBackward {
    seq_id: Seq => Some(seq_id);
    loss_fn_config: LossConfig;
    mode: PassMode;
});

impl ApiRequest for ForwardBackward {
    type Response = SubmitResponse;
    const ROUTE: Route = Route::ForwardBackward;

    fn validate(&self) -> Result<(), InvalidInput> {
        crate::codec::proto::request::validate(self)
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Proto(crate::codec::proto::request::encode(self)))
    }
}

impl SubmitRequest for ForwardBackward {
    type Output = ForwardBackwardOutput;
    const PROTO_OUTPUT: bool = true;

    fn request_type(&self) -> &'static str {
        match self.mode {
            PassMode::Forward => "Forward",
            PassMode::ForwardBackward => "ForwardBackward",
        }
    }

    fn decode_output(payload: &ResultPayload) -> Result<ForwardBackwardOutput, DecodeError> {
        match payload {
            ResultPayload::Proto(bytes) => ForwardBackwardOutput::from_proto(bytes),
            ResultPayload::Json(bytes) => {
                json::expect_tag(bytes, "forward_backward")?;
                json::decode(bytes)
            }
        }
    }
}

/// Result of [`ForwardBackward`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ForwardBackwardOutput {
    /// Type of the outputs. Defaults to `ArrayRecord`.
    #[serde(default = "default_output_type", deserialize_with = "output_type")]
    pub loss_fn_output_type: String,
    /// Output tensors of each datum, in the order of the data.
    pub loss_fn_outputs: LossOutputs,
    /// Metrics of the batch. The suffix of a name after `:` determines how the metrics of several
    /// chunks are combined.
    #[serde(default, deserialize_with = "metrics")]
    pub metrics: Metrics,
}

/// Output type of a result that does not specify one.
pub(crate) const DEFAULT_OUTPUT_TYPE: &str = "ArrayRecord";

fn default_output_type() -> String {
    DEFAULT_OUTPUT_TYPE.to_owned()
}

fn output_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let qualified = String::deserialize(deserializer)?;
    Ok(crate::codec::proto::output::short_type(&qualified).to_owned())
}

impl Default for ForwardBackwardOutput {
    fn default() -> Self {
        Self {
            loss_fn_output_type: default_output_type(),
            loss_fn_outputs: LossOutputs::default(),
            metrics: Metrics::new(),
        }
    }
}

setters!(ForwardBackwardOutput {
    loss_fn_output_type: impl Into<String> => loss_fn_output_type.into();
    loss_fn_outputs: impl Into<LossOutputs> => loss_fn_outputs.into();
    metrics: Metrics;
});

json_response!(ModelInfo = "get_info");

/// Removes a model from memory. SDK 0.36 does not send it, and the current protocol ends models with
/// their session; servers of older protocols have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UnloadModel {
    /// Id of the model.
    pub model_id: ModelId,
}

impl UnloadModel {
    /// Unloads the model `model_id`.
    pub fn new(model_id: impl Into<ModelId>) -> Self {
        Self { model_id: model_id.into() }
    }
}

/// Result of [`UnloadModel`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ModelUnloaded {
    /// Id of the model.
    pub model_id: ModelId,
}

json_request! {
    UnloadModel: UnloadModel => SubmitResponse;
    CreateModel: CreateModel => SubmitResponse, validate CreateModel::validate_lora;
    GetInfo: GetInfo => ModelInfo;
}

json_output! {
    UnloadModel: "UnloadModel" => ModelUnloaded;
    CreateModel: "CreateModel" => ModelCreated = "create_model";
}

impl ForwardBackward {
    /// Validates the request and encodes it into one buffer of the exact size.
    ///
    /// # Errors
    /// Returns an error if a number does not fit its field or a chunk cannot be used for training.
    pub fn to_proto(&self) -> Result<Bytes, InvalidInput> {
        self.validate()?;
        Ok(crate::codec::proto::request::encode(self))
    }

    /// Decodes a request. Image and audio data share the memory of `bytes`.
    ///
    /// # Errors
    /// Returns an error that names the invalid field.
    pub fn from_proto(bytes: &Bytes) -> Result<Self, DecodeError> {
        crate::codec::proto::request::decode(bytes)
    }
}

impl ForwardBackwardOutput {
    /// Encodes the result into one buffer of the exact size.
    #[must_use]
    pub fn to_proto(&self) -> Bytes {
        crate::codec::proto::output::encode(self)
    }

    /// Decodes a result.
    ///
    /// # Errors
    /// Returns an error that names the invalid field.
    pub fn from_proto(bytes: &[u8]) -> Result<Self, DecodeError> {
        crate::codec::proto::output::decode(bytes)
    }
}
