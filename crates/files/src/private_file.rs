//! Files with secrets, which only their owner can read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

use crate::access::no_follow;
use crate::operations::{file_name, parent, sync_folder};

/// Creates a file that only its owner can read: mode 0600 on Unix. The file appears under its name
/// only when it is complete and durable. Nothing is overwritten, and no symbolic link is followed.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("key");
/// use tinkex_files::{create_private_file, read_private_file};
///
/// create_private_file(&path, "secret")?;
/// assert_eq!(read_private_file(&path, 100)?, b"secret");
/// assert!(create_private_file(&path, "another").is_err());
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if there is a file or a symbolic link at `path`. Any error of
/// writing the file; there is then no file, unless fsync of the folder failed.
pub fn create_private_file(path: impl AsRef<Path>, contents: impl AsRef<[u8]>) -> io::Result<()> {
    let path = path.as_ref();
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(file_name(path)?);
    prefix.push(".");
    // `tempfile` creates files with mode 0600, and with O_EXCL, which follows no symbolic link.
    let mut file = tempfile::Builder::new().prefix(&prefix).tempfile_in(parent(path))?;
    file.write_all(contents.as_ref())?;
    file.as_file().sync_all()?;
    file.persist_noclobber(path)?;
    sync_folder(parent(path))
}

/// Reads a file that only its owner may access, of at most `limit` bytes. A symbolic link is not
/// followed.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if there is no file. [`io::ErrorKind::PermissionDenied`] on Unix if
/// other users can access the file, or if another user owns it and this process does not run as
/// root. [`io::ErrorKind::InvalidData`] if the file is not a regular file or is larger than
/// `limit`.
pub fn read_private_file(path: impl AsRef<Path>, limit: u64) -> io::Result<Vec<u8>> {
    let path = path.as_ref();
    let invalid = |message: &str| Err(io::Error::new(io::ErrorKind::InvalidData, message));
    // Opening a pipe would wait for a writer.
    if !path.symlink_metadata()?.is_file() {
        return invalid("not a regular file");
    }
    let file = no_follow(OpenOptions::new().read(true)).open(path)?;
    check_access(&file)?;
    let mut contents = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut contents)?;
    if contents.len() as u64 > limit {
        return invalid("the file is too large");
    }
    Ok(contents)
}

#[cfg(unix)]
fn check_access(file: &File) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = file.metadata()?;
    let owner = metadata.uid();
    let user = rustix::process::geteuid();
    let denied = |message: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    if owner != user.as_raw() && !user.is_root() {
        return denied(format!("the file belongs to the user with id {owner}"));
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return denied(format!("other users can access the file (mode {mode:o})"));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_access(_: &File) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::operations::testing::names;

    #[test]
    fn an_existing_file_is_neither_overwritten_nor_read_beyond_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let missing = read_private_file(&path, 10).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        create_private_file(&path, "first").unwrap();
        let exists = create_private_file(&path, "second").unwrap_err();
        assert_eq!(exists.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(read_private_file(&path, 5).unwrap(), b"first");
        assert_eq!(names(folder.path()), ["key"], "no temporary file remains");
        let large = read_private_file(&path, 4).unwrap_err();
        assert_eq!(large.kind(), io::ErrorKind::InvalidData);
        let other = read_private_file(folder.path(), 4).unwrap_err();
        assert_eq!(other.to_string(), "not a regular file");
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_others_can_access_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        create_private_file(&path, "secret").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for mode in [0o640, 0o604, 0o620, 0o611] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let refused = read_private_file(&path, 10).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            assert_eq!(
                refused.to_string(),
                format!("other users can access the file (mode {mode:o})")
            );
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        assert_eq!(read_private_file(&path, 10).unwrap(), b"secret");
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_is_followed_neither_to_read_nor_to_create() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("real");
        let link = folder.path().join("key");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let dangling = create_private_file(&link, "secret").unwrap_err();
        assert_eq!(dangling.kind(), io::ErrorKind::AlreadyExists);
        assert!(!real.exists());
        create_private_file(&real, "secret").unwrap();
        assert_eq!(read_private_file(&link, 10).unwrap_err().to_string(), "not a regular file");
    }
}
