//! [`CompletionRequest`]: the parameters of the `completions` endpoint.

use serde_json::value::RawValue;
use tinkex_text::Tokenizer;

use super::choice::ChoiceContent;
use super::sampling::{self, Delivery};
use crate::{GenerationRequest, InferenceError, Parameters, ServedModel, encode};

/// Number of tokens of a completion if the request has no `max_tokens`, as in the OpenAI API.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Maximum number of prompts of one request.
const MAX_PROMPTS: usize = 2_048;

/// A request to the `completions` endpoint.
#[derive(Debug)]
pub struct CompletionRequest {
    pub(super) model: String,
    pub(super) prompts: Vec<Prompt>,
    /// Parameters of every prompt, without the prompt.
    pub(super) generation: GenerationRequest,
    pub(super) content: ChoiceContent,
    /// Whether the text begins with the prompt.
    pub(super) echo: bool,
    pub(super) delivery: Delivery,
}

/// A prompt as text or as tokens.
#[derive(Debug, PartialEq)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl CompletionRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// Names the parameter that is missing, invalid or not supported.
    pub(super) fn parse(body: &[u8]) -> Result<Self, InferenceError> {
        let mut parameters = Parameters::parse(body)?;
        let model = parameters.require("model")?;
        let prompts = read_prompts(&parameters.require::<Box<RawValue>>("prompt")?)?;
        let (mut generation, delivery) = sampling::read(&mut parameters)?;
        parameters
            .refuse("best_of", |best| best.as_u64() == Some(generation.completions.into()))?;
        parameters.refuse("suffix", |suffix| suffix.as_str() == Some(""))?;
        let echo = parameters.take("echo")?.unwrap_or(false);
        let logprobs: Option<u32> = parameters.take("logprobs")?;
        // With an explicit null, only the context limits the completion, as in vLLM.
        let default = (!parameters.is_null("max_tokens")).then_some(DEFAULT_MAX_TOKENS);
        let max_tokens: Option<u32> = parameters.take("max_tokens")?.or(default);
        parameters.finish()?;
        if max_tokens == Some(0) && !echo {
            let reason = "0, expected at least 1 unless echo is true";
            return Err(InferenceError::invalid("max_tokens", reason));
        }
        // Scoring a prompt samples one token, which is left out.
        generation.max_tokens = max_tokens.map(|tokens| tokens.max(1));
        generation.top_logprobs = logprobs.unwrap_or(0);
        generation.prompt_logprobs = logprobs.filter(|_| echo);
        let token_ids = delivery.return_token_ids;
        let content = ChoiceContent { logprobs, token_ids, prompt_only: max_tokens == Some(0) };
        Ok(Self { model, prompts, generation, content, echo, delivery })
    }
}

/// Reads `prompt`: a string, a list of strings, a list of token ids, or a list of lists of token
/// ids.
fn read_prompts(value: &RawValue) -> Result<Vec<Prompt>, InferenceError> {
    let invalid = |error: serde_json::Error| InferenceError::invalid("prompt", error);
    let text = value.get();
    let first = text.strip_prefix('[').map(|rest| rest.trim_start().as_bytes().first().copied());
    let prompts: Vec<Prompt> = match first.flatten() {
        None => vec![Prompt::Text(serde_json::from_str(text).map_err(invalid)?)],
        Some(b'"') => {
            let texts: Vec<String> = serde_json::from_str(text).map_err(invalid)?;
            texts.into_iter().map(Prompt::Text).collect()
        }
        Some(b'[') => {
            let lists: Vec<Vec<u32>> = serde_json::from_str(text).map_err(invalid)?;
            lists.into_iter().map(Prompt::Tokens).collect()
        }
        Some(_) => vec![Prompt::Tokens(serde_json::from_str(text).map_err(invalid)?)],
    };
    if prompts.len() > MAX_PROMPTS {
        let reason = format!("{} prompts, the limit is {MAX_PROMPTS}", prompts.len());
        return Err(InferenceError::invalid("prompt", reason));
    }
    Ok(prompts)
}

impl Prompt {
    /// Returns the tokens of the prompt.
    ///
    /// # Errors
    /// Fails for a text if there is no tokenizer, and for a prompt without tokens.
    pub(super) fn tokens(
        &self,
        model: &dyn ServedModel,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Vec<u32>, InferenceError> {
        let invalid = |reason: &dyn std::fmt::Display| InferenceError::invalid("prompt", reason);
        let tokens = match (self, tokenizer) {
            (Self::Tokens(tokens), _) => tokens.clone(),
            (Self::Text(text), Some(tokenizer)) => encode(model, tokenizer, "prompt", text, true)?,
            (Self::Text(_), None) => {
                return Err(invalid(&"the model has no tokenizer; send token ids"));
            }
        };
        if tokens.is_empty() {
            return Err(invalid(&"expected at least one token"));
        }
        Ok(tokens)
    }

    /// Returns the text of the prompt, whose tokens are `tokens`.
    pub(super) fn text(&self, tokens: &[u32], tokenizer: Option<&Tokenizer>) -> String {
        match (self, tokenizer) {
            (Self::Text(text), _) => text.clone(),
            (Self::Tokens(_), Some(tokenizer)) => tokenizer.decode(tokens).unwrap_or_default(),
            (Self::Tokens(_), None) => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text_limit::tests::Refusing;

    #[test]
    fn a_prompt_has_four_forms() {
        let read = |text: &str| {
            let body = format!(r#"{{"model": "m", "prompt": {text}}}"#);
            CompletionRequest::parse(body.as_bytes()).map(|request| request.prompts)
        };
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(read(r#""a""#).unwrap(), [text("a")]);
        assert_eq!(read(r#"["a", "b"]"#).unwrap(), [text("a"), text("b")]);
        assert_eq!(read("[ 1, 2]").unwrap(), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(
            read("[ [1], [2, 3]]").unwrap(),
            [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]
        );
        for invalid in ["null", "5", "{}", "[1, \"a\"]", "[\"a\", 1]", "[-1]", "[[1], 2]", "[1.5]"]
        {
            let error = read(invalid).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("prompt"), "{invalid}");
        }
        let empty = read("[]").unwrap();
        let tokens = |prompt: &Prompt| prompt.tokens(&Refusing, None);
        assert!(tokens(&empty[0]).is_err() && tokens(&text("a")).is_err());
    }

    #[test]
    fn unsupported_parameters_are_refused_unless_they_are_neutral() {
        let parse = |text: &str| {
            CompletionRequest::parse(format!(r#"{{"model": "m", "prompt": [1]{text}}}"#).as_bytes())
        };
        let request = parse(r#", "n": 2, "best_of": 2, "suffix": "", "logprobs": 3"#).unwrap();
        assert_eq!((request.generation.max_tokens, request.generation.top_logprobs), (Some(16), 3));
        assert_eq!(request.generation.prompt_logprobs, None);
        assert_eq!(parse(r#", "max_tokens": null"#).unwrap().generation.max_tokens, None);
        let request = parse(r#", "echo": true, "logprobs": 0, "max_tokens": 0"#).unwrap();
        assert_eq!(request.generation.prompt_logprobs, Some(0));
        assert!(request.content.prompt_only);
        for (text, param) in [
            (r#", "best_of": 2"#, "best_of"),
            (r#", "suffix": "x""#, "suffix"),
            (r#", "max_tokens": 0"#, "max_tokens"),
            (r#", "logprobs": true"#, "logprobs"),
            (r#", "messages": []"#, "messages"),
        ] {
            let error = parse(text).err().unwrap();
            assert_eq!(error.param.as_deref(), Some(param), "{text}");
        }
    }
}
