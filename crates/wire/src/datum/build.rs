//! Construction and validation of a [`Datum`].

use std::borrow::Cow;

use crate::InvalidInput;
use crate::input::ModelInput;
use crate::sampled::SampledSequence;
use crate::slice::SharedSlice;
use crate::tensor::{DType, TensorData};
use crate::tokens::Tokens;

use super::loss_input::{ADVANTAGES, ALL, LOGPROBS, TARGET_TOKENS, WEIGHTS};
use super::{Datum, Provenance, ProvenanceSpan};

/// Values for a sequence of tokens: one value for all tokens, or one per token.
#[derive(Clone, Debug)]
pub enum PerTokenValues {
    /// One value for all tokens.
    Uniform(f32),
    /// One value per token.
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
    /// Appends the values of tokens `skip..len`.
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
                let reason = format!("{} values for {len} tokens", numbers.len());
                return Err(InvalidInput::new(name, reason));
            }
        }
        Ok(())
    }
}

impl Datum {
    /// Returns a builder of a datum with aligned loss inputs.
    ///
    /// ```
    /// # use tinkex_wire as tinkex;
    /// use tinkex::{Datum, ModelInput};
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

    /// Creates a datum for supervised learning of a sequence, with one weight per token. The weight
    /// of the first token is ignored, because no position predicts it.
    ///
    /// # Errors
    /// Returns an error if there are fewer than two tokens, or if the number of weights differs
    /// from the number of tokens.
    pub fn supervised(
        tokens: impl Into<Tokens>,
        weights: impl Into<PerTokenValues>,
    ) -> Result<Self, InvalidInput> {
        let tokens = tokens.into();
        let weights = weights.into();
        let len = tokens.len();
        if len < 2 {
            return Err(InvalidInput::new("tokens", "a sequence must have at least two tokens"));
        }
        let mut aligned = Vec::with_capacity(len - 1);
        weights.append(&mut aligned, WEIGHTS, len, 1)?;
        Self::builder(tokens.slice(..len - 1))
            .loss_input(TARGET_TOKENS, tokens.slice(1..))
            .loss_input(WEIGHTS, aligned)
            .build()
    }

    /// Creates a datum for supervised learning of `completion`. The tokens of `prompt` have weight
    /// 0.
    ///
    /// # Errors
    /// Returns an error if `prompt` or `completion` is empty, or if `prompt` contains images or
    /// audio.
    pub fn completion(
        prompt: impl Into<ModelInput>,
        completion: impl Into<Tokens>,
    ) -> Result<Self, InvalidInput> {
        let sequence = PromptCompletion::new(&prompt.into(), completion.into(), "completion")?;
        let weights = sequence.align(WEIGHTS, &PerTokenValues::Uniform(1.0))?;
        sequence.builder().loss_input(WEIGHTS, weights).build()
    }

    /// Creates a datum for reinforcement learning from a sampled completion, its log-probabilities
    /// under the sampling policy, and its advantages: one value for all tokens or one per token.
    ///
    /// The datum shares the memory of `prompt` and `sampled`.
    ///
    /// ```
    /// # use tinkex_wire as tinkex;
    /// use tinkex::Datum;
    ///
    /// let datum = Datum::rollout([1, 2, 3], [8, 9], vec![-0.5, -1.0], 0.7)?;
    /// assert_eq!(datum.loss_input("target_tokens").unwrap().as_i64().unwrap(), [2, 3, 8, 9]);
    /// assert_eq!(datum.loss_input("logprobs").unwrap().as_f32().unwrap(), [0.0, 0.0, -0.5, -1.0]);
    /// assert_eq!(datum.loss_input("advantages").unwrap().as_f32().unwrap(), [0.0, 0.0, 0.7, 0.7]);
    /// # Ok::<_, tinkex_wire::InvalidInput>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `prompt` or `sampled` is empty, if `prompt` contains images or audio, or
    /// if the number of log-probabilities or advantages differs from the number of sampled tokens.
    pub fn rollout(
        prompt: impl Into<ModelInput>,
        sampled: impl Into<Tokens>,
        logprobs: impl Into<SharedSlice<f32>>,
        advantages: impl Into<PerTokenValues>,
    ) -> Result<Self, InvalidInput> {
        let sequence = PromptCompletion::new(&prompt.into(), sampled.into(), "sampled")?;
        let logprobs = sequence.align(LOGPROBS, &PerTokenValues::Each(logprobs.into()))?;
        let advantages = sequence.align(ADVANTAGES, &advantages.into())?;
        sequence.builder().loss_input(LOGPROBS, logprobs).loss_input(ADVANTAGES, advantages).build()
    }

    /// Creates a datum for reinforcement learning from a sequence that was sampled after `prompt`,
    /// and its advantages: one value for all tokens or one per token.
    ///
    /// The same as [`rollout`](Self::rollout) with the tokens and log-probabilities of `sequence`.
    ///
    /// ```
    /// # use tinkex_wire as tinkex;
    /// use tinkex::{Datum, Logprobs, SampledSequence};
    ///
    /// let sequence = SampledSequence::default()
    ///     .tokens([8, 9])
    ///     .logprobs(Some(Logprobs::from(vec![-0.5, -1.0])));
    /// let datum = Datum::from_sample([1, 2, 3], &sequence, 0.7)?;
    /// assert_eq!(datum, Datum::rollout([1, 2, 3], [8, 9], vec![-0.5, -1.0], 0.7)?);
    /// # Ok::<_, tinkex_wire::InvalidInput>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `sequence` lacks the log-probability of a token; otherwise as
    /// [`rollout`](Self::rollout).
    pub fn from_sample(
        prompt: impl Into<ModelInput>,
        sequence: &SampledSequence,
        advantages: impl Into<PerTokenValues>,
    ) -> Result<Self, InvalidInput> {
        let missing = || InvalidInput::new(LOGPROBS, "the sampled sequence has none");
        let logprobs = sequence.logprobs.as_ref().ok_or_else(missing)?;
        if let Some(position) = logprobs.iter().position(|logprob| logprob.is_none()) {
            let reason = format!("the sampled sequence has none for token {position}");
            return Err(InvalidInput::new(LOGPROBS, reason));
        }
        Self::rollout(prompt, &sequence.tokens, logprobs, advantages)
    }
}

/// A prompt and its completion, from which inputs and targets are derived.
struct PromptCompletion {
    prompt: Tokens,
    completion: Tokens,
}

impl PromptCompletion {
    fn new(
        prompt: &ModelInput,
        completion: Tokens,
        completion_name: &str,
    ) -> Result<Self, InvalidInput> {
        let not_text = || InvalidInput::new("prompt", "must not contain images or audio");
        let prompt = prompt.to_tokens().ok_or_else(not_text)?;
        for (name, tokens) in [("prompt", &prompt), (completion_name, &completion)] {
            if tokens.is_empty() {
                return Err(InvalidInput::new(name, "must have at least one token"));
            }
        }
        Ok(Self { prompt, completion })
    }

    fn builder(&self) -> DatumBuilder {
        let targets = self.prompt[1..].iter().chain(&self.completion[..]);
        let mut input = ModelInput::from_tokens(&self.prompt);
        if self.completion.len() > 1 {
            input = input.tokens(self.completion.slice(..self.completion.len() - 1));
        }
        Datum::builder(input).loss_input(TARGET_TOKENS, targets.copied().collect::<TensorData>())
    }

    /// Returns 0 for the positions that predict the prompt, then one value per completion token.
    fn align(&self, name: &str, completion: &PerTokenValues) -> Result<Vec<f32>, InvalidInput> {
        let prompt_targets = self.prompt.len() - 1;
        let mut out = Vec::with_capacity(prompt_targets + self.completion.len());
        out.resize(prompt_targets, 0.0);
        completion.append(&mut out, name, self.completion.len(), 0)?;
        Ok(out)
    }
}

/// Builder of a [`Datum`], created by [`Datum::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DatumBuilder {
    datum: Datum,
}

impl DatumBuilder {
    /// Adds a loss input, or replaces the input of that name. `target_tokens` must be `int64`, all
    /// other built-in inputs `float32`.
    pub fn loss_input(
        mut self,
        name: impl Into<Cow<'static, str>>,
        tensor: impl Into<TensorData>,
    ) -> Self {
        let name = name.into();
        let tensor = tensor.into();
        let inputs = &mut self.datum.loss_inputs;
        match inputs.iter_mut().find(|(key, _)| *key == name) {
            Some((_, old)) => *old = tensor,
            None => inputs.push((name, tensor)),
        }
        self
    }

    /// Sets the provenance of the tokens. Each list must cover the whole datum.
    pub fn provenance(
        mut self,
        model_input: Vec<ProvenanceSpan>,
        loss_inputs: Vec<ProvenanceSpan>,
    ) -> Self {
        self.datum.provenance = Some(Box::new(Provenance { model_input, loss_inputs }));
        self
    }

    /// Validates and returns the datum.
    ///
    /// # Errors
    /// Returns an error if the model input is empty, if a built-in loss input has the wrong element
    /// type, rank or length, or if the provenance does not cover the datum.
    pub fn build(mut self) -> Result<Datum, InvalidInput> {
        // Target matrices with many candidates are mostly padding, so the sparse form is smaller.
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
    /// Checks the rules of [`DatumBuilder::build`]. A server calls it for decoded data.
    ///
    /// # Errors
    /// Returns an error as [`DatumBuilder::build`] does.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        if self.model_input.is_empty() {
            return Err(InvalidInput::new("model_input", "must not be empty"));
        }
        let len = self.model_input.token_count();
        for (name, tensor) in self.loss_inputs().filter(|(name, _)| ALL.contains(name)) {
            validate_loss_input(name, tensor, len)?;
        }
        if let Some(provenance) = self.provenance() {
            validate_spans("model_input_spans", &provenance.model_input, len)?;
            validate_spans("loss_fn_input_spans", &provenance.loss_inputs, len)?;
        }
        Ok(())
    }
}

fn validate_loss_input(
    name: &str,
    tensor: &TensorData,
    len: Option<usize>,
) -> Result<(), InvalidInput> {
    let expected = if name == TARGET_TOKENS { DType::Int64 } else { DType::Float32 };
    if tensor.dtype() != expected {
        let reason = format!("must be {expected}, not {}", tensor.dtype());
        return Err(InvalidInput::new(name, reason));
    }
    let max_rank = if matches!(name, TARGET_TOKENS | WEIGHTS) { 2 } else { 1 };
    if tensor.rank() > max_rank {
        let reason = format!("has {} dimensions, the maximum is {max_rank}", tensor.rank());
        return Err(InvalidInput::new(name, reason));
    }
    match len {
        Some(len) if tensor.rows() != len => {
            let reason =
                format!("has {} rows, but the model input has {len} tokens", tensor.rows());
            Err(InvalidInput::new(name, reason))
        }
        _ => Ok(()),
    }
}

fn validate_spans(
    name: &str,
    spans: &[ProvenanceSpan],
    len: Option<usize>,
) -> Result<(), InvalidInput> {
    if spans.is_empty() {
        return Err(InvalidInput::new(name, "must not be empty if the other list is not"));
    }
    let covered = spans.iter().try_fold(0_u64, |n, span| n.checked_add(span.length));
    match len {
        Some(len) if covered != u64::try_from(len).ok() => {
            let covered = covered.map_or_else(|| "too many".to_owned(), |n| n.to_string());
            let reason = format!("cover {covered} tokens, but the datum has {len}");
            Err(InvalidInput::new(name, reason))
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
    fn supervised_shifts_targets_by_one_and_shares_the_tokens() {
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
    fn rollout_shares_the_memory_of_prompt_and_completion() {
        let prompt = Tokens::from([1, 2]);
        let completion = Tokens::from([3, 4, 5]);
        let datum =
            Datum::rollout(&prompt, &completion, vec![-1.0; 3], vec![1.0, 2.0, 3.0]).unwrap();
        let chunks = &datum.model_input().chunks;
        let pointers: Vec<_> = chunks
            .iter()
            .map(|chunk| match chunk {
                crate::InputChunk::EncodedText { tokens } => tokens.as_ptr(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(pointers, [prompt.as_ptr(), completion.as_ptr()]);
        assert_eq!(tensor(&datum, "advantages").as_f32().unwrap(), [0.0, 1.0, 2.0, 3.0]);
        assert!(Datum::rollout([1], [2, 3], vec![-1.0], 1.0).is_err());
        let empty = Datum::rollout([1], Vec::<u32>::new(), vec![], 1.0).unwrap_err();
        assert_eq!(empty.field(), "sampled");
    }

    #[test]
    fn a_sample_without_a_log_probability_for_every_token_is_rejected() {
        let sequence = |logprobs| SampledSequence::default().tokens([3, 4]).logprobs(logprobs);
        let prompt = ModelInput::from_tokens([1]).tokens([2]);
        let complete = sequence(Some(vec![-0.5, -1.0].into()));
        let datum = Datum::from_sample(&prompt, &complete, vec![2.0, 3.0]).unwrap();
        assert_eq!(tensor(&datum, "target_tokens").as_i64().unwrap(), [2, 3, 4]);
        assert_eq!(tensor(&datum, "logprobs").as_f32().unwrap(), [0.0, -0.5, -1.0]);
        assert_eq!(tensor(&datum, "advantages").as_f32().unwrap(), [0.0, 2.0, 3.0]);

        for (logprobs, reason) in [
            (None, "the sampled sequence has none"),
            (Some(vec![-0.5, f32::NAN].into()), "the sampled sequence has none for token 1"),
        ] {
            let error = Datum::from_sample(&prompt, &sequence(logprobs), 1.0).unwrap_err();
            assert_eq!((error.field(), error.reason()), ("logprobs", reason));
        }
        let image = prompt.image(vec![0], crate::ImageFormat::Png);
        let error = Datum::from_sample(&image, &complete, 1.0).unwrap_err();
        assert_eq!(error.field(), "prompt");
    }

    #[test]
    fn builder_rejects_invalid_datums() {
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
