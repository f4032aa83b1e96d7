//! Values of the arguments that select the method, and what the settings of a run on examples mean for
//! its loop.

use tinkex::{TooLong, TrainOn};
use tinkex_recipes::TrainPlan;
use tinkex_runs::{LearnedMessages, LongExamples, MethodSettings, RunSettings};

/// Value of `--method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TrainMethod {
    /// Supervised fine-tuning
    Sft,
    /// Direct preference optimization
    Dpo,
}

/// Value of `--learn`: assistant messages of a conversation to learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LearnFrom {
    /// All assistant messages
    All,
    /// The last assistant message
    Last,
    /// All assistant messages, each in its own example
    Each,
}

impl From<LearnFrom> for LearnedMessages {
    fn from(learn: LearnFrom) -> Self {
        match learn {
            LearnFrom::All => Self::All,
            LearnFrom::Last => Self::Last,
            LearnFrom::Each => Self::Each,
        }
    }
}

impl From<LearnFrom> for TrainOn {
    fn from(learn: LearnFrom) -> Self {
        train_on(learn.into())
    }
}

/// Converts the messages to learn to the option of the encoder.
pub(super) fn train_on(learned: LearnedMessages) -> TrainOn {
    match learned {
        LearnedMessages::All => TrainOn::AllAssistant,
        LearnedMessages::Last => TrainOn::LastAssistant,
        LearnedMessages::Each => TrainOn::EachAssistant,
    }
}

/// The settings of a run on examples or pairs that its loop needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ExampleSettings {
    pub(super) batch_size: usize,
    /// Maximum length of an example in tokens.
    pub(super) max_tokens: Option<usize>,
    long_examples: LongExamples,
    /// Assistant messages to learn.
    pub(super) learned: LearnedMessages,
    /// β of DPO; `None` for supervised fine-tuning.
    pub(super) beta: Option<f64>,
}

impl ExampleSettings {
    /// Returns the settings of a run; `None` if its method does not train on given examples.
    pub(super) fn of(settings: &RunSettings) -> Option<Self> {
        match &settings.method {
            MethodSettings::Sft(sft) => Some(Self {
                batch_size: sft.batch_size,
                max_tokens: sft.max_tokens,
                long_examples: sft.long_examples,
                learned: sft.learned_messages,
                beta: None,
            }),
            MethodSettings::Dpo(dpo) => Some(Self {
                batch_size: dpo.batch_size,
                max_tokens: dpo.max_tokens,
                long_examples: dpo.long_examples,
                learned: LearnedMessages::Last,
                beta: Some(dpo.beta),
            }),
            _ => None,
        }
    }

    /// Returns the maximum length of an example in tokens, and what to do with longer ones.
    pub(super) fn length_limit(&self) -> Option<(usize, TooLong)> {
        let too_long = match self.long_examples {
            LongExamples::Truncate => TooLong::Truncate,
            LongExamples::Reject => TooLong::Reject,
        };
        self.max_tokens.map(|tokens| (tokens, too_long))
    }

    /// Returns the order of the examples and the learning rates of a run on `examples` examples.
    pub(super) fn plan(&self, settings: &RunSettings, examples: usize) -> TrainPlan {
        TrainPlan {
            examples,
            batch_size: self.batch_size,
            steps: settings.steps,
            seed: settings.seed,
            learning_rate: settings.optimizer.learning_rate,
            schedule: settings.schedule,
            warmup: settings.warmup_steps,
        }
    }
}
