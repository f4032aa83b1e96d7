//! Training examples from conversations: the tokens of the rendered text, with weight 1 for the
//! messages of the assistant.

use std::ops::Range;

use tinkex_wire::{Datum, Tokens};

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::text_error;

use super::{Chat, Message};

/// Selection of the messages of a conversation to train on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrainOn {
    /// All messages of the assistant, in one example.
    #[default]
    AllAssistant,
    /// The last message of the assistant.
    LastAssistant,
    /// All messages of the assistant, in one example each. Every example has the history that the
    /// model sees when it is sampled, even if the template omits the thinking of earlier messages.
    EachAssistant,
}

/// Tokens and the weight of each in the loss.
///
/// ```
/// use tinkex::{TrainingExample, Tokens};
///
/// let example = TrainingExample { tokens: Tokens::from([1, 2, 3]), weights: vec![0.0, 0.0, 1.0] };
/// let datum = example.into_datum()?;
/// assert_eq!(datum.loss_input("target_tokens").unwrap().as_i64().unwrap(), [2, 3]);
/// assert_eq!(datum.loss_input("weights").unwrap().as_f32().unwrap(), [0.0, 1.0]);
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingExample {
    /// The complete sequence.
    pub tokens: Tokens,
    /// One weight per token: 1 for tokens to learn, 0 for context.
    pub weights: Vec<f32>,
}

impl TrainingExample {
    /// Converts to a datum for cross entropy: targets and weights are shifted by one token.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if there are fewer than two tokens, or not as many weights as
    /// tokens.
    pub fn into_datum(self) -> Result<Datum> {
        Ok(Datum::supervised(self.tokens, self.weights)?)
    }

    /// Keeps the first `max` tokens.
    #[must_use]
    pub fn truncated(mut self, max: usize) -> Self {
        if self.tokens.len() > max {
            self.tokens = self.tokens.slice(..max);
            self.weights.truncate(max);
        }
        self
    }

    /// Returns whether any token is trained on. The first token never is: no position predicts it.
    #[must_use]
    pub fn has_targets(&self) -> bool {
        self.weights.iter().skip(1).any(|weight| *weight != 0.0)
    }
}

impl Chat {
    /// Converts a conversation to training examples: one, or one per message of the assistant with
    /// [`TrainOn::EachAssistant`]. Messages after the last assistant message are left out.
    ///
    /// A message is learned from the end of its prompt to the token that ends the message,
    /// inclusive. No token crosses these boundaries, as none does when the model is sampled.
    ///
    /// ```no_run
    /// # fn run(tokenizer: tinkex::Tokenizer) -> tinkex::Result<()> {
    /// use tinkex::{Message, TrainOn};
    ///
    /// let conversation = [Message::user("Name a river."), Message::assistant("The Rhine.")];
    /// for example in tokenizer.chat()?.examples(&conversation, TrainOn::AllAssistant)? {
    ///     let datum = example.into_datum()?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the assistant has no message, if the template rejects the
    /// conversation, or if it renders earlier messages so differently that their position is not
    /// certain.
    pub fn examples(
        &self,
        messages: &[Message],
        train_on: TrainOn,
    ) -> Result<Vec<TrainingExample>> {
        let assistant_indices: Vec<usize> = messages
            .iter()
            .enumerate()
            .filter_map(|(index, message)| message.is_assistant().then_some(index))
            .collect();
        let Some(last) = assistant_indices.last().copied() else {
            let message = "the conversation has no message of the assistant";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        };
        match train_on {
            TrainOn::AllAssistant => {
                Ok(vec![self.example(&messages[..=last], &assistant_indices)?])
            }
            TrainOn::LastAssistant => Ok(vec![self.example(&messages[..=last], &[last])?]),
            TrainOn::EachAssistant => {
                let example = |index: &usize| self.example(&messages[..=*index], &[*index]);
                assistant_indices.iter().map(example).collect()
            }
        }
    }

    /// Creates an example of a conversation that ends with the last of the `learned` messages.
    /// `learned` are the indices of the messages to train on, in ascending order.
    fn example(&self, messages: &[Message], learned: &[usize]) -> Result<TrainingExample> {
        let located = self.format.assistant_spans(messages, learned).map_err(text_error)?;
        self.encode(&located.text, &located.spans, false)
    }

    /// Encodes a text with weight 1 within `spans`, which must be in order and not overlap. The end
    /// of a text that has more than the maximum number of tokens by its length is left out.
    pub(super) fn encode(
        &self,
        text: &str,
        spans: &[Range<usize>],
        add_special_tokens: bool,
    ) -> Result<TrainingExample> {
        let tokenizer = self.tokenizer.inner();
        // A text of more than `max` times the longest token has more than `max` tokens. A cut at a
        // character boundary leaves out up to three bytes more.
        let max_bytes =
            self.max_tokens.and_then(|max| tokenizer.max_text_bytes(max.saturating_add(4)));
        let end = max_bytes.map_or(text.len(), |max| text.floor_char_boundary(max));
        let kept = spans.iter().map(|span| span.start.min(end)..span.end.min(end));
        let spans: Vec<_> = kept.filter(|span| !span.is_empty()).collect();
        let tokens = tokenizer.encode_spans(&text[..end], &spans, add_special_tokens);
        let tokens = tokens.map_err(text_error)?;
        let weights = tokens.iter().map(|(_, learned)| f32::from(u8::from(*learned))).collect();
        let tokens: Vec<u32> = tokens.into_iter().map(|(id, _)| id).collect();
        Ok(TrainingExample { tokens: tokens.into(), weights })
    }
}
