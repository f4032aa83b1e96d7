//! [`PieceDecoder`]: decodes the text of a completion that is sampled in pieces.

use tinkex_wire::{InputChunk, ModelInput, SamplingParams, StopCondition};

use crate::error::Result;
use crate::sampling::SamplingClient;
#[cfg(feature = "tokenizer")]
use crate::tokenizer::text_error;

use super::TextSource;

/// Decoder of the tokens of all pieces.
#[cfg(feature = "tokenizer")]
pub(super) struct PieceDecoder(tinkex_text::TextDecoder);

#[cfg(feature = "tokenizer")]
impl PieceDecoder {
    pub(super) fn after(self, token: u32) -> Self {
        Self(self.0.after(token))
    }

    pub(super) fn push(&mut self, token: u32) -> Result<String> {
        self.0.push(token).map_err(text_error)
    }

    pub(super) fn finish(&mut self) -> Result<String> {
        self.0.finish().map_err(text_error)
    }

    pub(super) fn matched_stop(&self) -> Option<&str> {
        self.0.matched_stop()
    }
}

/// Uninhabited: without the feature `tokenizer`, pieces have no text and no decoder exists.
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
    let decoder = tinkex_text::TextDecoder::new(tokenizer.inner());
    Ok(Some(PieceDecoder(decoder.stop_strings(stops.iter().cloned()))))
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

/// Sets the token that precedes the text: the last token of the prompt. Some tokenizers omit the
/// space before the first word of a text, so the decoder must know that the completion is not the
/// start of a text.
pub(super) fn after_prompt(decoder: PieceDecoder, prompt: &ModelInput) -> PieceDecoder {
    match prompt.chunks.last() {
        Some(InputChunk::EncodedText { tokens, .. }) => match tokens.last() {
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
