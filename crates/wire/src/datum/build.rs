//! Ways to make a [`Datum`].

use std::borrow::Cow;

use crate::InvalidInput;
use crate::input::ModelInput;
use crate::slice::SharedSlice;
use crate::tensor::{DType, TensorData};
use crate::tokens::Tokens;

use super::loss_input::{ADVANTAGES, ALL, LOGPROBS, TARGET_TOKENS, WEIGHTS};
use super::{Datum, Provenance, ProvenanceSpan};

/// One number for every token, or one for each.
#[derive(Clone, Debug)]
pub enum PerTokenValues {
    /// The same for all.
    Uniform(f32),
    /// One each.
    Each(SharedSlice<f32>),
}

impl From<f32> for PerTokenValues {
    fn from(number: f32) -> Self {
        Self::Uniform(number)
    }
}

impl<T: Into<SharedSlice<f32>>> From<T> for PerTokenValues {
    fn from(numbers: T) -> Self {
        Self::Each(numbers.into())
    }
}

impl PerTokenValues {
    /// Appends the numbers from `skip` on, of `len` in all.
    fn append(
        &self,
        out: &mut Vec<f32>,
        name: &str,
        len: usize,
        skip: usize,
    ) -> Result<(), InvalidInput> {
        match self {
            Self::Uniform(number) => out.resize(out.len() + len - skip, *number),
            Self::Each(numbers) if numbers.len() == len => out.extend_from_slice(&numbers[skip..]),
            Self::Each(numbers) => {
                let why = format!("{} numbers for {len} tokens", numbers.len());
                return Err(InvalidInput::new(name, why));
            }
        }
        Ok(())
    }
}

impl Datum {
    /// A datum from its parts, already aligned.
    ///
    /// ```
    /// use tinkex_wire::{Datum, ModelInput};
    ///
    /// let datum = Datum::builder(ModelInput::from_tokens([1, 2]))
    ///     .loss_input("target_tokens", vec![2, 3])
    ///     .loss_input("weights", vec![1.0, 0.5])
    ///     .build()?;
    /// # Ok::<_, tinkex_wire::InvalidInput>(())
    /// ```
    pub fn builder(model_input: impl Into<ModelInput>) -> DatumBuilder {
        let datum =
            Self { model_input: model_input.into(), loss_inputs: Vec::new(), provenance: None };
        DatumBuilder { datum }
    }

    /// Learn a sequence token by token, with one weight per token (the first token's is unused:
    /// nothing predicts it).
    ///
    /// # Errors
    /// If there are fewer than two tokens, or not as many weights as tokens.
    pub fn supervised(
        tokens: impl Into<Tokens>,
        weights: impl Into<PerTokenValues>,
    ) -> Result<Self, InvalidInput> {
        let (tokens, weights) = (tokens.into(), weights.into());
        let len = tokens.len();
        if len < 2 {
            return Err(InvalidInput::new("tokens", "a sequence needs at least two tokens"));
        }
        let mut aligned = Vec::with_capacity(len - 1);
        weights.append(&mut aligned, WEIGHTS, len, 1)?;
        Self::builder(tokens.slice(..len - 1))
            .loss_input(TARGET_TOKENS, tokens.slice(1..))
            .loss_input(WEIGHTS, aligned)
            .build()
    }

    /// Learn to answer `prompt` with `completion`: the prompt's own tokens do not count.
    ///
    /// # Errors
    /// If either is empty.
    pub fn completion(
        prompt: impl Into<Tokens>,
        completion: impl Into<Tokens>,
    ) -> Result<Self, InvalidInput> {
        let joined = Joined::new(prompt.into(), completion.into(), "completion")?;
        let weights = joined.align(WEIGHTS, &PerTokenValues::Uniform(1.0))?;
        joined.builder().loss_input(WEIGHTS, weights).build()
    }

    /// Learn from a sampled answer: its tokens, the log-probabilities they were sampled with, and
    /// how much better than expected they were (one number for the whole answer or one a token).
    ///
    /// Prompt and answer are shared with the caller, not copied.
    ///
    /// ```
    /// use tinkex_wire::Datum;
    ///
    /// let datum = Datum::rollout([1, 2, 3], [8, 9], vec![-0.5, -1.0], 0.7)?;
    /// assert_eq!(datum.loss_input("target_tokens").unwrap().as_i64().unwrap(), [2, 3, 8, 9]);
    /// assert_eq!(datum.loss_input("logprobs").unwrap().as_f32().unwrap(), [0.0, 0.0, -0.5, -1.0]);
    /// assert_eq!(datum.loss_input("advantages").unwrap().as_f32().unwrap(), [0.0, 0.0, 0.7, 0.7]);
    /// # Ok::<_, tinkex_wire::InvalidInput>(())
    /// ```
    ///
    /// # Errors
    /// If prompt or answer is empty, or a list has not one number per sampled token.
    pub fn rollout(
        prompt: impl Into<Tokens>,
        sampled: impl Into<Tokens>,
        logprobs: impl Into<SharedSlice<f32>>,
        advantages: impl Into<PerTokenValues>,
    ) -> Result<Self, InvalidInput> {
        let joined = Joined::new(prompt.into(), sampled.into(), "sampled")?;
        let logprobs = joined.align(LOGPROBS, &PerTokenValues::Each(logprobs.into()))?;
        let advantages = joined.align(ADVANTAGES, &advantages.into())?;
        joined.builder().loss_input(LOGPROBS, logprobs).loss_input(ADVANTAGES, advantages).build()
    }
}

/// A prompt and what follows it, shifted against each other by one position.
struct Joined {
    prompt: Tokens,
    answer: Tokens,
}

impl Joined {
    fn new(prompt: Tokens, answer: Tokens, answer_name: &str) -> Result<Self, InvalidInput> {
        for (name, tokens) in [("prompt", &prompt), (answer_name, &answer)] {
            if tokens.is_empty() {
                return Err(InvalidInput::new(name, "must have at least one token"));
            }
        }
        Ok(Self { prompt, answer })
    }

    fn builder(&self) -> DatumBuilder {
        let targets = self.prompt[1..].iter().chain(&self.answer[..]);
        let mut input = ModelInput::from_tokens(&self.prompt);
        if self.answer.len() > 1 {
            input = input.tokens(self.answer.slice(..self.answer.len() - 1));
        }
        Datum::builder(input).loss_input(TARGET_TOKENS, targets.copied().collect::<TensorData>())
    }

    /// Zero for the positions that predict the prompt, then one number per token of the answer.
    fn align(&self, name: &str, answer: &PerTokenValues) -> Result<Vec<f32>, InvalidInput> {
        let before = self.prompt.len() - 1;
        let mut out = Vec::with_capacity(before + self.answer.len());
        out.resize(before, 0.0);
        answer.append(&mut out, name, self.answer.len(), 0)?;
        Ok(out)
    }
}

/// Collects the parts of a [`Datum`]; made by [`Datum::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DatumBuilder {
    datum: Datum,
}

impl DatumBuilder {
    /// Adds a tensor that the loss reads, or replaces the one of that name. `target_tokens` are
    /// integers, everything else built in is floating point.
    pub fn loss_input(
        mut self,
        name: impl Into<Cow<'static, str>>,
        tensor: impl Into<TensorData>,
    ) -> Self {
        let (name, tensor) = (name.into(), tensor.into());
        let inputs = &mut self.datum.loss_inputs;
        match inputs.iter_mut().find(|(key, _)| *key == name) {
            Some((_, old)) => *old = tensor,
            None => inputs.push((name, tensor)),
        }
        self
    }

    /// Says where the tokens came from. Both lists must cover the whole datum.
    pub fn provenance(
        mut self,
        model_input: Vec<ProvenanceSpan>,
        loss_inputs: Vec<ProvenanceSpan>,
    ) -> Self {
        self.datum.provenance = Some(Box::new(Provenance { model_input, loss_inputs }));
        self
    }

    /// The finished datum.
    ///
    /// # Errors
    /// If the input is empty, a built-in loss input has the wrong type or another length than the
    /// input, or the provenance does not cover the datum.
    pub fn build(mut self) -> Result<Datum, InvalidInput> {
        // Targets of many candidates are mostly padding: they are sent in the smaller form.
        for (name, tensor) in &mut self.datum.loss_inputs {
            if matches!(&**name, TARGET_TOKENS | WEIGHTS) {
                *tensor = std::mem::take(tensor).compact();
            }
        }
        self.datum.validate()?;
        Ok(self.datum)
    }
}

impl Datum {
    /// Refuses a datum that no loss could use. [`DatumBuilder::build`] does this; a server does it
    /// with what it reads.
    ///
    /// # Errors
    /// As [`DatumBuilder::build`].
    pub fn validate(&self) -> Result<(), InvalidInput> {
        let datum = self;
        if datum.model_input.is_empty() {
            return Err(InvalidInput::new("model_input", "must not be empty"));
        }
        let len = datum.model_input.token_count();
        for (name, tensor) in datum.loss_inputs().filter(|(name, _)| ALL.contains(name)) {
            check_loss_input(name, tensor, len)?;
        }
        if let Some(provenance) = datum.provenance() {
            check_spans("model_input_spans", &provenance.model_input, len)?;
            check_spans("loss_fn_input_spans", &provenance.loss_inputs, len)?;
        }
        Ok(())
    }
}

fn check_loss_input(
    name: &str,
    tensor: &TensorData,
    len: Option<usize>,
) -> Result<(), InvalidInput> {
    let wanted = if name == TARGET_TOKENS { DType::Int64 } else { DType::Float32 };
    if tensor.dtype() != wanted {
        let why = format!("must be {wanted}, not {}", tensor.dtype());
        return Err(InvalidInput::new(name, why));
    }
    let most = if matches!(name, TARGET_TOKENS | WEIGHTS) { 2 } else { 1 };
    if tensor.rank() > most {
        let why = format!("has {} dimensions, at most {most} are allowed", tensor.rank());
        return Err(InvalidInput::new(name, why));
    }
    match len {
        Some(len) if tensor.rows() != len => {
            let why = format!("has {} rows for an input of {len} tokens", tensor.rows());
            Err(InvalidInput::new(name, why))
        }
        _ => Ok(()),
    }
}

fn check_spans(
    name: &str,
    spans: &[ProvenanceSpan],
    len: Option<usize>,
) -> Result<(), InvalidInput> {
    if spans.is_empty() {
        return Err(InvalidInput::new(name, "must not be empty when the other list is given"));
    }
    let covered = spans.iter().try_fold(0_u64, |n, span| n.checked_add(span.length));
    match len {
        Some(len) if covered != u64::try_from(len).ok() => {
            let covered = covered.map_or_else(|| "too many".to_owned(), |n| n.to_string());
            let why = format!("cover {covered} tokens where there are {len}");
            Err(InvalidInput::new(name, why))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor<'a>(datum: &'a Datum, name: &str) -> &'a TensorData {
        datum.loss_input(name).unwrap()
    }

    #[test]
    fn supervised_shifts_by_one_and_shares_the_tokens() {
        let tokens = Tokens::from([1, 2, 3]);
        let datum = Datum::supervised(&tokens, vec![9.0, 0.5, 1.0]).unwrap();
        assert_eq!(datum.model_input().to_tokens().unwrap().as_ptr(), tokens.as_ptr());
        assert_eq!(tensor(&datum, "target_tokens").as_i64().unwrap(), [2, 3]);
        assert_eq!(tensor(&datum, "weights").as_f32().unwrap(), [0.5, 1.0]);
        assert!(Datum::supervised([1], 1.0).is_err());
        assert!(Datum::supervised([1, 2], vec![1.0]).is_err());
    }

    #[test]
    fn completion_of_one_token_has_only_the_prompt_as_input() {
        let datum = Datum::completion([1, 2], [3]).unwrap();
        assert_eq!(datum.model_input().chunks.len(), 1);
        assert_eq!(tensor(&datum, "weights").as_f32().unwrap(), [0.0, 1.0]);
        assert!(Datum::completion([1, 2], Vec::<u32>::new()).is_err());
    }

    #[test]
    fn rollout_shares_prompt_and_answer() {
        let (prompt, answer) = (Tokens::from([1, 2]), Tokens::from([3, 4, 5]));
        let datum = Datum::rollout(&prompt, &answer, vec![-1.0; 3], vec![1.0, 2.0, 3.0]).unwrap();
        let chunks = &datum.model_input().chunks;
        let pointers: Vec<_> = chunks
            .iter()
            .map(|chunk| match chunk {
                crate::InputChunk::EncodedText { tokens } => tokens.as_ptr(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(pointers, [prompt.as_ptr(), answer.as_ptr()]);
        assert_eq!(tensor(&datum, "advantages").as_f32().unwrap(), [0.0, 1.0, 2.0, 3.0]);
        assert!(Datum::rollout([1], [2, 3], vec![-1.0], 1.0).is_err());
        let nothing = Datum::rollout([1], Vec::<u32>::new(), vec![], 1.0).unwrap_err();
        assert_eq!(nothing.field(), "sampled");
    }

    #[test]
    fn builder_refuses_what_the_server_would() {
        let input = || Datum::builder([1, 2]);
        let field = |b: DatumBuilder| b.build().unwrap_err().field().to_owned();
        assert_eq!(field(Datum::builder(Vec::<u32>::new())), "model_input");
        assert_eq!(field(input().loss_input("weights", vec![1.0])), "weights");
        assert_eq!(field(input().loss_input("target_tokens", vec![1.0, 2.0])), "target_tokens");
        let matrix = TensorData::from(vec![1.0; 4]).reshape([2, 2]).unwrap();
        assert_eq!(field(input().loss_input("advantages", matrix.clone())), "advantages");
        assert!(input().loss_input("weights", matrix).build().is_ok());
        assert!(input().loss_input("my_own", vec![1.0]).build().is_ok());

        let spans = |n| vec![ProvenanceSpan::sampled("q", 0, n)];
        assert!(input().provenance(spans(2), spans(2)).build().is_ok());
        assert_eq!(field(input().provenance(spans(2), spans(1))), "loss_fn_input_spans");
        assert_eq!(field(input().provenance(vec![], spans(2))), "model_input_spans");
    }
}
