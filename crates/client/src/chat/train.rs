//! What a model learns from a conversation: its own turns, and nothing around them.
//!
//! A turn begins where the prompt for it ends, so that training sees what sampling will see. It is
//! found by writing the conversation up to it; a template that writes earlier turns differently
//! later (leaving out thinking, say) is followed as far as that is exact, and refused beyond.

use std::ops::Range;

use minijinja::Value;
use tinkex_wire::{Datum, Tokens};

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Tokenizer;

use super::{Chat, Message, values};

/// Stands for what an assistant says, to see what a template puts behind it.
pub(crate) const PROBE: &str = "tinkex-9f4b1c-probe";

/// Which turns a model learns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TrainOn {
    /// All that the assistant says, in one example.
    #[default]
    AllAssistant,
    /// What the assistant says last.
    LastAssistant,
    /// All that the assistant says, in one example per turn. Each has the history that the model
    /// will see there, also where a template leaves out the thinking of earlier turns.
    EachAssistant,
}

/// Tokens, and how much each counts.
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
    /// The whole sequence.
    pub tokens: Tokens,
    /// One number per token: 1 for what is learned, 0 for what is only read.
    pub weights: Vec<f32>,
}

impl TrainingExample {
    /// The training example: targets shifted by one, weights with them.
    ///
    /// # Errors
    /// If there are fewer than two tokens, or not as many weights as tokens.
    pub fn into_datum(self) -> Result<Datum> {
        Ok(Datum::supervised(self.tokens, self.weights)?)
    }

    /// The first `most` tokens.
    #[must_use]
    pub fn truncated(mut self, most: usize) -> Self {
        if self.tokens.len() > most {
            self.tokens = self.tokens.slice(..most);
            self.weights.truncate(most);
        }
        self
    }

    /// Whether anything of it is learned. The first token is not: nothing stands before it.
    #[must_use]
    pub fn has_targets(&self) -> bool {
        self.weights.iter().skip(1).any(|weight| *weight != 0.0)
    }
}

impl Chat {
    /// What a model learns from a conversation. There is one example, or one per turn with
    /// [`TrainOn::EachAssistant`]. Turns behind the last answer are left out.
    ///
    /// An answer counts from where the prompt for it ends to the token that ends the turn, inclusive.
    /// Tokens never reach across these edges, as they do not when the model is sampled from.
    ///
    /// ```no_run
    /// # fn run(tokenizer: tinkex::Tokenizer) -> tinkex::Result<()> {
    /// use tinkex::{Message, TrainOn};
    ///
    /// let talk = [Message::user("Name a river."), Message::assistant("The Rhine.")];
    /// for example in tokenizer.chat()?.examples(&talk, TrainOn::AllAssistant)? {
    ///     let datum = example.into_datum()?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If there is no answer, if the template does not take the conversation, or if it writes
    /// earlier turns so differently that what the model said there cannot be told.
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
            let why = "there is no turn of an assistant to learn from";
            return Err(Error::new(ErrorKind::InvalidInput, why));
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

    fn example(&self, messages: &[Value], turns: &[usize]) -> Result<TrainingExample> {
        let whole = self.write(messages, false)?;
        let spans = if self.template().marks_generation() {
            self.marked(messages, turns, whole.generated)?
        } else {
            let span = |turn: &usize| self.span(&whole.text, messages, *turn);
            turns.iter().map(span).collect::<Result<_>>()?
        };
        encode(&self.tokenizer, &whole.text, &spans, false)
    }

    /// What the template marks, from the first turn that counts on.
    fn marked(
        &self,
        messages: &[Value],
        turns: &[usize],
        mut generated: Vec<Range<usize>>,
    ) -> Result<Vec<Range<usize>>> {
        let first = turns.first().copied().unwrap_or_default();
        let before = if messages[..first].iter().any(is_assistant) {
            self.write(&messages[..first], false)?.generated.len()
        } else {
            0
        };
        generated.drain(..before.min(generated.len()));
        generated.retain(|span| !span.is_empty());
        if generated.is_empty() {
            let why = "the chat template marks nothing in this conversation as generated";
            return Err(Error::new(ErrorKind::InvalidInput, why));
        }
        Ok(generated)
    }

    /// Where the model wrote in the whole text.
    fn span(&self, whole: &str, messages: &[Value], turn: usize) -> Result<Range<usize>> {
        let about = |error: Error| error.during(format!("finding turn {}", turn + 1));
        let prompt = self.write(&messages[..turn], true).map_err(about)?.text;
        let start = if whole.starts_with(&prompt) {
            prompt.len()
        } else if turn + 1 < messages.len() {
            self.start_of_rewritten(whole, messages, turn, &prompt)?
        } else {
            return Err(lost(turn, "does not write it behind its own prompt"));
        };
        let through = self.write(&messages[..=turn], false).map_err(about)?.text;
        let end = if whole.starts_with(&through) && through.len() > start {
            through.len()
        } else {
            self.end_of_rewritten(whole, messages, turn, start)?
        };
        // What stands behind the token that ends the turn is not the model's.
        let said = whole[start..end].trim_end();
        let end = if self.tokenizer.ends_specially(said) { start + said.len() } else { end };
        if start == end {
            return Err(lost(turn, "writes nothing for it"));
        }
        Ok(start..end)
    }

    /// The beginning of a turn before which the template left something out because others follow.
    /// What stands before it is the same for any other answer, and must end as its prompt does.
    fn start_of_rewritten(
        &self,
        whole: &str,
        messages: &[Value],
        turn: usize,
        prompt: &str,
    ) -> Result<usize> {
        let (before, _) = self.around_probe(messages, turn)?;
        let asked = self.write(&messages[..turn], false)?.text;
        match prompt.strip_prefix(&*asked) {
            Some(opening)
                if !opening.is_empty()
                    && before.ends_with(opening)
                    && whole.starts_with(&*before) =>
            {
                Ok(before.len())
            }
            _ => Err(lost(turn, "writes what stands before it differently later")),
        }
    }

    /// The end of a turn that the template shortened because others follow. What follows is the
    /// same for any other answer, so it is found from the end of the text.
    fn end_of_rewritten(
        &self,
        whole: &str,
        messages: &[Value],
        turn: usize,
        start: usize,
    ) -> Result<usize> {
        let (_, rest) = self.around_probe(messages, turn)?;
        let (_, closing) = self.around_probe(&messages[..=turn], turn)?;
        // Some templates end the last turn with another token than those before it. The model is to
        // learn the one that it will be stopped by.
        let closing = if rest.starts_with(&*closing) { &*closing } else { closing.trim_end() };
        match whole.strip_suffix(&*rest) {
            Some(before) if before.len() > start && rest.starts_with(closing) => {
                Ok(before.len() + closing.len())
            }
            _ => Err(lost(turn, "writes its end or what stands behind it differently later")),
        }
    }

    /// What the template writes before and behind an answer, whatever it is.
    fn around_probe(&self, messages: &[Value], turn: usize) -> Result<(String, String)> {
        let mut probed = messages.to_vec();
        probed[turn] = Message::assistant(PROBE).value();
        let text = self.write(&probed, false)?.text;
        match text.split_once(PROBE) {
            Some((before, behind)) if !behind.contains(PROBE) => {
                Ok((before.to_owned(), behind.to_owned()))
            }
            _ => Err(lost(turn, "does not write it as it was said")),
        }
    }
}

fn is_assistant(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

fn lost(turn: usize, why: &str) -> Error {
    let why =
        format!("what the model said in turn {} cannot be told: the chat template {why}", turn + 1);
    Error::new(ErrorKind::InvalidInput, why)
        .with_hint("learn each turn by itself (TrainOn::EachAssistant), or only the last")
}

/// Tokens of a text, with weight 1 within the spans. They are in order and do not overlap.
pub(crate) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    spans: &[Range<usize>],
    around: bool,
) -> Result<TrainingExample> {
    if spans.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return Err(Error::new(ErrorKind::InvalidInput, "turns reach into each other"));
    }
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    if tokenizer.joins() {
        let mut add = |piece: &str, weight: f32, around: bool| -> Result<()> {
            if !piece.is_empty() || around {
                ids.extend(tokenizer.ids(piece, around)?);
                weights.resize(ids.len(), weight);
            }
            Ok(())
        };
        let mut at = 0;
        for span in spans {
            add(&text[at..span.start], 0.0, around && at == 0)?;
            add(&text[span.clone()], 1.0, false)?;
            at = span.end;
        }
        add(&text[at..], 0.0, false)?;
    } else {
        // Pieces would be encoded as if each began a text; the whole is, and a token counts for the
        // span that it ends in.
        for (id, end) in tokenizer.ids_with_ends(text, around)? {
            let within = spans.iter().any(|span| span.start < end && end <= span.end);
            ids.push(id);
            weights.push(f32::from(u8::from(within)));
        }
    }
    Ok(TrainingExample { tokens: ids.into(), weights })
}
