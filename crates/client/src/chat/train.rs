//! Training examples from conversations: locates the assistant's messages in the rendered text.
//!
//! A message begins where the prompt for it ends, so that training and sampling see the same
//! tokens. Its position is found by rendering the conversation up to it. Some templates render a
//! message differently once others follow, for example without its thinking: where the position is
//! still certain the message is used as rendered, otherwise the conversation is rejected.

use std::ops::Range;

use minijinja::Value;
use tinkex_wire::{Datum, Tokens};

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Tokenizer;

use super::{Chat, Message, values};

/// Content of a message that is rendered to find the text that the template writes around it.
pub(crate) const PROBE: &str = "tinkex-9f4b1c-probe";

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
        let turns: Vec<usize> = messages
            .iter()
            .enumerate()
            .filter_map(|(i, message)| message.is_assistant().then_some(i))
            .collect();
        let Some(last) = turns.last().copied() else {
            let message = "the conversation has no message of the assistant";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        };
        let values = values(messages);
        match train_on {
            TrainOn::AllAssistant => Ok(vec![self.example(&values[..=last], &turns)?]),
            TrainOn::LastAssistant => Ok(vec![self.example(&values[..=last], &[last])?]),
            TrainOn::EachAssistant => {
                turns.iter().map(|turn| self.example(&values[..=*turn], &[*turn])).collect()
            }
        }
    }

    /// Creates an example of a conversation. `turns` are the indices of the messages to train on.
    fn example(&self, messages: &[Value], turns: &[usize]) -> Result<TrainingExample> {
        let whole = self.render_values(messages, false)?;
        let spans = if self.template().marks_generation() {
            self.marked_spans(messages, turns, whole.generated)?
        } else {
            let span = |turn: &usize| self.message_span(&whole.text, messages, *turn);
            turns.iter().map(span).collect::<Result<_>>()?
        };
        encode(&self.tokenizer, &whole.text, &spans, false)
    }

    /// Returns the byte ranges that the template marks as generated, from the first message to
    /// train on.
    fn marked_spans(
        &self,
        messages: &[Value],
        turns: &[usize],
        mut generated: Vec<Range<usize>>,
    ) -> Result<Vec<Range<usize>>> {
        let first = turns.first().copied().unwrap_or_default();
        let before = if messages[..first].iter().any(is_assistant) {
            self.render_values(&messages[..first], false)?.generated.len()
        } else {
            0
        };
        generated.drain(..before.min(generated.len()));
        generated.retain(|span| !span.is_empty());
        if generated.is_empty() {
            let message = "the chat template marks no text of this conversation as generated";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        Ok(generated)
    }

    /// Returns the byte range of a message in the rendered conversation.
    fn message_span(&self, whole: &str, messages: &[Value], turn: usize) -> Result<Range<usize>> {
        let locating = |error: Error| error.during(format!("locating message {}", turn + 1));
        let prompt = self.render_values(&messages[..turn], true).map_err(locating)?.text;
        let start = if whole.starts_with(&prompt) {
            prompt.len()
        } else if turn + 1 < messages.len() {
            self.start_of_rewritten(whole, messages, turn, &prompt)?
        } else {
            return Err(uncertain(turn, "does not render it after its own prompt"));
        };
        let through = self.render_values(&messages[..=turn], false).map_err(locating)?.text;
        let end = if whole.starts_with(&through) && through.len() > start {
            through.len()
        } else {
            self.end_of_rewritten(whole, messages, turn, start)?
        };
        // The model does not generate what follows the token that ends the message.
        let text = whole[start..end].trim_end();
        let end = if self.tokenizer.ends_with_special(text) { start + text.len() } else { end };
        if start == end {
            return Err(uncertain(turn, "renders nothing for it"));
        }
        Ok(start..end)
    }

    /// Returns the beginning of a message whose preceding text the template changed because other
    /// messages follow. That text is the same for any content of the message, and must end like its
    /// prompt.
    fn start_of_rewritten(
        &self,
        whole: &str,
        messages: &[Value],
        turn: usize,
        prompt: &str,
    ) -> Result<usize> {
        let (before, _) = self.around_probe(messages, turn)?;
        let history = self.render_values(&messages[..turn], false)?.text;
        match prompt.strip_prefix(&*history) {
            Some(opening)
                if !opening.is_empty()
                    && before.ends_with(opening)
                    && whole.starts_with(&*before) =>
            {
                Ok(before.len())
            }
            _ => Err(uncertain(turn, "changes the text before it once other messages follow")),
        }
    }

    /// Returns the end of a message that the template shortened because other messages follow. The
    /// text after it is the same for any content of the message, so it is found from the end.
    fn end_of_rewritten(
        &self,
        whole: &str,
        messages: &[Value],
        turn: usize,
        start: usize,
    ) -> Result<usize> {
        let (_, rest) = self.around_probe(messages, turn)?;
        let (_, closing) = self.around_probe(&messages[..=turn], turn)?;
        // Some templates end the last message with another token than earlier ones. The model must
        // learn the token that stops it.
        let closing = if rest.starts_with(&*closing) { &*closing } else { closing.trim_end() };
        match whole.strip_suffix(&*rest) {
            Some(before) if before.len() > start && rest.starts_with(closing) => {
                Ok(before.len() + closing.len())
            }
            _ => Err(uncertain(
                turn,
                "changes its end or the text after it once other messages follow",
            )),
        }
    }

    /// Returns the text that the template renders before and after a message, found by rendering
    /// [`PROBE`] in place of its content.
    fn around_probe(&self, messages: &[Value], turn: usize) -> Result<(String, String)> {
        let mut probed = messages.to_vec();
        probed[turn] = Message::assistant(PROBE).value();
        let text = self.render_values(&probed, false)?.text;
        match text.split_once(PROBE) {
            Some((before, after)) if !after.contains(PROBE) => {
                Ok((before.to_owned(), after.to_owned()))
            }
            _ => Err(uncertain(turn, "changes its content")),
        }
    }
}

fn is_assistant(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

/// Error returned when the position of a message in the rendered conversation is not certain.
fn uncertain(turn: usize, reason: &str) -> Error {
    let number = turn + 1;
    let message = format!("cannot locate message {number}: the chat template {reason}");
    Error::new(ErrorKind::InvalidInput, message)
        .with_hint("Train on each message separately (TrainOn::EachAssistant) or only on the last.")
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
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    if tokenizer.encodes_piecewise() {
        let mut add = |piece: &str, weight: f32, add_special_tokens: bool| -> Result<()> {
            if !piece.is_empty() || add_special_tokens {
                ids.extend(tokenizer.ids(piece, add_special_tokens)?);
                weights.resize(ids.len(), weight);
            }
            Ok(())
        };
        let mut at = 0;
        for span in spans {
            add(&text[at..span.start], 0.0, add_special_tokens && at == 0)?;
            add(&text[span.clone()], 1.0, false)?;
            at = span.end;
        }
        add(&text[at..], 0.0, false)?;
    } else {
        // This tokenizer encodes the beginning of a text differently, so the text must stay in one
        // piece. A token belongs to the span in which it ends.
        for (id, end) in tokenizer.ids_with_ends(text, add_special_tokens)? {
            let within = spans.iter().any(|span| span.start < end && end <= span.end);
            ids.push(id);
            weights.push(f32::from(u8::from(within)));
        }
    }
    Ok(TrainingExample { tokens: ids.into(), weights })
}
