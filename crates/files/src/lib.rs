//! Durable file replacement, file locks and the Hugging Face hub cache.
//!
//! All crates of the workspace replace files and folders through this crate, so that the order of
//! fsync and rename, which decides what survives a crash, has one implementation:
//!
//! | To do this | Use |
//! |---|---|
//! | replace a small file | [`write()`] |
//! | choose permissions, or write in pieces | [`AtomicWrite`] |
//! | publish a file that grew over several runs | [`publish`] |
//! | create or replace a folder as a whole | [`StagedFolder`] |
//! | publish a folder that was filled over several runs | [`replace_folder`] |
//! | exclude other processes | [`FileLock`] |
//! | protect files from other users | [`folder_access`], [`no_follow`] |
//! | keep a secret in a file | [`create_private_file`], [`read_private_file`] |
//! | check the free space of a disk | [`DiskSpace`], [`available_space`] |
//! | select files by their names | [`NameFilter`] |
//! | find models that a hub client has downloaded | [`HubCache`] |
//! | simulate crashes and failing disks | [`observe_thread`] |
//!
//! All functions block. Inside an async runtime, call them from a blocking task.
//!
//! The crate reads no environment variables: functions that depend on them take a lookup closure.
//!
//! ```
//! # fn main() -> std::io::Result<()> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("run.json");
//! tinkex_files::write(&path, r#"{"step": 1}"#)?;
//! tinkex_files::write(&path, r#"{"step": 2}"#)?;
//! assert_eq!(std::fs::read(&path)?, br#"{"step": 2}"#);
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

mod access;
mod file;
mod folder;
mod hub_cache;
mod lock;
mod name_filter;
mod observe;
mod operations;
mod private_file;
mod space;

pub use access::{FolderAccess, folder_access, no_follow};
pub use file::{AtomicWrite, StagedFile, publish, write};
pub use folder::{StagedFolder, create_private_folder, recover_folder, replace_folder};
pub use hub_cache::{CachedRepo, HubCache, hub_home, is_model_folder};
pub use lock::{FileLock, LockError, try_lock};
pub use name_filter::NameFilter;
pub use observe::{FileOperation, ThreadObserver, announce, observe_thread};
pub use operations::{remove_file_if_exists, sync_folder};
pub use private_file::{create_private_file, read_private_file};
pub use space::{DiskSpace, NotEnoughSpace, available_space};
