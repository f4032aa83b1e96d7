//! Training loops for the SDK `tinkex`: supervised fine-tuning, direct preference optimization and
//! reinforcement learning.
//!
//! Every step of a recipe takes a batch from its data source, runs the pass and the optimizer step,
//! reports metrics and saves a checkpoint if one is due. The methods differ in the data source and
//! the loss; the other parts are shared:
//!
//! | Part | Contents |
//! |---|---|
//! | [`rl`] | [`Rl`]: samples groups of completions, rewards them and trains on their advantages |
//! | [`dpo`] | the data and the loss of direct preference optimization |
//! | [`RewardProgram`] | rewards that an external program computes |
//! | [`TrainLoop`] | training on given data: supervised, or with preference pairs |
//! | [`TrainPlan`] | the examples and the learning rate of every step |
//! | [`runs`] | the run folder: settings, progress, checkpoints, metrics and samples |
//! | [`StopHandle`] | stops a run after its current steps, with a checkpoint |

#![forbid(unsafe_code)]

pub mod dpo;
mod plan;
mod reward_program;
pub mod rl;
mod stop;
mod train_loop;

pub use plan::{TrainPlan, shuffled};
pub use reward_program::RewardProgram;
pub use rl::Rl;
pub use stop::StopHandle;
pub use tinkex_runs as runs;
pub use tinkex_runs::Schedule;
pub use train_loop::{EvalResult, StepResult, TrainEvent, TrainExample, TrainLoop};
