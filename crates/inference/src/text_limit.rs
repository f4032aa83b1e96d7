//! [`TextLimit`]: refuses prompts that cannot fit into the context of a model by their length,
//! because a tokenizer needs hundreds of bytes of memory per byte of text.

use tinkex_text::Tokenizer;

use crate::{ErrorClass, InferenceError, ServedModel};

/// Size in bytes that a chat template may always write. The limit grows with the size of the
/// request.
pub const SHORT_RENDERED_BYTES: usize = 32 << 10;

/// Maximum number of bytes that a chat template writes per byte of the request, beyond
/// [`SHORT_RENDERED_BYTES`]. Templates write every message once.
const RENDERED_PER_REQUEST_BYTE: usize = 8;

/// Maximum size of a text that a model accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TextLimit {
    /// Size in bytes beyond which no text fits into the context, and the context in tokens; `None`
    /// if either is not known.
    context: Option<(usize, usize)>,
    /// Maximum number of bytes that the server accepts.
    server: usize,
}

impl TextLimit {
    pub(crate) fn new(model: &dyn ServedModel, tokenizer: &Tokenizer) -> Self {
        let context = model.context().and_then(|tokens| {
            let bytes = tokenizer.max_text_bytes(tokens)?;
            Some((bytes, tokens))
        });
        Self { context, server: model.max_text_bytes() }
    }

    /// Returns the limit of a server that has memory for texts of `bytes` bytes, for a model whose
    /// context is not known.
    #[cfg(test)]
    pub(crate) const fn server_only(bytes: usize) -> Self {
        Self { context: None, server: bytes }
    }

    /// Returns the maximum size of the text that a chat template may write for a request of
    /// `request_bytes` bytes.
    pub(crate) fn rendered_bytes(self, request_bytes: usize) -> usize {
        let context = self.context.map_or(usize::MAX, |(bytes, _)| bytes);
        let request = request_bytes.saturating_mul(RENDERED_PER_REQUEST_BYTE);
        request.max(SHORT_RENDERED_BYTES).min(context).min(self.server)
    }

    /// Checks the size of the text of the parameter `param`.
    ///
    /// # Errors
    /// [`ErrorClass::ContextLength`] if no text of this size fits into the context,
    /// [`ErrorClass::InvalidRequest`] if the server does not accept it.
    pub(crate) fn check(self, param: &str, bytes: usize) -> Result<(), InferenceError> {
        if let Some((longest, context)) = self.context
            && bytes > longest
        {
            let message = format!(
                "{param}: {bytes} bytes of text exceed the model's context window of {context} \
                 tokens, which have at most {longest} bytes"
            );
            return Err(InferenceError::new(ErrorClass::ContextLength, message).caused_by(param));
        }
        if bytes > self.server {
            let reason = format!(
                "{bytes} bytes of text, but this server has memory to tokenize {} bytes",
                self.server
            );
            return Err(InferenceError::invalid(param, reason));
        }
        Ok(())
    }
}

/// Encodes the text of the parameter `param`, with the special tokens that the tokenizer adds to
/// every text if `special` is true. Refuses a text that is too long without encoding it.
pub(crate) fn encode(
    model: &dyn ServedModel,
    tokenizer: &Tokenizer,
    param: &str,
    text: &str,
    special: bool,
) -> Result<Vec<u32>, InferenceError> {
    TextLimit::new(model, tokenizer).check(param, text.len())?;
    let tokens = model.encode(tokenizer, text, special);
    tokens.map_err(|error| InferenceError::invalid(param, error))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{ChatModel, GenerationRequest, TokenStream};

    /// A model that accepts texts of 1,000 bytes and never encodes or samples.
    pub(crate) struct Refusing;

    impl ServedModel for Refusing {
        fn name(&self) -> &str {
            "refusing"
        }

        fn eos(&self) -> &[u32] {
            &[]
        }

        fn tokenizer(&self) -> Option<Tokenizer> {
            None
        }

        fn chat(&self) -> Result<ChatModel, String> {
            Err("no chat".to_owned())
        }

        fn context(&self) -> Option<usize> {
            Some(100)
        }

        fn max_text_bytes(&self) -> usize {
            1_000
        }

        fn encode(&self, _: &Tokenizer, _: &str, _: bool) -> tinkex_text::Result<Vec<u32>> {
            panic!("a refused text is not encoded")
        }

        fn generate(&self, _: GenerationRequest) -> Result<TokenStream, InferenceError> {
            panic!("a refused request is not sampled")
        }
    }

    /// A byte-level tokenizer, whose longest token has three bytes.
    fn tokenizer() -> Tokenizer {
        let json = r#"{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"aa":1,"aaa":2},
            "merges":[["a","a"],["aa","a"]]},
            "decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}}"#;
        Tokenizer::from_json(json).unwrap()
    }

    #[test]
    fn a_text_that_cannot_fit_into_the_context_is_refused_before_it_is_encoded() {
        let text = "a".repeat(301);
        let error = encode(&Refusing, &tokenizer(), "prompt", &text, true).unwrap_err();
        assert_eq!(error.class(), ErrorClass::ContextLength);
        assert_eq!(error.param(), Some("prompt"));
        assert!(error.to_string().contains("301 bytes of text exceed"), "{error}");
        let limit = TextLimit::new(&Refusing, &tokenizer());
        assert!(limit.check("prompt", 300).is_ok());
    }

    #[test]
    fn a_text_that_needs_too_much_memory_is_refused() {
        // The tokens of a word-level tokenizer stand for texts of any length.
        let json =
            r#"{"version":"1.0","model":{"type":"WordLevel","unk_token":"?","vocab":{"?":0}}}"#;
        let words = Tokenizer::from_json(json).unwrap();
        let text = "a".repeat(1_001);
        let error = encode(&Refusing, &words, "prompt", &text, true).unwrap_err();
        assert_eq!(error.class(), ErrorClass::InvalidRequest);
        assert!(error.to_string().contains("memory to tokenize 1000 bytes"), "{error}");
    }

    #[test]
    fn a_template_may_write_in_proportion_to_the_request() {
        let limit = TextLimit::server_only(usize::MAX);
        assert_eq!(limit.rendered_bytes(10), SHORT_RENDERED_BYTES);
        assert_eq!(limit.rendered_bytes(1 << 20), 8 << 20);
        let context = TextLimit { context: Some((300, 100)), server: 1_000 };
        assert_eq!(context.rendered_bytes(1 << 20), 300);
    }
}
