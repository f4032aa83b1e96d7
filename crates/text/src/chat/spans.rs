//! [`AssistantSpans`]: positions of the assistant messages in a rendered conversation.
//!
//! An assistant message begins where the prompt for it ends, so that training and sampling see the
//! same tokens. If the template marks generated text, the marks are the positions; otherwise a
//! [`MessageLocator`] finds them. Some templates render a message differently once other messages
//! follow, for example without its thinking. The conversation is rejected if the position of such a
//! message is not certain.

use std::ops::Range;

use minijinja::Value;

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Tokenizer;

use super::locate::MessageLocator;
use super::{ChatFormat, Message, values};

/// A rendered conversation with the positions of its assistant messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssistantSpans {
    /// The rendered conversation.
    pub text: String,
    /// Byte ranges of the messages in the text, in order, each from the end of the message's prompt
    /// to the token that ends the message, inclusive. A template that marks generated text may mark
    /// several ranges of a message.
    pub spans: Vec<Range<usize>>,
}

impl ChatFormat {
    /// Renders a conversation and finds the messages of the assistant at the `indices`, which are in
    /// ascending order. The last index must be the index of the last message of the conversation.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the template rejects the conversation, or if it renders
    /// earlier messages so differently that their position is not certain.
    pub fn assistant_spans(
        &self,
        messages: &[Message],
        indices: &[usize],
    ) -> Result<AssistantSpans> {
        let messages = &*values(messages);
        let rendered = self.render_values(messages, false)?;
        let spans = if self.template().marks_generation() {
            self.marked_spans(messages, indices, rendered.generated)?
        } else {
            let locate = |index: &usize| {
                let rendered = &*rendered.text;
                let index = *index;
                MessageLocator { format: self, messages, rendered, index }.locate()
            };
            indices.iter().map(locate).collect::<Result<_>>()?
        };
        Ok(AssistantSpans { text: rendered.text, spans })
    }

    /// Returns the byte ranges that the template marks as generated, from the first of the
    /// `indices` messages on. `generated` are the ranges in all `messages`.
    fn marked_spans(
        &self,
        messages: &[Value],
        indices: &[usize],
        mut generated: Vec<Range<usize>>,
    ) -> Result<Vec<Range<usize>>> {
        let first = indices.first().copied().unwrap_or_default();
        let earlier = &messages[..first];
        // A message may have several ranges, so render the earlier messages to count theirs.
        let earlier_ranges = if earlier.iter().any(is_assistant) {
            self.render_values(earlier, false)?.generated.len()
        } else {
            0
        };
        generated.drain(..earlier_ranges.min(generated.len()));
        generated.retain(|span| !span.is_empty());
        if generated.is_empty() {
            let message = "the chat template marks no text of this conversation as generated";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        Ok(generated)
    }
}

fn is_assistant(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

impl Tokenizer {
    /// Encodes a text. Returns each token, and whether the token is within a span of `spans`, which
    /// must be in order and must not overlap. No token crosses the boundary of a span, unless the
    /// tokenizer encodes the beginning of a text differently: then a token belongs to the span in
    /// which it ends.
    /// `add_special_tokens` adds the tokens that the tokenizer adds to every text.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if spans overlap, or if the tokenizer cannot encode the text.
    pub fn encode_spans(
        &self,
        text: &str,
        spans: &[Range<usize>],
        add_special_tokens: bool,
    ) -> Result<Vec<(u32, bool)>> {
        if spans.windows(2).any(|pair| pair[0].end > pair[1].start) {
            let message = "messages overlap in the rendered conversation";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        if self.encodes_piecewise() {
            self.encode_piecewise(text, spans, add_special_tokens)
        } else {
            self.encode_whole(text, spans, add_special_tokens)
        }
    }

    /// Encodes each span, and each text between two spans, separately.
    fn encode_piecewise(
        &self,
        text: &str,
        spans: &[Range<usize>],
        add_special_tokens: bool,
    ) -> Result<Vec<(u32, bool)>> {
        let mut tokens = Vec::new();
        let mut add = |piece: &str, within: bool, add_special_tokens: bool| -> Result<()> {
            if !piece.is_empty() || add_special_tokens {
                let ids = self.ids(piece, add_special_tokens)?;
                tokens.extend(ids.into_iter().map(|id| (id, within)));
            }
            Ok(())
        };
        let mut encoded = 0;
        for span in spans {
            add(&text[encoded..span.start], false, add_special_tokens && encoded == 0)?;
            add(&text[span.clone()], true, false)?;
            encoded = span.end;
        }
        add(&text[encoded..], false, false)?;
        Ok(tokens)
    }

    /// Encodes the text in one piece.
    fn encode_whole(
        &self,
        text: &str,
        spans: &[Range<usize>],
        add_special_tokens: bool,
    ) -> Result<Vec<(u32, bool)>> {
        let tokens = self.ids_with_ends(text, add_special_tokens)?.into_iter();
        let within = |end| spans.iter().any(|span| span.start < end && end <= span.end);
        Ok(tokens.map(|(id, end)| (id, within(end))).collect())
    }
}
