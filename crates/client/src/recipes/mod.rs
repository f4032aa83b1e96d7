//! Training loops: supervised, with preferences and by reinforcement learning, and the parts that
//! they share (feature `recipes`).
//!
//! A recipe repeats: take a batch from its data source, run the pass, step the optimizer, report,
//! save a checkpoint. What differs between methods is the data source and the loss; the rest is
//! shared:
//!
//! | Part | Contents |
//! |---|---|
//! | [`rl`] | [`Rl`]: samples groups of completions, rewards them and trains on their advantages |
//! | [`dpo`] | the data and the loss of direct preference optimization |
//! | [`TrainLoop`] | training on given data: supervised, or with preference pairs |
//! | [`TrainPlan`] | the examples and the learning rate of every step |
//! | [`SavedCheckpoint`] | checkpoints of a run, and which of them to delete |
//! | [`StepLog`] | JSON Lines that are rewound when a run resumes |
//! | [`StopHandle`] | stops a run cleanly |

mod checkpoints;
pub mod dpo;
mod plan;
mod reward_program;
pub mod rl;
mod step_log;
mod stop;
mod train_loop;

pub use checkpoints::{SavedCheckpoint, checkpoint_name, rotate_checkpoints};
pub use plan::{Schedule, TrainPlan, shuffled};
pub use reward_program::RewardProgram;
pub use rl::Rl;
pub use step_log::StepLog;
pub use stop::StopHandle;
pub use train_loop::{EvalResult, StepResult, TrainEvent, TrainExample, TrainLoop};
