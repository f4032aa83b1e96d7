//! Sampling sessions and sampling requests.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::codec::json;
use crate::error::finite;
use crate::future::{ResultPayload, SubmitResponse};
use crate::ids::{SamplerId, Seq, SessionId};
use crate::input::ModelInput;
use crate::request::{ApiRequest, RequestBody, SubmitRequest, json_request, json_response};
use crate::route::Route;
use crate::sampled::SampleResponse;
use crate::setters::setters;
use crate::tensor::{DType, TensorData};
use crate::{DecodeError, InvalidInput};

/// Creates a sampling session: a base model or a checkpoint to sample from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_sampling_session")]
#[non_exhaustive]
pub struct CreateSamplingSession {
    /// Session that contains the sampling session.
    pub session_id: SessionId,
    /// Sequence number of the sampling session within the session, starting at 0.
    pub sampling_session_seq_id: u32,
    /// Name of the base model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// `tinker://` path of the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_path: Option<String>,
}

impl CreateSamplingSession {
    /// Creates sampling session number `n` of the session for a base model.
    pub fn from_base(session_id: SessionId, n: u32, base_model: impl Into<String>) -> Self {
        Self {
            session_id,
            sampling_session_seq_id: n,
            base_model: Some(base_model.into()),
            model_path: None,
        }
    }

    /// Creates sampling session number `n` of the session for a checkpoint.
    pub fn from_path(session_id: SessionId, n: u32, model_path: impl Into<String>) -> Self {
        Self {
            session_id,
            sampling_session_seq_id: n,
            base_model: None,
            model_path: Some(model_path.into()),
        }
    }

    fn validate_source(&self) -> Result<(), InvalidInput> {
        match (&self.base_model, &self.model_path) {
            (None, None) => Err(InvalidInput::new("model_path", "set base_model or model_path")),
            (_, Some(path)) if !path.starts_with("tinker://") => {
                Err(InvalidInput::new("model_path", "must start with tinker://"))
            }
            _ => Ok(()),
        }
    }
}

/// Response to [`CreateSamplingSession`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_sampling_session")]
#[non_exhaustive]
pub struct SamplingSessionCreated {
    /// Id of the sampling session.
    pub sampling_session_id: SamplerId,
}

impl SamplingSessionCreated {
    /// Creates a response for the sampling session `sampling_session_id`.
    #[must_use]
    pub fn new(sampling_session_id: SamplerId) -> Self {
        Self { sampling_session_id }
    }
}

/// Registers another client of a sampling session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "join_sampling_session")]
#[non_exhaustive]
pub struct JoinSamplingSession {
    /// Id of the sampling session.
    pub sampling_session_id: SamplerId,
}

impl JoinSamplingSession {
    /// Joins the sampling session `sampling_session_id`.
    #[must_use]
    pub fn new(sampling_session_id: SamplerId) -> Self {
        Self { sampling_session_id }
    }
}

/// Response to [`JoinSamplingSession`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "join_sampling_session")]
#[non_exhaustive]
pub struct SamplingSessionJoined {
    /// Number of the new client. The client that created the sampling session has number 0.
    pub client_counter: u64,
}

impl SamplingSessionJoined {
    /// Creates a response for client number `client_counter`.
    #[must_use]
    pub fn new(client_counter: u64) -> Self {
        Self { client_counter }
    }
}

/// Sampling parameters.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::SamplingParams;
///
/// let params = SamplingParams::new().max_tokens(64).temperature(0.7).stop("\n\n");
/// assert_eq!(params.top_p, 1.0);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SamplingParams {
    /// Maximum number of tokens to sample; limited only by the context length if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// Seed of the random number generator; random if `None`.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::seed::deserialize"
    )]
    pub seed: Option<u64>,
    /// Stop condition; the model's end-of-sequence tokens if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<StopCondition>,
    /// Sampling temperature; 0 selects the most likely token. Defaults to 1.
    pub temperature: f64,
    /// Number of most likely tokens to sample from; all tokens if `None`.
    #[serde(with = "top_k")]
    pub top_k: Option<u32>,
    /// Cumulative probability of the most likely tokens to sample from (nucleus sampling). Defaults
    /// to 1.
    pub top_p: f64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { max_tokens: None, seed: None, stop: None, temperature: 1.0, top_k: None, top_p: 1.0 }
    }
}

impl SamplingParams {
    /// Returns the default parameters.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn validate(&self) -> Result<(), InvalidInput> {
        finite("temperature", self.temperature)?;
        finite("top_p", self.top_p)
    }
}

setters!(SamplingParams {
    max_tokens: u32 => Some(max_tokens);
    seed: u64 => Some(seed);
    stop: impl Into<StopCondition> => Some(stop.into());
    temperature: f64;
    top_k: u32 => Some(top_k);
    top_p: f64;
});

/// Encodes `None` as −1.
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
                de::Error::invalid_value(
                    de::Unexpected::Signed(k),
                    &"a count, or -1 for all tokens",
                )
            }),
        }
    }
}

/// Stop condition of sampling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a string, a list of strings, or a list of token ids")]
#[non_exhaustive]
pub enum StopCondition {
    /// Stops at this string.
    Text(String),
    /// Stops at any of these strings. An empty list disables stopping, including at the model's
    /// end-of-sequence tokens.
    Texts(Vec<String>),
    /// Stops at any of these tokens.
    #[serde(deserialize_with = "stop_tokens")]
    Tokens(Vec<u32>),
}

/// Decodes token ids. A negative id has the bits of an id above `i32::MAX`, as in
/// [`Tokens`](crate::Tokens), so that the server can name it.
fn stop_tokens<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u32>, D::Error> {
    let id = |id: i64| u32::try_from(id).or_else(|_| i32::try_from(id).map(i32::cast_unsigned));
    let ids = Vec::<i64>::deserialize(from)?.into_iter().map(id).collect::<Result<_, _>>();
    ids.map_err(de::Error::custom)
}

impl StopCondition {
    /// Disables stopping, including at the model's end-of-sequence tokens.
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

/// Samples completions of a prompt.
///
/// ```
/// use tinkex_wire::{ApiRequest, SampleRequest, SamplingParams};
///
/// let params = SamplingParams::new().max_tokens(16);
/// let request = SampleRequest::new([1, 2, 3], params).num_samples(4);
/// request.validate()?;
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "sample")]
#[non_exhaustive]
pub struct SampleRequest {
    /// Number of completions to sample. Defaults to 1.
    #[serde(default = "one")]
    pub num_samples: u32,
    /// Prompt.
    pub prompt: ModelInput,
    /// Sampling parameters.
    pub sampling_params: SamplingParams,
    /// Base model to sample from, if there is no sampling session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// `tinker://` path of the checkpoint to sample from, if there is no sampling session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_path: Option<String>,
    /// Id of the sampling session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_session_id: Option<SamplerId>,
    /// Sequence number among the requests of the sampling client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
    /// Whether to return the log-probabilities of the prompt tokens. `None` omits the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<bool>,
    /// Number of most likely tokens to return for each prompt position.
    #[serde(default)]
    pub topk_prompt_logprobs: u32,
    /// Number of most likely tokens to return for each sampled position.
    #[serde(default)]
    pub topk_sample_logprobs: u32,
    /// Tokens whose log-probabilities are returned, as an `int64` matrix. Row `i` refers to prompt
    /// position `i + 1`; −1 marks an unused cell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_prompt_logprobs: Option<TensorData>,
    /// Number of alternative tokens to sample for each prompt position.
    #[serde(default)]
    pub prompt_alt_tokens_k: u32,
    /// Restricts prompt log-probabilities to this number of last positions, at least 1. Requires
    /// [`prompt_logprobs`](Self::prompt_logprobs).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs_last_n: Option<u32>,
    /// Whether the server records data for numerical stability diagnostics. `None` omits the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record_stability_info: Option<bool>,
}

fn one() -> u32 {
    1
}

impl SampleRequest {
    /// Requests one completion, without a sampling session.
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

    fn validate_fields(&self) -> Result<(), InvalidInput> {
        self.sampling_params.validate().map_err(|error| error.within("sampling_params"))?;
        if let Some(targets) = &self.target_prompt_logprobs
            && (targets.dtype() != DType::Int64 || targets.shape().dims().len() != 2)
        {
            let reason = "must be an int64 matrix with one row per prompt position after the first";
            return Err(InvalidInput::new("target_prompt_logprobs", reason));
        }
        match self.prompt_logprobs_last_n {
            Some(0) => Err(InvalidInput::new("prompt_logprobs_last_n", "must be at least 1")),
            Some(_) if self.prompt_logprobs != Some(true) => {
                Err(InvalidInput::new("prompt_logprobs_last_n", "requires prompt_logprobs"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that a response contains what this request asks for. Older servers ignore some of the
    /// request's fields.
    ///
    /// # Errors
    /// Returns an error that names the missing or unexpected field of the response.
    pub fn validate_response(&self, response: &SampleResponse) -> Result<(), DecodeError> {
        use crate::DecodeErrorKind::{Missing, Value};
        if self.prompt_alt_tokens_k > 0 && response.prompt_alt_tokens.is_none() {
            let detail = "the server did not send the requested field; it may be too old";
            return Err(DecodeError::new(Missing, detail).within("prompt_alt_tokens"));
        }
        if let Some(n) = self.prompt_logprobs_last_n
            && let Some(logprobs) = &response.prompt_logprobs
        {
            let n = usize::try_from(n).unwrap_or(usize::MAX);
            let before = logprobs.len().saturating_sub(n);
            if logprobs.iter().take(before).any(|logprob| logprob.is_some()) {
                let detail =
                    format!("the request asks for the last {n}, but the response has earlier ones");
                return Err(DecodeError::new(Value, detail).within("prompt_logprobs"));
            }
        }
        Ok(())
    }
}

setters!(SampleRequest {
    num_samples: u32;
    base_model: Option<String>;
    model_path: Option<String>;
    sampling_session_id: Option<SamplerId>;
    seq_id: Seq => Some(seq_id);
    prompt_logprobs: Option<bool>;
    topk_prompt_logprobs: u32;
    topk_sample_logprobs: u32;
    target_prompt_logprobs: Option<TensorData>;
    prompt_alt_tokens_k: u32;
    prompt_logprobs_last_n: Option<u32>;
    record_stability_info: Option<bool>;
});

json_response!(
    SamplingSessionCreated = "create_sampling_session",
    SamplingSessionJoined = "join_sampling_session",
);

json_request! {
    CreateSamplingSession: CreateSamplingSession => SamplingSessionCreated,
        validate CreateSamplingSession::validate_source;
    JoinSamplingSession: JoinSamplingSession => SamplingSessionJoined;
}

impl ApiRequest for SampleRequest {
    type Response = SubmitResponse;
    const ROUTE: Route = Route::Sample;

    fn validate(&self) -> Result<(), InvalidInput> {
        self.validate_fields()
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
                json::decode::<SampleResponse>(bytes)?.normalized()
            }
        }
    }
}
