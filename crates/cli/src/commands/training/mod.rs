//! Training runs: what `tinkex train` and `tinkex rl` share. `tinkex eval` uses the readers of
//! examples.
//!
//! | Module | Contents |
//! |---|---|
//! | `args` | arguments that runs of all methods have |
//! | `start` | checks the arguments, finds a run to resume, chooses the folder of a new run |
//! | `log`, `event_log` | metrics, plots, and the event file for TensorBoard |
//! | `progress` | the progress bar |
//! | `report` | the result of a run, and how to resume it |
//! | `source`, `records`, `example_format`, `data` | files of examples, pairs and prompts |

pub(super) mod args;
pub(super) mod data;
mod event_log;
mod example_format;
pub(super) mod log;
pub(super) mod progress;
mod records;
pub(super) mod report;
pub(super) mod source;
pub(super) mod start;

pub(super) use example_format::ExampleFormat;
