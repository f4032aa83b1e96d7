//! Replacement of folders: after a crash, recovery yields either the old or the new content.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::operations::{exchange, file_name, parent, remove, rename, sync_folder};

/// Temporary folder that replaces the target on [`commit`](Self::commit). Dropping the value
/// removes the temporary folder.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let root = tempfile::tempdir()?;
/// # let target = root.path().join("checkpoint");
/// use tinkex_files::{StagedFolder, write};
///
/// let staged = StagedFolder::new(&target)?;
/// write(staged.path().join("weights"), [0; 8])?;
/// assert!(!target.exists());
/// staged.commit()?;
/// assert_eq!(std::fs::read(target.join("weights"))?.len(), 8);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct StagedFolder {
    // Dropped before `_parents`, which must be empty to be removed.
    folder: TempDir,
    _parents: CreatedFolders,
    target: PathBuf,
}

impl StagedFolder {
    /// Creates an empty folder beside `target`.
    ///
    /// # Errors
    /// If the folder that holds `target` does not exist or cannot be written to.
    pub fn new(target: impl AsRef<Path>) -> io::Result<Self> {
        let target = target.as_ref();
        let mut prefix = OsString::from(".");
        prefix.push(file_name(target)?);
        prefix.push(".");
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix);
        // Temporary folders have mode 0700 by default; the target has the mode that the umask
        // gives.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        let folder = builder.tempdir_in(parent(target))?;
        Ok(Self { folder, _parents: CreatedFolders::default(), target: target.to_owned() })
    }

    /// Creates an empty folder beside `target`, and the missing parents of `target`. Dropping the
    /// value removes the parents that it created, if they are empty.
    ///
    /// # Errors
    /// If a folder cannot be created.
    pub fn with_parents(target: impl AsRef<Path>) -> io::Result<Self> {
        let parents = CreatedFolders::create(parent(target.as_ref()))?;
        Ok(Self { _parents: parents, ..Self::new(target)? })
    }

    /// Returns the path of the temporary folder. The caller must fsync each file that it writes
    /// there, for example with [`write`](crate::write).
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Replaces the target with this folder; see [`replace_folder`].
    ///
    /// # Errors
    /// As for [`replace_folder`]; the temporary folder is then removed.
    pub fn commit(self) -> io::Result<()> {
        replace_folder(self.folder.path(), &self.target)
    }
}

/// Folders that were created. Dropping the value removes those that are still empty.
#[derive(Debug, Default)]
struct CreatedFolders(Vec<PathBuf>);

impl CreatedFolders {
    /// Creates `folder` and its missing parents.
    fn create(folder: &Path) -> io::Result<Self> {
        let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
        let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
        let mut created = Self::default();
        for folder in missing.into_iter().rev() {
            match fs::create_dir(folder) {
                Ok(()) => created.0.push(folder.to_owned()),
                // Another process created it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Ok(created)
    }
}

impl Drop for CreatedFolders {
    fn drop(&mut self) {
        for folder in self.0.iter().rev() {
            // A folder with content stays, and so do its parents.
            if fs::remove_dir(folder).is_err() {
                break;
            }
        }
    }
}

/// Replaces the file or folder at `target` with the folder `staged`, and removes the old content.
///
/// Both must be on the same file system, and the files in `staged` must be fsynced. On Linux and
/// macOS the two are swapped in one step, so `target` exists at every moment. Elsewhere, and on
/// file systems that cannot swap, the old content is renamed first; if the process is killed before
/// `staged` is renamed, the next replacement or [`recover_folder`] restores the old content.
///
/// After success `staged` no longer exists. If the process is killed, `staged` may remain, with the
/// new or the old content.
///
/// Two replacements of one target must not run at the same time; hold a
/// [`FileLock`](crate::FileLock) if several processes may replace it.
///
/// # Errors
/// If a folder cannot be fsynced or renamed. The old content is then at `target`, and `staged` is
/// unchanged, unless fsync of the parent folder failed after the replacement. An error while
/// removing the old content is ignored: the next replacement tries again.
pub fn replace_folder(staged: impl AsRef<Path>, target: impl AsRef<Path>) -> io::Result<()> {
    let staged = staged.as_ref();
    let target = target.as_ref();
    recover_folder(target)?;
    sync_folder(staged)?;
    if !exists(target) {
        rename(staged, target)?;
        return sync_folder(parent(target));
    }
    if exchange(staged, target).is_ok() {
        sync_folder(parent(target))?;
        let _ = remove(staged);
        return Ok(());
    }
    let retired = retired_path(target)?;
    rename(target, &retired)?;
    if let Err(error) = rename(staged, target) {
        let _ = rename(&retired, target);
        return Err(error);
    }
    sync_folder(parent(target))?;
    let _ = remove(&retired);
    Ok(())
}

/// Restores the content of `target` if the process was killed while [`replace_folder`] replaced it
/// on a file system that cannot swap folders. Does nothing otherwise.
///
/// # Errors
/// If the old content exists and cannot be renamed.
pub fn recover_folder(target: impl AsRef<Path>) -> io::Result<()> {
    let target = target.as_ref();
    let retired = retired_path(target)?;
    if !exists(&retired) {
        return Ok(());
    }
    if exists(target) {
        // The replacement succeeded; only the removal of the old content was interrupted.
        let _ = remove(&retired);
        return Ok(());
    }
    rename(&retired, target)?;
    sync_folder(parent(target))
}

/// Creates a folder and its missing parents with mode 0700 on Unix. Existing folders keep theirs.
///
/// # Errors
/// If a folder cannot be created.
pub fn create_private_folder(folder: impl AsRef<Path>) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Returns the path of the old content between the two renames. The name is fixed, so that recovery
/// finds it.
fn retired_path(target: &Path) -> io::Result<PathBuf> {
    let mut name = OsString::from(".");
    name.push(file_name(target)?);
    name.push(".tinkex-replaced");
    Ok(target.with_file_name(name))
}

fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::testing::{Interrupted, names};

    /// Reads the file in a folder that [`folder`] created.
    fn content(folder: &Path) -> Option<String> {
        fs::read_to_string(folder.join("file")).ok()
    }

    /// Creates a folder with one file.
    fn folder(path: &Path, text: &str) {
        fs::create_dir(path).unwrap();
        fs::write(path.join("file"), text).unwrap();
    }

    #[test]
    fn an_interrupted_replacement_leaves_old_or_new_content_and_can_be_repeated() {
        for exchange in [false, true] {
            let mut finished = false;
            for operations in 0..20 {
                let root = tempfile::tempdir().unwrap();
                let target = root.path().join("target");
                let staged = root.path().join("staged");
                folder(&target, "old");
                folder(&staged, "new");
                let interrupted = Interrupted::after(operations, exchange);
                let replaced = replace_folder(&staged, &target);
                let performed = interrupted.end();
                if exchange {
                    assert!(exists(&target), "a swap leaves no gap ({operations})");
                }
                recover_folder(&target).unwrap();
                let left = content(&target).unwrap();
                let expected: &[&str] = if replaced.is_ok() { &["new"] } else { &["old", "new"] };
                assert!(expected.contains(&left.as_str()), "{left} after {operations}");

                let _ = fs::remove_dir_all(&staged);
                folder(&staged, "newer");
                replace_folder(&staged, &target).unwrap();
                assert_eq!(content(&target).as_deref(), Some("newer"), "{operations}");
                assert_eq!(names(root.path()), ["target"], "{operations}");
                finished = replaced.is_ok() && performed.last() == Some(&"remove");
                if finished {
                    break;
                }
            }
            assert!(finished, "20 operations are enough for a complete replacement");
        }
    }

    #[test]
    fn recovery_restores_the_old_content_after_the_first_of_two_renames() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("target");
        let staged = root.path().join("staged");
        folder(&target, "old");
        folder(&staged, "new");
        // Two operations succeed: fsync of the staged folder and the rename of the old content.
        let interrupted = Interrupted::after(2, false);
        replace_folder(&staged, &target).unwrap_err();
        assert_eq!(interrupted.end(), ["sync folder", "rename"]);
        assert!(!exists(&target));
        recover_folder(&target).unwrap();
        assert_eq!(content(&target).as_deref(), Some("old"));
        assert_eq!(content(&staged).as_deref(), Some("new"));
    }

    #[test]
    fn a_new_folder_appears_complete_with_default_permissions() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("target");
        let staged = StagedFolder::new(&target).unwrap();
        crate::write(staged.path().join("file"), "x").unwrap();
        assert!(!exists(&target));
        staged.commit().unwrap();
        assert_eq!(content(&target).as_deref(), Some("x"));
        assert_eq!(names(root.path()), ["target"]);
        let plain = root.path().join("plain");
        fs::create_dir(&plain).unwrap();
        let permissions = |path: &Path| fs::metadata(path).unwrap().permissions();
        assert_eq!(permissions(&target), permissions(&plain));
    }

    #[test]
    fn dropping_a_staged_folder_removes_it_and_keeps_the_target() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("target");
        folder(&target, "old");
        let staged = StagedFolder::new(&target).unwrap();
        crate::write(staged.path().join("file"), "new").unwrap();
        drop(staged);
        assert_eq!(content(&target).as_deref(), Some("old"));
        assert_eq!(names(root.path()), ["target"]);
    }

    #[test]
    fn created_parents_are_removed_unless_they_have_content() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("a/b/target");
        drop(StagedFolder::with_parents(&target).unwrap());
        assert_eq!(names(root.path()), Vec::<String>::new());

        let staged = StagedFolder::with_parents(&target).unwrap();
        fs::write(root.path().join("a/other"), "").unwrap();
        drop(staged);
        assert_eq!(names(&root.path().join("a")), ["other"]);

        let staged = StagedFolder::with_parents(&target).unwrap();
        crate::write(staged.path().join("file"), "x").unwrap();
        staged.commit().unwrap();
        assert_eq!(names(&root.path().join("a/b")), ["target"]);
        // Folders that existed before are kept.
        fs::remove_dir_all(&target).unwrap();
        drop(StagedFolder::with_parents(&target).unwrap());
        assert_eq!(names(&root.path().join("a")), ["b", "other"]);
    }

    #[test]
    fn a_file_at_the_target_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("target");
        let staged = root.path().join("staged");
        fs::write(&target, "a file").unwrap();
        folder(&staged, "new");
        replace_folder(&staged, &target).unwrap();
        assert_eq!(content(&target).as_deref(), Some("new"));
        assert_eq!(names(root.path()), ["target"]);
    }

    #[cfg(unix)]
    #[test]
    fn private_folders_have_mode_0700() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b");
        create_private_folder(&path).unwrap();
        create_private_folder(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
