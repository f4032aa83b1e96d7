//! Client of model hubs (Hugging Face and servers with the same API): downloads tokenizers and
//! uploads models.
//!
//! [`Hub`] has the settings. [`Hub::tokenizer_files`] finds the files of a tokenizer in the local
//! cache or downloads them. [`Hub::create_repo`] creates or opens a repository, and
//! [`HubRepo::commit`] uploads files to it.
//!
//! | File | Content |
//! |---|---|
//! | `hub` | [`Hub`]: settings, and the files of tokenizers |
//! | `tokenizer_id` | [`TokenizerId`]: the repository of a model's tokenizer |
//! | `snapshot`, `file` | Downloads of one revision, and of one file with its metadata |
//! | `cache` | The local cache, in the layout that all hub clients share |
//! | `repo`, `lfs` | Repositories, commits, and uploads of large files |
//! | `checksum` | SHA-256 checksums of files |
//! | `api` | Requests to the hub, with retries; the token is sent to the hub's own origin only |
//!
//! The SDK, the crate `tinkex`, re-exports [`Hub`] and [`TokenizerId`] with its feature
//! `tokenizer`.

#![forbid(unsafe_code)]

mod api;
mod cache;
mod checksum;
mod file;
mod hub;
mod lfs;
mod repo;
mod snapshot;
mod tokenizer_id;

#[cfg(test)]
#[path = "../../transport/src/fixture.rs"]
mod fixture;

pub use hub::Hub;
pub use repo::{Commit, CommitInfo, CreateRepo, HubRepo};
pub use tokenizer_id::{TokenizerId, before_colon};
