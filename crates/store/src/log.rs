//! Targets of the server's `tracing` events.
//!
//! The library installs no subscriber and prints nothing; the program that embeds it decides what
//! to show. Events carry their subject in fields (`request_id`, `model_id`, `session_id`,
//! `sampling_session_id`). Events of an operation on a model are inside a `request` span with the
//! ids; samples run in batches and have no span. API keys never appear in an event. Prompts and
//! training data never appear either, with one exception: the error of a rejected or failed request
//! may contain the invalid value.
//!
//! | Target | Level | Events |
//! |---|---|---|
//! | [`REQUEST`] | INFO | one per executed request, successful or failed |
//! | [`REQUEST`] | WARN | a request met a fault and is executed again |
//! | [`REQUEST`] | DEBUG | HTTP requests that were rejected, with status and reason |
//! | [`MODEL`] | INFO | memory limits at the start, base model loaded or unloaded, model restored from disk, model autosaved |
//! | [`MODEL`] | INFO | the architecture of a model in the hub cache is not supported |
//! | [`MODEL`] | WARN | snapshot or autosave failed, base model of unfinished requests missing |
//! | [`MODEL`] | WARN | model of the hub cache skipped, files of a base model unusual, alias without a model |
//! | [`MODEL`] | ERROR | the worker thread panicked |
//! | [`STORAGE`] | INFO | writes succeed again after a failure |
//! | [`STORAGE`] | WARN | a write failed, a stored payload cannot be read |

/// Target of events about single requests: `tinkex_server::request`.
pub const REQUEST: &str = "tinkex_server::request";
/// Target of events about models and the worker: `tinkex_server::model`.
pub const MODEL: &str = "tinkex_server::model";
/// Target of events about the data folder: `tinkex_server::storage`.
pub const STORAGE: &str = "tinkex_server::storage";
