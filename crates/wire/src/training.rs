//! Models and the passes over them: create, ask, forward, backward.

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
use crate::{DecodeError, InvalidInput, JsonObject};

/// Named numbers about a piece of work. A number that could not be computed is NaN.
pub type Metrics = BTreeMap<String, f64>;

/// JSON writes NaN as null, and reads it back here.
fn metrics<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Metrics, D::Error> {
    let numbers = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(numbers.into_iter().map(|(name, number)| (name, number.unwrap_or(f64::NAN))).collect())
}

/// The same where the metrics themselves may be missing.
pub(crate) fn some_metrics<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Metrics>, D::Error> {
    #[derive(Deserialize)]
    struct Wrapped(#[serde(deserialize_with = "metrics")] Metrics);
    Ok(Option::<Wrapped>::deserialize(deserializer)?.map(|wrapped| wrapped.0))
}

/// Makes a new model to train.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_model")]
pub struct CreateModel {
    /// The session it belongs to.
    pub session_id: SessionId,
    /// Its number within the session, from 0.
    pub model_seq_id: u32,
    /// The model it starts from.
    pub base_model: String,
    /// Anything to remember with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<JsonObject>,
    /// The adapter to train.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora_config: Option<LoraConfig>,
    /// The optimizer to train it with.
    #[serde(default)]
    pub optimizer_config: OptimizerConfig,
}

impl CreateModel {
    /// The session's `n`th model: an adapter of the default size, trained by the default optimizer.
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

    fn check_lora(&self) -> Result<(), InvalidInput> {
        self.lora_config
            .map_or(Ok(()), |lora| lora.validate())
            .map_err(|error| error.within("lora_config"))
    }
}

/// A low-rank adapter: how large, and on which layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// The rank of its matrices.
    pub rank: u32,
    /// Where its random start comes from; the server's choice if not given.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::seed::read"
    )]
    pub seed: Option<u64>,
    /// Whether the unembedding has one.
    #[serde(default = "yes")]
    pub train_unembed: bool,
    /// Whether the MLP layers have one.
    #[serde(default = "yes")]
    pub train_mlp: bool,
    /// Whether the attention layers have one.
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
    /// All layers, with this rank.
    #[must_use]
    pub fn with_rank(rank: u32) -> Self {
        Self { rank, ..Self::default() }
    }

    fn validate(&self) -> Result<(), InvalidInput> {
        if self.rank == 0 {
            return Err(InvalidInput::new("rank", "must be at least 1"));
        }
        if !(self.train_unembed || self.train_mlp || self.train_attn) {
            let why = "at least one of train_unembed, train_mlp and train_attn must be set";
            return Err(InvalidInput::new("train_attn", why));
        }
        Ok(())
    }
}

/// A model was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_model")]
pub struct ModelCreated {
    /// Its id.
    pub model_id: ModelId,
}

/// Asks what a model is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "get_info")]
pub struct GetInfo {
    /// The model.
    pub model_id: ModelId,
}

/// What a model is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "get_info")]
pub struct ModelInfo {
    /// Facts about its base model.
    pub model_data: ModelData,
    /// Its id.
    pub model_id: ModelId,
    /// Its optimizer.
    #[serde(default)]
    pub optimizer_config: OptimizerConfig,
    /// Whether an adapter is trained.
    #[serde(default)]
    pub is_lora: Option<bool>,
    /// The adapter's rank.
    #[serde(default)]
    pub lora_rank: Option<u32>,
    /// The name of the base model.
    #[serde(default)]
    pub model_name: Option<String>,
}

/// Facts about a base model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelData {
    /// Its architecture.
    pub arch: Option<String>,
    /// Its name.
    pub model_name: Option<String>,
    /// Its tokenizer, perhaps with a revision behind a `:`.
    pub tokenizer_id: Option<String>,
}

/// What a pass over data computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PassMode {
    /// The loss alone.
    Forward,
    /// The loss and its gradient, which is added to the model's.
    #[default]
    ForwardBackward,
}

/// Runs data through a model.
///
/// ```
/// use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};
///
/// let request = ForwardBackward {
///     seq_id: Some(Seq::FIRST),
///     ..ForwardBackward::new("s:train:0", vec![Datum::completion([1, 2], [3])?], LossFn::CrossEntropy)
/// };
/// let bytes = request.to_proto()?;
/// assert_eq!(ForwardBackward::from_proto(&bytes).unwrap(), request);
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardBackward {
    /// The model.
    pub model_id: ModelId,
    /// Its place among the model's requests.
    pub seq_id: Option<Seq>,
    /// The data.
    pub data: Vec<Datum>,
    /// The loss.
    pub loss_fn: LossFn,
    /// Its settings.
    pub loss_fn_config: LossConfig,
    /// With or without a gradient.
    pub mode: PassMode,
}

impl ForwardBackward {
    /// A pass with a gradient and the loss's own settings, not yet numbered.
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

/// What a pass computed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForwardBackwardOutput {
    /// What kind of outputs these are.
    #[serde(default = "default_output_type", deserialize_with = "output_type")]
    pub loss_fn_output_type: String,
    /// Tensors for each datum, in the order of the data.
    pub loss_fn_outputs: LossOutputs,
    /// Numbers about the whole; the part of a name behind its `:` says how those of several chunks
    /// are joined.
    #[serde(default, deserialize_with = "metrics")]
    pub metrics: Metrics,
}

/// The type of outputs that came without one.
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

json_response!(ModelInfo = "get_info");

json_request! {
    CreateModel: CreateModel => SubmitResponse, validate CreateModel::check_lora;
    GetInfo: GetInfo => ModelInfo;
}

json_output! {
    CreateModel: "CreateModel" => ModelCreated = "create_model";
}

impl ForwardBackward {
    /// Encodes the request in one pass into one buffer of exactly its size.
    ///
    /// # Errors
    /// If a number does not fit its field, or a chunk cannot be sent for training.
    pub fn to_proto(&self) -> Result<Bytes, InvalidInput> {
        self.validate()?;
        Ok(crate::codec::proto::request::encode(self))
    }

    /// Reads a request; pictures and audio stay in the given buffer.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn from_proto(bytes: &Bytes) -> Result<Self, DecodeError> {
        crate::codec::proto::request::decode(bytes)
    }
}

impl ForwardBackwardOutput {
    /// Encodes the result into one buffer of exactly its size.
    #[must_use]
    pub fn to_proto(&self) -> Bytes {
        crate::codec::proto::output::encode(self)
    }

    /// Reads a result.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn from_proto(bytes: &[u8]) -> Result<Self, DecodeError> {
        crate::codec::proto::output::decode(bytes)
    }
}
