//! Text of a completion that is sampled in pieces, decoded on the client.

use tinkex_wire::{InputChunk, ModelInput, SamplingParams, StopCondition};

use crate::error::Result;
use crate::sampling::SamplingClient;

use super::TextSource;

#[cfg(feature = "tokenizer")]
pub(super) use tinkex_text::TextDecoder as PieceDecoder;

/// Without the feature `tokenizer`, pieces have no text.
#[cfg(not(feature = "tokenizer"))]
pub(super) enum PieceDecoder {}

#[cfg(not(feature = "tokenizer"))]
impl PieceDecoder {
    pub(super) fn after(self, _: u32) -> Self {
        match self {}
    }

    pub(super) fn push(&mut self, _: u32) -> Result<String> {
        match *self {}
    }

    pub(super) fn finish(&mut self) -> Result<String> {
        match *self {}
    }

    pub(super) fn matched_stop(&self) -> Option<&str> {
        match *self {}
    }
}

/// Returns the decoder of the tokens that `client` samples; `None` if they have no text.
#[cfg(feature = "tokenizer")]
pub(super) async fn decoder(
    source: &TextSource,
    client: &SamplingClient,
    params: &SamplingParams,
) -> Result<Option<PieceDecoder>> {
    let loaded;
    let tokenizer = match source {
        TextSource::None => return Ok(None),
        TextSource::Tokenizer(tokenizer) => tokenizer,
        TextSource::BaseModel => {
            loaded = client.tokenizer().await?;
            &loaded
        }
    };
    let stops = match &params.stop {
        Some(StopCondition::Text(text)) => std::slice::from_ref(text),
        Some(StopCondition::Texts(texts)) => texts,
        _ => &[],
    };
    Ok(Some(PieceDecoder::new(tokenizer.inner()).stop_strings(stops.iter().cloned())))
}

#[cfg(not(feature = "tokenizer"))]
#[expect(clippy::unused_async, reason = "with the feature `tokenizer` it loads a tokenizer")]
pub(super) async fn decoder(
    _: &TextSource,
    _: &SamplingClient,
    _: &SamplingParams,
) -> Result<Option<PieceDecoder>> {
    Ok(None)
}

/// Sets the token that precedes the text: the last one of the prompt. Some tokenizers write the first
/// word of a text without the space before it.
pub(super) fn after_prompt(decoder: PieceDecoder, prompt: &ModelInput) -> PieceDecoder {
    match prompt.chunks.last() {
        Some(InputChunk::EncodedText { tokens }) => match tokens.last() {
            Some(last) => decoder.after(*last),
            None => decoder,
        },
        _ => decoder,
    }
}

/// Returns whether `token` is a stop token of the request. Stop tokens are not part of the text.
pub(super) fn is_stop_token(params: &SamplingParams, token: u32) -> bool {
    matches!(&params.stop, Some(StopCondition::Tokens(tokens)) if tokens.contains(&token))
}
