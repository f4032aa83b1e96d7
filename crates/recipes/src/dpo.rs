//! Direct preference optimization: learns from pairs of a chosen and a rejected completion.
//!
//! The loss of a pair is −ln σ(β · ((ln π(c) − ln π₀(c)) − (ln π(r) − ln π₀(r)))), where π is the
//! model in training and π₀ the reference: the weights that the run starts from. The
//! log-probability of a completion is the sum over its tokens.
//!
//! ```no_run
//! use tinkex_recipes::dpo::{self, DpoPair};
//! use tinkex::{AdamParams, ServiceClient};
//!
//! # async fn run(service: ServiceClient, file: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
//! let model = service.create_lora_training_client("Qwen/Qwen3-8B").await?;
//! let chat = model.tokenizer().await?.chat()?;
//! let pairs = DpoPair::read_jsonl(&chat, file, None).map_err(|lines| format!("{lines:?}"))?;
//! let reference = dpo::reference_logprobs(&model, &pairs).await?;
//! let mut batch = Vec::new();
//! for (pair, reference) in pairs.iter().zip(reference) {
//!     batch.extend(pair.data(reference)?);
//! }
//! let output = model.step(batch, dpo::loss(0.1), AdamParams::with_learning_rate(1e-5)).await?;
//! println!("{:?} {:?}", output.loss(), output.pass.metrics["accuracy:mean"]);
//! # Ok(()) }
//! ```

use std::io::BufRead;

use serde::{Deserialize, Serialize};
use tinkex::loss::LossValue;
use tinkex::{
    Chat, Error, ErrorKind, LossSpec, Message, Result, TooLong, TrainOn, TrainingClient,
    TrainingExample,
};
use tinkex_wire::loss_input::WEIGHTS;
use tinkex_wire::{Datum, LossFn, TensorData};

/// Loss input with the log-probability of the completion under the reference model: the bits of an
/// f64 number. Rounded to f32, the margin of a pair before training would be a rounding error instead
/// of 0, and a random half of the pairs would count as accurate.
const REFERENCE: &str = "reference_logprob";
/// Number of pairs per request for reference log-probabilities.
const REFERENCE_BATCH: usize = 64;

/// Two completions of one prompt: a preferred one and a rejected one.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DpoPair {
    /// Preferred completion, with its prompt. The weights select the tokens of the completion.
    pub chosen: TrainingExample,
    /// Rejected completion, with its prompt.
    pub rejected: TrainingExample,
    /// Whether a completion had too many tokens and was truncated.
    pub truncated: bool,
}

/// Log-probabilities of the completions of a pair under the reference model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DpoReference {
    /// Log-probability of the chosen completion.
    pub chosen: f64,
    /// Log-probability of the rejected completion.
    pub rejected: f64,
}

/// Field `prompt` of a line: a text, or a conversation.
#[derive(Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Messages(Vec<Message>),
}

/// Field `chosen` or `rejected` of a line: a text, a message, or a conversation whose last message
/// is the completion.
#[derive(Deserialize)]
#[serde(untagged)]
enum CompletionField {
    Text(String),
    Messages(Vec<Message>),
    Message(Message),
}

/// Line of a file of preference pairs.
#[derive(Deserialize)]
struct DpoLine {
    #[serde(alias = "messages")]
    prompt: Option<PromptField>,
    chosen: CompletionField,
    rejected: CompletionField,
}

impl DpoPair {
    /// Creates a pair from two training examples.
    #[must_use]
    pub fn new(chosen: TrainingExample, rejected: TrainingExample) -> Self {
        Self { chosen, rejected, truncated: false }
    }

    /// Reads pairs from JSON Lines.
    ///
    /// Each line has `chosen` and `rejected`: texts that continue the text in `prompt`; messages of
    /// the assistant after the conversation in `prompt` or `messages`; or complete conversations.
    /// Empty lines and other fields are ignored. `limit` has the maximum length of a completion
    /// with its prompt, in tokens, and decides whether longer ones are truncated or rejected.
    ///
    /// # Errors
    /// Returns the number of each invalid line, from 1, with the reason.
    pub fn read_jsonl(
        chat: &Chat,
        reader: impl BufRead,
        limit: Option<(usize, TooLong)>,
    ) -> std::result::Result<Vec<Self>, Vec<(u64, String)>> {
        let mut pairs = Vec::new();
        let mut invalid = Vec::new();
        for (number, line) in (1..).zip(reader.lines()) {
            let parsed = match &line {
                Ok(line) => {
                    let line = line.trim_start_matches('\u{FEFF}').trim();
                    if line.is_empty() {
                        continue;
                    }
                    Self::parse_line(chat, line, limit)
                }
                Err(error) => Err(error.to_string()),
            };
            match parsed {
                Ok(pair) => pairs.push(pair),
                Err(reason) => invalid.push((number, reason)),
            }
            if line.is_err() {
                break;
            }
        }
        if invalid.is_empty() { Ok(pairs) } else { Err(invalid) }
    }

    fn parse_line(
        chat: &Chat,
        line: &str,
        limit: Option<(usize, TooLong)>,
    ) -> std::result::Result<Self, String> {
        if !line.starts_with('{') {
            return Err("expected an object".to_owned());
        }
        let line: DpoLine = serde_json::from_str(line).map_err(|error| {
            let reason = error.to_string().replace(" at line 1 column ", " at column ");
            format!("expected \"prompt\", \"chosen\" and \"rejected\": {reason}")
        })?;
        let bounded = limit.map(|(max, _)| chat.clone().max_example_tokens(max));
        let chat = bounded.as_ref().unwrap_or(chat);
        let mut truncated = false;
        let mut example = |name: &str, completion| {
            encode(chat, line.prompt.as_ref(), completion)
                .and_then(|example| {
                    truncated |= limit.is_some_and(|(max, _)| example.tokens.len() > max);
                    example.limited(limit)
                })
                .map_err(|error| format!("{name:?}: {}", error.message()))
        };
        let chosen = example("chosen", &line.chosen)?;
        let rejected = example("rejected", &line.rejected)?;
        let pair = Self { chosen, rejected, truncated };
        if pair.chosen == pair.rejected {
            return Err("\"chosen\" and \"rejected\" are equal".to_owned());
        }
        Ok(pair)
    }

    /// Returns the data of the pair for [`loss`]: the chosen completion, then the rejected one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if an example has fewer than two tokens.
    pub fn data(&self, reference: DpoReference) -> Result<[Datum; 2]> {
        let datum = |example: &TrainingExample, logprob: f64| -> Result<Datum> {
            let datum = example.clone().into_datum()?;
            let mut builder = Datum::builder(datum.model_input().clone());
            for name in ["target_tokens", WEIGHTS] {
                if let Some(tensor) = datum.loss_input(name) {
                    builder = builder.loss_input(name, tensor.clone());
                }
            }
            let bits = TensorData::from(vec![logprob.to_bits().cast_signed()]);
            Ok(builder.loss_input(REFERENCE, bits).build()?)
        };
        Ok([datum(&self.chosen, reference.chosen)?, datum(&self.rejected, reference.rejected)?])
    }

    /// Returns the number of tokens of both completions with their prompts.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.chosen.tokens.len() + self.rejected.tokens.len()
    }
}

/// Encodes a prompt and a completion.
fn encode(
    chat: &Chat,
    prompt: Option<&PromptField>,
    completion: &CompletionField,
) -> Result<TrainingExample> {
    let mut messages = match (prompt, completion) {
        (Some(PromptField::Text(prompt)), CompletionField::Text(text)) => {
            return chat.pair(prompt, text);
        }
        (Some(PromptField::Text(text)), _) => vec![Message::user(text)],
        (Some(PromptField::Messages(messages)), _) => messages.clone(),
        (None, _) => Vec::new(),
    };
    match completion {
        CompletionField::Text(_) if messages.is_empty() => {
            return Err(Error::new(ErrorKind::InvalidInput, "a text needs a \"prompt\""));
        }
        CompletionField::Text(text) => messages.push(Message::assistant(text)),
        CompletionField::Message(message) => messages.push(message.clone()),
        // A complete conversation includes the prompt, so it replaces the messages of `prompt`.
        CompletionField::Messages(all) if all.len() > 1 => messages.clone_from(all),
        CompletionField::Messages(all) => messages.extend(all.iter().cloned()),
    }
    if !messages.last().is_some_and(Message::is_assistant) {
        let message = "the last message is not from the assistant";
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    let mut examples = chat.examples(&messages, TrainOn::LastAssistant)?;
    examples
        .pop()
        .ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the conversation has no completion"))
}

/// Computes the log-probabilities of the pairs under the current weights of `model`. Call this
/// function before the first step: the reference is the model before training.
///
/// # Errors
/// Fails if a request fails.
pub async fn reference_logprobs(
    model: &TrainingClient,
    pairs: &[DpoPair],
) -> Result<Vec<DpoReference>> {
    let mut passes = Vec::new();
    for pairs in pairs.chunks(REFERENCE_BATCH) {
        let mut data = Vec::new();
        for pair in pairs {
            data.push(pair.chosen.clone().into_datum()?);
            data.push(pair.rejected.clone().into_datum()?);
        }
        passes.push((model.forward(data.clone(), LossFn::CrossEntropy), data));
    }
    let mut reference = Vec::new();
    for (pass, data) in passes {
        let output = pass.await?;
        let logprobs: Vec<_> =
            output.outputs.iter().filter_map(|output| output.tensor("logprobs")).collect();
        if logprobs.len() != data.len() {
            let message = "cannot compute the reference: server returned too few log-probabilities";
            return Err(Error::new(ErrorKind::Decode, message));
        }
        let sums: Vec<f64> = data
            .iter()
            .zip(&logprobs)
            .map(|(datum, logprobs)| weighted_sum(datum, logprobs))
            .collect::<Result<_>>()?;
        reference.extend(
            sums.chunks_exact(2).map(|pair| DpoReference { chosen: pair[0], rejected: pair[1] }),
        );
    }
    Ok(reference)
}

/// Returns the loss of pairs whose data [`DpoPair::data`] created, with the metrics `margin:mean`,
/// `accuracy:mean`, `chosen_reward:mean` and `rejected_reward:mean`.
///
/// The reward of a completion is β · (ln π − ln π₀); the margin is the difference of the two
/// rewards, and a pair is accurate if its margin is positive. The loss is the sum over the pairs.
///
/// The client computes this loss, which takes an additional forward pass. The server cannot compute
/// it, because a custom loss on the server receives one datum at a time and a pair has two.
#[must_use]
pub fn loss(beta: f64) -> LossSpec {
    LossSpec::computed(move |data, logprobs| Ok(evaluate(beta, data, logprobs)?))
}

fn evaluate(beta: f64, data: &[Datum], logprobs: &[TensorData]) -> Result<LossValue> {
    if !data.len().is_multiple_of(2) {
        let message = "cannot compute the DPO loss: the batch has an odd number of data";
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    let mut value = LossValue::default();
    let mut sums = [0.0; 4];
    for (data, logprobs) in data.chunks_exact(2).zip(logprobs.chunks_exact(2)) {
        let reward = |at: usize| -> Result<f64> {
            let bits = data[at].loss_input(REFERENCE).and_then(TensorData::as_i64);
            let Some([bits]) = bits else {
                let message = "cannot compute the DPO loss: a datum has no reference_logprob";
                return Err(Error::new(ErrorKind::InvalidInput, message));
            };
            let reference = f64::from_bits(bits.cast_unsigned());
            Ok(beta * (weighted_sum(&data[at], &logprobs[at])? - reference))
        };
        let chosen = reward(0)?;
        let rejected = reward(1)?;
        let margin = chosen - rejected;
        // −ln σ(margin), in a form that does not overflow for margins far from 0.
        value.loss += (-margin).max(0.0) + (-margin.abs()).exp().ln_1p();
        let slope = beta / (1.0 + margin.exp());
        for (at, sign) in [(0, -1.0), (1, 1.0)] {
            #[expect(clippy::cast_possible_truncation, reason = "gradients are f32")]
            let of_token = |weight: &f32| (sign * slope * f64::from(*weight)) as f32;
            value.gradients.push(weights(&data[at])?.iter().map(of_token).collect());
        }
        let accurate = f64::from(u8::from(margin > 0.0));
        for (sum, number) in sums.iter_mut().zip([margin, accurate, chosen, rejected]) {
            *sum += number;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "no batch has 2^53 pairs")]
    let pairs = (data.len() / 2).max(1) as f64;
    for (name, sum) in METRICS.into_iter().zip(sums) {
        value.metrics.insert(format!("{name}:mean"), sum / pairs);
    }
    Ok(value)
}

/// Names of the metrics of the loss, without the suffix `:mean`.
pub const METRICS: [&str; 4] = ["margin", "accuracy", "chosen_reward", "rejected_reward"];

fn weights(datum: &Datum) -> Result<&[f32]> {
    datum.loss_input(WEIGHTS).and_then(TensorData::as_f32).ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, "cannot compute the DPO loss: a datum has no weights")
    })
}

/// Returns the sum of the log-probabilities, each multiplied by the weight of its token.
fn weighted_sum(datum: &Datum, logprobs: &TensorData) -> Result<f64> {
    let weights = weights(datum)?;
    let logprobs = logprobs.as_f32().filter(|logprobs| logprobs.len() == weights.len());
    let Some(logprobs) = logprobs else {
        let message = "server returned a wrong number of log-probabilities for a completion";
        return Err(Error::new(ErrorKind::Decode, message));
    };
    let products = weights.iter().zip(logprobs).filter(|(weight, _)| **weight != 0.0);
    Ok(products.map(|(weight, logprob)| f64::from(*weight) * f64::from(*logprob)).sum())
}

#[cfg(test)]
mod tests {
    use tinkex_wire::Tokens;

    use super::*;

    fn pair() -> DpoPair {
        let example = |last: u32| TrainingExample {
            tokens: Tokens::from([1, 2, last]),
            weights: vec![0.0, 0.0, 1.0],
        };
        DpoPair::new(example(3), example(4))
    }

    /// The expected numbers follow from the formula: σ(0) = ½ at the start.
    #[test]
    fn loss_and_gradient_follow_the_formula() {
        let reference = DpoReference { chosen: -1.0, rejected: -2.0 };
        let data = pair().data(reference).unwrap();
        let logprobs = |chosen: f32, rejected: f32| {
            [vec![-9.0, chosen], vec![-9.0, rejected]].map(TensorData::from)
        };
        let start = evaluate(0.5, &data, &logprobs(-1.0, -2.0)).unwrap();
        assert!((start.loss - 2.0_f64.ln()).abs() < 1e-12);
        assert_eq!(start.gradients, [[0.0, -0.25], [0.0, 0.25]]);
        assert_eq!((start.metrics["margin:mean"], start.metrics["accuracy:mean"]), (0.0, 0.0));
        let better = evaluate(0.5, &data, &logprobs(-0.5, -3.0)).unwrap();
        assert_eq!((better.metrics["margin:mean"], better.metrics["accuracy:mean"]), (0.75, 1.0));
        assert!((better.loss - (1.0 + (-0.75_f64).exp()).ln()).abs() < 1e-12);
        let extreme = evaluate(1.0, &data, &logprobs(-1.0, -1.0e4)).unwrap();
        assert!(extreme.loss >= 0.0 && extreme.loss < 1e-6);
        let wrong = evaluate(1.0, &data, &logprobs(-1.0e4, -1.0)).unwrap();
        assert!((wrong.loss - 10_000.0).abs() < 1.0 && wrong.gradients[0][1] == -1.0);
    }

    /// Log-probabilities of a hundred tokens add up to a number that f32 cannot represent.
    #[test]
    fn the_margin_of_equal_weights_is_exactly_zero() {
        let tokens: Vec<u32> = (0..101).collect();
        let example = TrainingExample { weights: vec![1.0; tokens.len()], tokens: tokens.into() };
        let pair = DpoPair::new(example.clone(), example);
        let logprobs = [0.1_f32, 0.7].map(|step| {
            let of_token = |at: u16| -step * f32::from(at) / 3.0;
            TensorData::from((0..100).map(of_token).collect::<Vec<f32>>())
        });
        let plain = pair.chosen.clone().into_datum().unwrap();
        let reference = DpoReference {
            chosen: weighted_sum(&plain, &logprobs[0]).unwrap(),
            rejected: weighted_sum(&plain, &logprobs[1]).unwrap(),
        };
        let value = evaluate(0.1, &pair.data(reference).unwrap(), &logprobs).unwrap();
        for name in METRICS {
            assert_eq!(value.metrics[&format!("{name}:mean")], 0.0, "{name}");
        }
    }

    #[test]
    fn the_gradient_is_the_derivative_of_the_loss() {
        let data = pair().data(DpoReference { chosen: -1.0, rejected: -2.0 }).unwrap();
        let loss = |chosen: f32, rejected: f32| {
            let logprobs = [vec![0.0, chosen], vec![0.0, rejected]].map(TensorData::from);
            evaluate(0.3, &data, &logprobs).unwrap()
        };
        let step = 1.0 / 64.0;
        let numeric =
            (loss(-1.5 + step, -1.0).loss - loss(-1.5 - step, -1.0).loss) / f64::from(2.0 * step);
        let exact = f64::from(loss(-1.5, -1.0).gradients[0][1]);
        assert!((numeric - exact).abs() < 1e-5, "{numeric} {exact}");
    }
}
