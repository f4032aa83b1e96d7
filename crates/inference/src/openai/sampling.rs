//! Parameters that `completions` and `chat/completions` share.

use serde::Deserialize;

use crate::{GenerationRequest, InferenceError, Parameters};

/// Parameters that have no effect on the answer.
const IGNORED: &[&str] = &[
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
];

/// How the response is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Delivery {
    /// Whether tokens are sent as they are sampled.
    pub(crate) stream: bool,
    /// Whether a stream ends with an event that has the usage.
    pub(crate) include_usage: bool,
    /// Whether choices contain `token_ids`, an extension that vLLM has too.
    pub(crate) return_token_ids: bool,
}

/// `stop`: one string or several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    /// Pads events to hide their length from observers of the network; has no effect here.
    #[serde(default, rename = "include_obfuscation")]
    _include_obfuscation: bool,
}

/// Reads the shared parameters into a request without a prompt.
///
/// # Errors
/// Names the parameter that is invalid or not supported.
pub(crate) fn read(
    parameters: &mut Parameters,
) -> Result<(GenerationRequest, Delivery), InferenceError> {
    let zero = |value: &serde_json::Value| value.as_f64() == Some(0.0);
    parameters.refuse("frequency_penalty", zero)?;
    parameters.refuse("presence_penalty", zero)?;
    parameters
        .refuse("logit_bias", |bias| bias.as_object().is_some_and(serde_json::Map::is_empty))?;
    parameters.ignore(IGNORED);
    let mut request = GenerationRequest::new(Vec::new());
    request.completions = parameters.take("n")?.unwrap_or(1);
    request.temperature = parameters.take("temperature")?.unwrap_or(1.0);
    request.top_p = parameters.take("top_p")?.unwrap_or(1.0);
    request.top_k = match parameters.take::<i64>("top_k")? {
        None | Some(-1 | 0) => None,
        Some(k) => Some(u32::try_from(k).map_err(|_| {
            InferenceError::invalid("top_k", format!("{k}, expected a count, or -1 for all tokens"))
        })?),
    };
    request.seed = seed(parameters)?;
    request.stop_texts = match parameters.take("stop")? {
        None => Vec::new(),
        Some(Stop::One(text)) => vec![text],
        Some(Stop::Many(texts)) => texts,
    };
    request.stop_tokens = parameters.take("stop_token_ids")?.unwrap_or_default();
    request.ignore_eos = parameters.take("ignore_eos")?.unwrap_or(false);
    let options: Option<StreamOptions> = parameters.take("stream_options")?;
    let delivery = Delivery {
        stream: parameters.take("stream")?.unwrap_or(false),
        include_usage: options.is_some_and(|options| options.include_usage),
        return_token_ids: parameters.take("return_token_ids")?.unwrap_or(false),
    };
    Ok((request, delivery))
}

/// Reads a seed: any 64-bit integer. A negative seed is used as its bit pattern, as in the Tinker
/// API.
fn seed(parameters: &mut Parameters) -> Result<Option<u64>, InferenceError> {
    let Some(number) = parameters.take::<serde_json::Number>("seed")? else { return Ok(None) };
    let seed = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
    let invalid =
        || InferenceError::invalid("seed", format!("{number}, expected a 64-bit integer"));
    seed.map(Some).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<(GenerationRequest, Delivery), InferenceError> {
        let mut parameters = Parameters::parse(text.as_bytes())?;
        let read = read(&mut parameters)?;
        parameters.finish()?;
        Ok(read)
    }

    #[test]
    fn parameters_are_read_or_refused_by_name() {
        let (request, delivery) = read_text(
            r#"{"n": 2, "temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -1, "stop": "x",
                "stop_token_ids": [5], "ignore_eos": true, "stream": true, "user": "me",
                "stream_options": {"include_usage": true}, "logit_bias": {}, "presence_penalty": 0}"#,
        )
        .unwrap();
        assert_eq!(
            (request.completions, request.top_k, request.seed),
            (2, Some(7), Some(u64::MAX))
        );
        assert_eq!(
            (&request.stop_texts[..], &request.stop_tokens[..]),
            (&["x".into()][..], &[5][..])
        );
        assert!(request.ignore_eos && delivery.stream && delivery.include_usage);
        for (text, param) in [
            (r#"{"frequency_penalty": 0.5}"#, "frequency_penalty"),
            (r#"{"logit_bias": {"50256": -100}}"#, "logit_bias"),
            (r#"{"stop": 5}"#, "stop"),
            (r#"{"seed": 1.5}"#, "seed"),
            (r#"{"top_k": -7}"#, "top_k"),
            (r#"{"n": -1}"#, "n"),
            (r#"{"stream_options": {"x": 1}}"#, "stream_options"),
            (r#"{"min_tokens": 5}"#, "min_tokens"),
        ] {
            let error = read_text(text).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{text}: {error}");
        }
    }
}
