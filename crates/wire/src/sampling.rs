//! Asking for samples.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::codec::json;
use crate::error::finite;
use crate::future::{ResultPayload, SubmitResponse};
use crate::ids::{SamplerId, Seq, SessionId};
use crate::input::ModelInput;
use crate::request::{ApiRequest, RequestBody, SubmitRequest, json_request, json_response};
use crate::route::Route;
use crate::sampled::SampleResponse;
use crate::tensor::{DType, TensorData};
use crate::{DecodeError, InvalidInput};

/// Fixes weights to sample from: a base model's, or a checkpoint's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_sampling_session")]
pub struct CreateSamplingSession {
    /// The session it belongs to.
    pub session_id: SessionId,
    /// Its number within the session, from 0.
    pub sampling_session_seq_id: u32,
    /// The base model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// The checkpoint, as a `tinker://` address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_path: Option<String>,
}

impl CreateSamplingSession {
    /// Samples from a base model; `n` is the number of the sampling session.
    pub fn from_base(session_id: SessionId, n: u32, base_model: impl Into<String>) -> Self {
        Self {
            session_id,
            sampling_session_seq_id: n,
            base_model: Some(base_model.into()),
            model_path: None,
        }
    }

    /// Samples from a checkpoint; `n` is the number of the sampling session.
    pub fn from_path(session_id: SessionId, n: u32, model_path: impl Into<String>) -> Self {
        Self {
            session_id,
            sampling_session_seq_id: n,
            base_model: None,
            model_path: Some(model_path.into()),
        }
    }

    fn check_source(&self) -> Result<(), InvalidInput> {
        match (&self.base_model, &self.model_path) {
            (None, None) => {
                Err(InvalidInput::new("model_path", "give a base_model or a model_path"))
            }
            (_, Some(path)) if !path.starts_with("tinker://") => {
                Err(InvalidInput::new("model_path", "must start with tinker://"))
            }
            _ => Ok(()),
        }
    }
}

/// The weights are fixed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_sampling_session")]
pub struct SamplingSessionCreated {
    /// The id to sample with.
    pub sampling_session_id: SamplerId,
}

/// Becomes another client of a sampling session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "join_sampling_session")]
pub struct JoinSamplingSession {
    /// The sampling session.
    pub sampling_session_id: SamplerId,
}

/// Another client of a sampling session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "join_sampling_session")]
pub struct SamplingSessionJoined {
    /// Its number; the client that made the session is 0.
    pub client_counter: u64,
}

/// How to draw tokens.
///
/// ```
/// use tinkex_wire::SamplingParams;
///
/// let params = SamplingParams::new().max_tokens(64).temperature(0.7).stop("\n\n");
/// assert_eq!(params.top_p, 1.0);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingParams {
    /// How many tokens at most; the rest of the context if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// Makes the draw repeatable.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "crate::seed::read")]
    pub seed: Option<u64>,
    /// Where to stop; at the model's own end if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<StopCondition>,
    /// Flattens (above 1) or sharpens (below 1) the distribution; 0 takes the likeliest token.
    pub temperature: f64,
    /// Draw from this many likeliest tokens; from all if not given.
    #[serde(with = "top_k")]
    pub top_k: Option<u32>,
    /// Draw from the likeliest tokens that have this much probability together.
    pub top_p: f64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { max_tokens: None, seed: None, stop: None, temperature: 1.0, top_k: None, top_p: 1.0 }
    }
}

impl SamplingParams {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Limits the number of tokens.
    #[must_use]
    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.max_tokens = Some(tokens);
        self
    }

    /// Makes the draw repeatable.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Where to stop.
    #[must_use]
    pub fn stop(mut self, stop: impl Into<StopCondition>) -> Self {
        self.stop = Some(stop.into());
        self
    }

    /// Flattens or sharpens the distribution.
    #[must_use]
    pub fn temperature(mut self, temperature: f64) -> Self {
        self.temperature = temperature;
        self
    }

    /// Draws from the `k` likeliest tokens.
    #[must_use]
    pub fn top_k(mut self, k: u32) -> Self {
        self.top_k = Some(k);
        self
    }

    /// Draws from the likeliest tokens that have probability `p` together.
    #[must_use]
    pub fn top_p(mut self, p: f64) -> Self {
        self.top_p = p;
        self
    }

    fn validate(&self) -> Result<(), InvalidInput> {
        finite("temperature", self.temperature)?;
        finite("top_p", self.top_p)
    }
}

/// On the wire, −1 stands for no limit.
mod top_k {
    use super::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(k: &Option<u32>, out: S) -> Result<S::Ok, S::Error> {
        match k {
            None => out.serialize_i32(-1),
            Some(k) => out.serialize_u32(*k),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
        match i64::deserialize(from)? {
            -1 => Ok(None),
            k => u32::try_from(k).map(Some).map_err(|_| {
                de::Error::invalid_value(de::Unexpected::Signed(k), &"a count, or -1 for all")
            }),
        }
    }
}

/// Where sampling stops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a text, a list of texts, or a list of token ids")]
pub enum StopCondition {
    /// At this text.
    Text(String),
    /// At any of these texts. An empty list stops nowhere, not even at the model's own end.
    Texts(Vec<String>),
    /// At any of these tokens.
    Tokens(Vec<u32>),
}

impl StopCondition {
    /// Nowhere, not even at the model's own end.
    pub const NEVER: Self = Self::Texts(Vec::new());
}

impl From<&str> for StopCondition {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for StopCondition {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<&str>> for StopCondition {
    fn from(texts: Vec<&str>) -> Self {
        Self::Texts(texts.into_iter().map(str::to_owned).collect())
    }
}

impl From<Vec<String>> for StopCondition {
    fn from(texts: Vec<String>) -> Self {
        Self::Texts(texts)
    }
}

impl<const N: usize> From<[&str; N]> for StopCondition {
    fn from(texts: [&str; N]) -> Self {
        Self::Texts(texts.map(str::to_owned).into())
    }
}

impl From<Vec<u32>> for StopCondition {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Tokens(tokens)
    }
}

impl<const N: usize> From<[u32; N]> for StopCondition {
    fn from(tokens: [u32; N]) -> Self {
        Self::Tokens(tokens.into())
    }
}

/// Asks for samples from a prompt.
///
/// ```
/// use tinkex_wire::{ApiRequest, SampleRequest, SamplingParams};
///
/// let request = SampleRequest {
///     num_samples: 4,
///     ..SampleRequest::new([1, 2, 3], SamplingParams::new().max_tokens(16))
/// };
/// request.validate()?;
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "sample")]
pub struct SampleRequest {
    /// How many.
    #[serde(default = "one")]
    pub num_samples: u32,
    /// What to go on from.
    pub prompt: ModelInput,
    /// How to draw.
    pub sampling_params: SamplingParams,
    /// A base model to sample from, without a sampling session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// A checkpoint to sample from, without a sampling session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_path: Option<String>,
    /// The sampling session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_session_id: Option<SamplerId>,
    /// The number of this request among those of the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// Whether the prompt's own log-probabilities are wanted; not sent if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<bool>,
    /// How many likeliest tokens to list for each prompt position.
    #[serde(default)]
    pub topk_prompt_logprobs: u32,
    /// How many likeliest tokens to list for each sampled position.
    #[serde(default)]
    pub topk_sample_logprobs: u32,
    /// Tokens whose log-probabilities are wanted: row `i` speaks about prompt position `i + 1`, and
    /// −1 asks for nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_prompt_logprobs: Option<TensorData>,
    /// How many other tokens to draw for each prompt position.
    #[serde(default)]
    pub prompt_alt_tokens_k: u32,
    /// Only the last this many prompt positions are wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs_last_n: Option<u32>,
    /// Whether the server should keep what it needs to explain the sample later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record_stability_info: Option<bool>,
}

fn one() -> u32 {
    1
}

impl SampleRequest {
    /// One sample, without extras, not yet addressed to a sampling session.
    #[must_use]
    pub fn new(prompt: impl Into<ModelInput>, sampling_params: SamplingParams) -> Self {
        Self {
            num_samples: 1,
            prompt: prompt.into(),
            sampling_params,
            base_model: None,
            model_path: None,
            sampling_session_id: None,
            seq_id: None,
            prompt_logprobs: Some(false),
            topk_prompt_logprobs: 0,
            topk_sample_logprobs: 0,
            target_prompt_logprobs: None,
            prompt_alt_tokens_k: 0,
            prompt_logprobs_last_n: None,
            record_stability_info: Some(false),
        }
    }

    fn check_all(&self) -> Result<(), InvalidInput> {
        self.sampling_params.validate().map_err(|error| error.within("sampling_params"))?;
        if let Some(targets) = &self.target_prompt_logprobs
            && (targets.dtype() != DType::Int64 || targets.shape().dims().len() != 2)
        {
            let why = "must be an int64 matrix: one row per prompt position after the first";
            return Err(InvalidInput::new("target_prompt_logprobs", why));
        }
        match self.prompt_logprobs_last_n {
            Some(0) => Err(InvalidInput::new("prompt_logprobs_last_n", "must be at least 1")),
            Some(_) if self.prompt_logprobs != Some(true) => {
                Err(InvalidInput::new("prompt_logprobs_last_n", "needs prompt_logprobs"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses an answer to this request that lacks what was asked for, as old servers may send.
    ///
    /// # Errors
    /// Names the part of the answer that is missing or not as asked.
    pub fn validate_response(&self, response: &SampleResponse) -> Result<(), DecodeError> {
        use crate::DecodeErrorKind::{Missing, Value};
        if self.prompt_alt_tokens_k > 0 && response.prompt_alt_tokens.is_none() {
            let why = "were asked for but not sent; the server may be too old for them";
            return Err(DecodeError::new(Missing, why).within("prompt_alt_tokens"));
        }
        if let (Some(n), Some(logprobs)) = (self.prompt_logprobs_last_n, &response.prompt_logprobs)
        {
            let n = usize::try_from(n).unwrap_or(usize::MAX);
            let before = logprobs.len().saturating_sub(n);
            if logprobs.iter().take(before).any(|logprob| logprob.is_some()) {
                let why = format!("only the last {n} were asked for but earlier ones were sent");
                return Err(DecodeError::new(Value, why).within("prompt_logprobs"));
            }
        }
        Ok(())
    }
}

json_response!(
    SamplingSessionCreated = "create_sampling_session",
    SamplingSessionJoined = "join_sampling_session",
);

json_request! {
    CreateSamplingSession: CreateSamplingSession => SamplingSessionCreated,
        validate CreateSamplingSession::check_source;
    JoinSamplingSession: JoinSamplingSession => SamplingSessionJoined;
}

impl ApiRequest for SampleRequest {
    type Response = SubmitResponse;
    const ROUTE: Route = Route::Sample;

    fn validate(&self) -> Result<(), InvalidInput> {
        self.check_all()
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode_sized(self, 512 + self.prompt.sampling_bytes() / 3 * 4)?))
    }
}

impl SubmitRequest for SampleRequest {
    type Output = SampleResponse;
    const PROTO_OUTPUT: bool = true;

    fn request_type(&self) -> &'static str {
        "Sample"
    }

    fn decode_output(payload: &ResultPayload) -> Result<SampleResponse, DecodeError> {
        match payload {
            ResultPayload::Proto(bytes) => SampleResponse::from_proto(bytes),
            ResultPayload::Json(bytes) => {
                json::expect_tag(bytes, "sample")?;
                json::decode::<SampleResponse>(bytes)?.settled()
            }
        }
    }
}
