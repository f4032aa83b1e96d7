//! [`GenerationRequest`]: the parameters of an inference request, independent of the API.

/// Parameters of an inference request. Its tokens are equal to the tokens of a Tinker sample with
/// the same parameters.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// Prompt tokens; not empty.
    pub prompt: Vec<u32>,
    /// Number of completions (`n`), at least 1.
    pub completions: u32,
    /// Maximum number of tokens per completion, at least 1; `None` means the rest of the context,
    /// or of the KV cache if it is smaller.
    pub max_tokens: Option<u32>,
    /// Temperature; 0 selects the most probable token.
    pub temperature: f64,
    /// Probability mass of the most probable tokens to sample from, at most 1.
    pub top_p: f64,
    /// Number of most probable tokens to sample from; `None` means all.
    pub top_k: Option<u32>,
    /// Seed of the random numbers; random if `None`.
    pub seed: Option<u64>,
    /// Strings that end a completion. The end-of-sequence tokens of the model end it too.
    pub stop_texts: Vec<String>,
    /// Further tokens that end a completion.
    pub stop_tokens: Vec<u32>,
    /// Whether completions continue after the end-of-sequence tokens of the model.
    pub ignore_eos: bool,
    /// Number of most probable tokens to report per sampled token; 0 for none.
    pub top_logprobs: u32,
    /// Number of most probable tokens to report per prompt token, with the log-probabilities of the
    /// prompt; `None` reports no scores of the prompt.
    pub prompt_logprobs: Option<u32>,
}

impl GenerationRequest {
    /// Creates a request for one completion at temperature 1, limited by the context only.
    #[must_use]
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            completions: 1,
            max_tokens: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            seed: None,
            stop_texts: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            top_logprobs: 0,
            prompt_logprobs: None,
        }
    }
}
