//! Samples that are streamed token by token through the OpenAI-compatible endpoint.
//!
//! The request is a completion request with the extensions of vLLM: token ids as the prompt and in
//! the events, `top_k`, `stop_token_ids` and `ignore_eos`. The response is a stream of server-sent
//! events, of which [`SampleStreamEvent`] is the data.

use serde::{Deserialize, Serialize};

use crate::codec::json;
use crate::error::finite;
use crate::request::{ApiRequest, RequestBody};
use crate::route::Route;
use crate::sampled::StopReason;
use crate::sampling::{SamplingParams, StopCondition};
use crate::tokens::Tokens;
use crate::{DecodeError, InvalidInput};

/// Data of the event that ends a stream.
const DONE: &str = "[DONE]";

/// Samples one completion of a prompt and streams its tokens.
///
/// ```
/// use tinkex_wire::{ApiRequest, SampleStreamRequest, SamplingParams};
///
/// let params = SamplingParams::new().max_tokens(16).stop(["\n"]);
/// let request = SampleStreamRequest::new("tinkex/tiny", [1, 2, 3], params);
/// request.validate()?;
/// assert_eq!(request.stop, ["\n"]);
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SampleStreamRequest {
    /// Base model, checkpoint path, training run, sampling session or alias.
    pub model: String,
    /// Tokens of the prompt.
    pub prompt: Tokens,
    /// Maximum number of tokens to sample. `None` is sent as null: up to the context length.
    pub max_tokens: Option<u32>,
    /// Sampling temperature.
    pub temperature: f64,
    /// Cumulative probability of the most likely tokens to sample from.
    pub top_p: f64,
    /// Number of most likely tokens to sample from; all tokens if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Seed of the random number generator; random if `None`.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::seed::deserialize"
    )]
    pub seed: Option<u64>,
    /// Strings that end the completion.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Tokens that end the completion.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's end-of-sequence tokens do not end the completion.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignore_eos: bool,
    /// Number of most likely tokens to return for each position, in addition to the log-probability
    /// of the sampled token.
    #[serde(default)]
    pub logprobs: u32,
    /// Whether the response is a stream of events. Always `true`.
    pub stream: bool,
    /// Whether events have token ids. Always `true`.
    pub return_token_ids: bool,
}

impl SampleStreamRequest {
    /// Requests a stream of one completion with the log-probabilities of its tokens.
    #[must_use]
    pub fn new(
        model: impl Into<String>,
        prompt: impl Into<Tokens>,
        params: SamplingParams,
    ) -> Self {
        let mut request = Self {
            model: model.into(),
            prompt: prompt.into(),
            max_tokens: params.max_tokens,
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: params.top_k,
            seed: params.seed,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: params.stop == Some(StopCondition::NEVER),
            logprobs: 0,
            stream: true,
            return_token_ids: true,
        };
        match params.stop {
            None => {}
            Some(StopCondition::Text(text)) => request.stop = vec![text],
            Some(StopCondition::Texts(texts)) => request.stop = texts,
            Some(StopCondition::Tokens(tokens)) => request.stop_token_ids = tokens,
        }
        request
    }
}

impl ApiRequest for SampleStreamRequest {
    /// The response is a stream of events.
    type Response = ();
    const ROUTE: Route = Route::Completions;

    fn validate(&self) -> Result<(), InvalidInput> {
        finite("temperature", self.temperature)?;
        finite("top_p", self.top_p)
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode_sized(self, 512 + self.prompt.len() * 7)?))
    }
}

/// Data of one event of the stream.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum SampleStreamEvent {
    /// New tokens. Empty if the event contains something else, such as the token counts.
    Choices(Vec<SampleStreamChoice>),
    /// The sample failed; contains the message of the server. No event follows.
    Failed(String),
    /// The stream is complete.
    Done,
}

impl SampleStreamEvent {
    /// Decodes the data of an event.
    ///
    /// ```
    /// use tinkex_wire::SampleStreamEvent;
    ///
    /// let data = r#"{"choices": [{"text": "moo", "token_ids": [7]}]}"#;
    /// let SampleStreamEvent::Choices(choices) = SampleStreamEvent::from_data(data)? else {
    ///     panic!("the event has no tokens");
    /// };
    /// assert_eq!(choices[0].token_ids.as_deref(), Some(&[7][..]));
    /// assert_eq!(SampleStreamEvent::from_data("[DONE]")?, SampleStreamEvent::Done);
    /// # Ok::<_, tinkex_wire::DecodeError>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error that names the invalid field.
    pub fn from_data(data: &str) -> Result<Self, DecodeError> {
        #[derive(Deserialize)]
        struct EventData {
            #[serde(default)]
            choices: Vec<SampleStreamChoice>,
            #[serde(default)]
            error: Option<serde_json::Value>,
        }

        if data == DONE {
            return Ok(Self::Done);
        }
        let EventData { choices, error } = json::decode(data.as_bytes())?;
        Ok(match error {
            Some(_) => {
                let message = crate::ErrorBody::message(data.as_bytes());
                Self::Failed(message.unwrap_or_else(|| data.to_owned()))
            }
            None => Self::Choices(choices),
        })
    }
}

/// New tokens of a completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SampleStreamChoice {
    /// Index of the completion.
    pub index: u32,
    /// Text that became certain with these tokens.
    pub text: String,
    /// Token ids; `None` if the server does not support `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Log-probabilities of the tokens.
    pub logprobs: Option<SampleStreamLogprobs>,
    /// Reason why the completion ended. Set in the event with its last token.
    pub finish_reason: Option<StopReason>,
}

/// Log-probabilities of the tokens of a [`SampleStreamChoice`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SampleStreamLogprobs {
    /// One value per token; `None` if it is not finite.
    pub token_logprobs: Vec<Option<f32>>,
    /// Number of characters of the completion before the text of each token. Empty if the server
    /// does not send it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub text_offset: Vec<usize>,
}

impl SampleStreamChoice {
    /// Divides the text among the tokens: returns, for each token, the text that became certain with
    /// it. If the server does not send valid offsets, the whole text belongs to the last token.
    ///
    /// ```
    /// use tinkex_wire::SampleStreamEvent;
    ///
    /// let data = r#"{"choices": [{"text": "née", "token_ids": [7, 8, 9],
    ///     "logprobs": {"token_logprobs": [-1, -1, -1], "text_offset": [40, 41, 41]}}]}"#;
    /// let SampleStreamEvent::Choices(choices) = SampleStreamEvent::from_data(data)? else {
    ///     panic!("the event has no tokens");
    /// };
    /// assert_eq!(choices[0].token_texts(), ["n", "", "ée"]);
    /// # Ok::<_, tinkex_wire::DecodeError>(())
    /// ```
    #[must_use]
    pub fn token_texts(&self) -> Vec<String> {
        let tokens = self.token_ids.as_ref().map_or(0, Vec::len);
        let mut texts = vec![String::new(); tokens];
        let offsets = self.logprobs.as_ref().map_or(&[][..], |logprobs| &logprobs.text_offset);
        let characters = self.text.chars().count();
        let valid = offsets.len() == tokens
            && offsets.is_sorted()
            && offsets.last().zip(offsets.first()).is_some_and(|(b, a)| b - a <= characters);
        if let (false, Some(last)) = (valid, texts.last_mut()) {
            last.clone_from(&self.text);
            return texts;
        }
        let mut rest = self.text.chars();
        for (text, pair) in texts.iter_mut().zip(offsets.windows(2)) {
            *text = rest.by_ref().take(pair[1] - pair[0]).collect();
        }
        if let Some(last) = texts.last_mut() {
            *last = rest.collect();
        }
        texts
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stop_conditions_become_the_parameters_of_the_endpoint() {
        let body = |params: SamplingParams| {
            let request = SampleStreamRequest::new("m", [1, 2], params);
            let bytes = request.body().unwrap().bytes();
            serde_json::from_slice::<serde_json::Value>(&bytes).unwrap()
        };
        let common = |mut fields: serde_json::Value| {
            let all = fields.as_object_mut().unwrap();
            let mut expected = json!({
                "model": "m", "prompt": [1, 2], "max_tokens": null, "temperature": 1.0,
                "top_p": 1.0, "logprobs": 0, "stream": true, "return_token_ids": true,
            });
            expected.as_object_mut().unwrap().append(all);
            expected
        };
        let params = SamplingParams::new;
        assert_eq!(body(params()), common(json!({})));
        assert_eq!(body(params().stop("a")), common(json!({"stop": ["a"]})));
        assert_eq!(body(params().stop(["a", "b"])), common(json!({"stop": ["a", "b"]})));
        assert_eq!(body(params().stop([3_u32, 4])), common(json!({"stop_token_ids": [3, 4]})));
        let never = params().stop(StopCondition::NEVER);
        assert_eq!(body(never), common(json!({"ignore_eos": true})));
        let all = params().max_tokens(5).seed(u64::MAX).top_k(9).temperature(0.5).top_p(0.25);
        let expected = json!({
            "max_tokens": 5, "seed": u64::MAX, "top_k": 9, "temperature": 0.5, "top_p": 0.25,
        });
        assert_eq!(body(all), common(expected));
        let infinite = SampleStreamRequest::new("m", [1], params().temperature(f64::INFINITY));
        assert_eq!(infinite.body().unwrap_err().field(), "temperature");
    }

    #[test]
    fn the_text_of_an_event_is_divided_by_its_offsets() {
        let texts = |text: &str, tokens: usize, offsets: &[usize]| {
            let choice = SampleStreamChoice {
                text: text.to_owned(),
                token_ids: Some(vec![7; tokens]),
                logprobs: Some(SampleStreamLogprobs {
                    token_logprobs: Vec::new(),
                    text_offset: offsets.to_vec(),
                }),
                ..SampleStreamChoice::default()
            };
            choice.token_texts()
        };
        assert_eq!(texts("ab…d", 3, &[9, 10, 12]), ["a", "b…", "d"]);
        assert_eq!(texts("ab", 3, &[0, 0, 2]), ["", "ab", ""]);
        assert_eq!(texts("ab", 1, &[5]), ["ab"]);
        for invalid in [&[][..], &[0], &[2, 1], &[0, 3], &[0, 1, 2]] {
            assert_eq!(texts("ab", 2, invalid), ["", "ab"], "{invalid:?}");
        }
        assert!(texts("", 0, &[]).is_empty());
    }

    #[test]
    fn events_have_tokens_a_failure_or_the_end() {
        let event = SampleStreamEvent::from_data(
            r#"{"id": "x", "choices": [{"index": 0, "text": "hi", "token_ids": [7],
               "logprobs": {"tokens": ["hi"], "token_logprobs": [-0.10000000149011612, null]},
               "finish_reason": "length"}]}"#,
        );
        let choice = SampleStreamChoice {
            text: "hi".to_owned(),
            token_ids: Some(vec![7]),
            logprobs: Some(SampleStreamLogprobs {
                token_logprobs: vec![Some(-0.1), None],
                text_offset: Vec::new(),
            }),
            finish_reason: Some(StopReason::Length),
            ..SampleStreamChoice::default()
        };
        assert_eq!(event.unwrap(), SampleStreamEvent::Choices(vec![choice]));
        let usage = SampleStreamEvent::from_data(r#"{"choices": [], "usage": {}}"#).unwrap();
        assert_eq!(usage, SampleStreamEvent::Choices(Vec::new()));
        let failed = SampleStreamEvent::from_data(r#"{"error": {"message": "lost"}}"#).unwrap();
        assert_eq!(failed, SampleStreamEvent::Failed("lost".to_owned()));
        let error = SampleStreamEvent::from_data(r#"{"choices": [{"token_ids": ["x"]}]}"#);
        assert_eq!(error.unwrap_err().path(), "choices[0].token_ids[0]");
    }
}
