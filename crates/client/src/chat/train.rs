//! Training examples from conversations: the tokens of the rendered text, with weight 1 for the
//! messages of the assistant.
//!
//! A message of the assistant begins where the prompt for it ends, so that training and sampling
//! see the same tokens. Its position comes from the template if it marks generated text, else from
//! a [`MessageLocator`]. Some templates render a message differently once others follow, for
//! example without its thinking: where the position is still certain the message is learned as
//! rendered, otherwise the conversation is rejected.

use std::ops::Range;

use minijinja::Value;
use tinkex_wire::{Datum, Tokens};

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Tokenizer;

use super::locate::MessageLocator;
use super::{Chat, Message, values};

/// Selection of the messages of a conversation to train on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
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
    /// [`TrainOn::EachAssistant`]. Messages after the last one of the assistant are left out.
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
        let values = values(messages);
        match train_on {
            TrainOn::AllAssistant => Ok(vec![self.example(&values[..=last], &assistant_indices)?]),
            TrainOn::LastAssistant => Ok(vec![self.example(&values[..=last], &[last])?]),
            TrainOn::EachAssistant => {
                let example = |index: &usize| self.example(&values[..=*index], &[*index]);
                assistant_indices.iter().map(example).collect()
            }
        }
    }

    /// Creates an example of a conversation that ends with the last of the `learned` messages.
    /// `learned` are the indices of the messages to train on, in ascending order.
    fn example(&self, messages: &[Value], learned: &[usize]) -> Result<TrainingExample> {
        let rendered = self.render_values(messages, false)?;
        let spans = if self.template().marks_generation() {
            self.marked_spans(messages, learned, rendered.generated)?
        } else {
            let locate = |index: &usize| {
                let (rendered, index) = (&*rendered.text, *index);
                MessageLocator { chat: self, messages, rendered, index }.locate()
            };
            learned.iter().map(locate).collect::<Result<_>>()?
        };
        encode(&self.tokenizer, &rendered.text, &spans, false)
    }

    /// Returns the byte ranges that the template marks as generated, from the first of the
    /// `learned` messages on. `generated` are the ranges in all `messages`.
    fn marked_spans(
        &self,
        messages: &[Value],
        learned: &[usize],
        mut generated: Vec<Range<usize>>,
    ) -> Result<Vec<Range<usize>>> {
        let first = learned.first().copied().unwrap_or_default();
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

/// Encodes a text with weight 1 within `spans`, which must be in order and not overlap.
pub(crate) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    spans: &[Range<usize>],
    add_special_tokens: bool,
) -> Result<TrainingExample> {
    if spans.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "messages overlap in the rendered conversation",
        ));
    }
    match tokenizer.encodes_piecewise() {
        true => encode_piecewise(tokenizer, text, spans, add_special_tokens),
        false => encode_whole(tokenizer, text, spans, add_special_tokens),
    }
}

/// Encodes each span, and each text between two spans, separately, so that no token crosses the
/// boundary of a span.
fn encode_piecewise(
    tokenizer: &Tokenizer,
    text: &str,
    spans: &[Range<usize>],
    add_special_tokens: bool,
) -> Result<TrainingExample> {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    let mut add = |piece: &str, weight: f32, add_special_tokens: bool| -> Result<()> {
        if !piece.is_empty() || add_special_tokens {
            ids.extend(tokenizer.ids(piece, add_special_tokens)?);
            weights.resize(ids.len(), weight);
        }
        Ok(())
    };
    let mut encoded = 0;
    for span in spans {
        add(&text[encoded..span.start], 0.0, add_special_tokens && encoded == 0)?;
        add(&text[span.clone()], 1.0, false)?;
        encoded = span.end;
    }
    add(&text[encoded..], 0.0, false)?;
    Ok(TrainingExample { tokens: ids.into(), weights })
}

/// Encodes the text in one piece, for tokenizers that encode the beginning of a text differently. A
/// token belongs to the span in which it ends.
fn encode_whole(
    tokenizer: &Tokenizer,
    text: &str,
    spans: &[Range<usize>],
    add_special_tokens: bool,
) -> Result<TrainingExample> {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for (id, end) in tokenizer.ids_with_ends(text, add_special_tokens)? {
        let within = spans.iter().any(|span| span.start < end && end <= span.end);
        ids.push(id);
        weights.push(f32::from(u8::from(within)));
    }
    Ok(TrainingExample { tokens: ids.into(), weights })
}
