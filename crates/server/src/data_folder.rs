//! The lock of a data folder, and the check of a data folder that no server uses.

use std::path::Path;

use tinkex_files::{FileLock, LockError};
use tinkex_store::disk::check::{self, DataFolderReport};

use crate::start_error::{StartAction, StartError};

/// Locks a data folder, so that no other server of this machine uses it.
pub(crate) fn lock(data_dir: &Path) -> Result<FileLock, StartError> {
    let path = data_dir.join("lock");
    match FileLock::acquire(&path) {
        Ok(lock) => Ok(lock),
        Err(LockError::InUse) => Err(StartError::DataDirInUse(data_dir.to_owned())),
        Err(error) => Err(StartError::io(StartAction::Lock, path.display())(error.into())),
    }
}

/// Verifies a data folder that no server uses. With `repair`, copies everything that can be read
/// from a damaged database or payload file to a new file and keeps the damaged file. The function
/// blocks.
///
/// # Errors
/// If a server uses the data folder, or if a file cannot be read or written. Damage is not an error.
pub fn check_data_folder(data_dir: &Path, repair: bool) -> Result<DataFolderReport, StartError> {
    let _lock = lock(data_dir)?;
    let checked = if repair { check::repair(data_dir) } else { check::check(data_dir) };
    checked.map_err(StartError::io(StartAction::Read, data_dir.display()))
}
