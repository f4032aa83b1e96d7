//! Protection of files and folders against other users of the machine.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;

/// Makes opening fail if the last component of the path is a symbolic link, on Unix. Otherwise
/// another user who can write to the folder could make this process open a file of their choice.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("part");
/// use std::fs::OpenOptions;
///
/// let file = tinkex_files::no_follow(&mut OpenOptions::new()).create(true).append(true).open(path)?;
/// # drop(file);
/// # Ok(()) }
/// ```
pub fn no_follow(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        let flag = rustix::fs::OFlags::NOFOLLOW.bits();
        options.custom_flags(flag.cast_signed());
    }
    options
}

/// Users other than the owner who can access a folder; see [`folder_access`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FolderAccess {
    /// None: only the owner can access the folder.
    OwnerOnly,
    /// Members of its group or all users can read it, or members of its group can change it.
    Shared {
        /// Permission bits, for example `0o755`.
        mode: u32,
    },
}

/// Returns who can access a folder that this process is to use for its own files. Always
/// [`FolderAccess::OwnerOnly`] on platforms other than Unix.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] if another user owns the folder, unless this process runs as
/// root, or if all users can change it. Any error of reading its metadata.
pub fn folder_access(folder: impl AsRef<Path>) -> io::Result<FolderAccess> {
    access(folder.as_ref())
}

#[cfg(unix)]
fn access(folder: &Path) -> io::Result<FolderAccess> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = std::fs::metadata(folder)?;
    let owner = metadata.uid();
    let user = rustix::process::geteuid();
    let denied = |message: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    if owner != user.as_raw() && !user.is_root() {
        return denied(format!("the folder belongs to the user with id {owner}"));
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o002 != 0 {
        return denied(format!("all users can change the folder (mode {mode:o})"));
    }
    Ok(if mode & 0o077 == 0 { FolderAccess::OwnerOnly } else { FolderAccess::Shared { mode } })
}

#[cfg(not(unix))]
fn access(folder: &Path) -> io::Result<FolderAccess> {
    std::fs::metadata(folder).map(|_| FolderAccess::OwnerOnly)
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn a_symbolic_link_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("real");
        let link = folder.path().join("link");
        fs::write(&real, "content").unwrap();
        symlink(&real, &link).unwrap();
        let open = |path| no_follow(OpenOptions::new().append(true).create(true)).open(path);
        assert!(open(&link).is_err());
        assert!(open(&real).is_ok());
    }

    #[test]
    fn a_folder_that_all_users_can_change_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let with_mode = |mode| {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
            folder_access(folder.path())
        };
        assert_eq!(with_mode(0o700).unwrap(), FolderAccess::OwnerOnly);
        assert_eq!(with_mode(0o755).unwrap(), FolderAccess::Shared { mode: 0o755 });
        assert_eq!(with_mode(0o770).unwrap(), FolderAccess::Shared { mode: 0o770 });
        let refused = with_mode(0o777).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(refused.to_string(), "all users can change the folder (mode 777)");
    }
}
