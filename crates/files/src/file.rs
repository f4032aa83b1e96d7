//! Atomic replacement of files: a crash leaves either the old or the new content.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::{NamedTempFile, TempPath};

use crate::operations::{file_name, parent, remove_file_if_exists, rename, sync_file, sync_folder};

/// Size of the write buffer in bytes.
const BUFFER_BYTES: usize = 1 << 16;

/// Replaces the file at `path` with `contents`, durably.
///
/// Short for [`AtomicWrite::new(path).write(contents)`](AtomicWrite::write).
///
/// # Errors
/// As for [`AtomicWrite::write`].
pub fn write(path: impl AsRef<Path>, contents: impl AsRef<[u8]>) -> io::Result<()> {
    AtomicWrite::new(path).write(contents)
}

/// Publishes a file that the caller wrote under another name in the same file system: calls fsync
/// on `file`, which is open at `from`, renames it to `to`, and calls fsync on the folder of `to`.
///
/// For files that grow over several runs, such as downloads. [`AtomicWrite`] includes these steps
/// for a file that is written at once.
///
/// # Errors
/// If one of the steps fails. Unless fsync of the folder failed, the old file at `to` is unchanged.
pub fn publish(file: &File, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
    let to = to.as_ref();
    sync_file(file)?;
    rename(from.as_ref(), to)?;
    sync_folder(parent(to))
}

/// Atomic, durable replacement of a file.
///
/// The content is written to a temporary file in the same folder, which is fsynced and renamed to
/// the target; then the folder is fsynced. A reader, or the next start after a crash, finds either
/// the complete old or the complete new content. After success the new content survives a power
/// failure.
///
/// An existing file keeps its permissions. A symbolic link is followed: the file that it points to
/// is replaced. A device or pipe, such as `/dev/stdout`, is written to directly.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("new/credentials.json");
/// use std::io::Write as _;
/// use tinkex_files::AtomicWrite;
///
/// AtomicWrite::new(&path)
///     .create_folders()
///     .owner_only()
///     .write_with(|out| writeln!(out, "{{}}"))?;
/// # assert_eq!(std::fs::read(&path)?, b"{}\n");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is written before `write`, `write_with` or `stage`"]
pub struct AtomicWrite {
    path: PathBuf,
    owner_only: bool,
    create_folders: bool,
    single_writer: bool,
}

impl AtomicWrite {
    /// Prepares to replace, or create, the file at `path`.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
            owner_only: false,
            create_folders: false,
            single_writer: false,
        }
    }

    /// Gives the file mode 0600 on Unix, whatever mode an existing file has. No effect elsewhere.
    pub fn owner_only(mut self) -> Self {
        self.owner_only = true;
        self
    }

    /// Creates missing parent folders.
    pub fn create_folders(mut self) -> Self {
        self.create_folders = true;
        self
    }

    /// Uses the fixed temporary name `NAME.new`, which the next write overwrites if a crash left it
    /// behind. With the default, a random name, a crash leaves a file that no later write removes.
    ///
    /// Only for files that a single process replaces at a time: two writers at once would write
    /// into the same temporary file.
    pub fn single_writer(mut self) -> Self {
        self.single_writer = true;
        self
    }

    /// Removes the temporary file that a crash left behind. Does nothing without
    /// [`single_writer`](Self::single_writer), because a random name is not known.
    ///
    /// # Errors
    /// If the file exists and cannot be removed.
    pub fn remove_leftover(&self) -> io::Result<()> {
        if !self.single_writer {
            return Ok(());
        }
        remove_file_if_exists(fixed_temporary_path(&resolve_link(self.path.clone()))?)
    }

    /// Replaces the file with `contents`.
    ///
    /// # Errors
    /// If the folder does not exist or cannot be written to, or the disk is full. The old file is
    /// then unchanged, unless fsync of the folder failed after the rename.
    pub fn write(self, contents: impl AsRef<[u8]>) -> io::Result<()> {
        self.write_with(|out| out.write_all(contents.as_ref()))
    }

    /// Replaces the file with what `fill` writes. The writer is buffered.
    ///
    /// # Errors
    /// The error of `fill`, or as for [`write`](Self::write).
    pub fn write_with(self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        if is_stream(&self.path) {
            let mut out = OpenOptions::new().write(true).open(&self.path)?;
            fill(&mut out)?;
            return out.flush();
        }
        let mut staged = self.stage()?;
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, &mut staged);
        fill(&mut out)?;
        out.flush()?;
        drop(out);
        staged.commit().map(drop)
    }

    /// Creates the temporary file, for content that is written over time.
    ///
    /// # Errors
    /// If the temporary file cannot be created.
    pub fn stage(self) -> io::Result<StagedFile> {
        let target = resolve_link(self.path);
        let folder = parent(&target);
        if self.create_folders {
            fs::create_dir_all(folder)?;
        }
        let file = if self.single_writer {
            let path = fixed_temporary_path(&target)?;
            let file = options(self.owner_only).create(true).truncate(true).open(&path)?;
            NamedTempFile::from_parts(file, TempPath::try_from_path(path)?)
        } else {
            let mut prefix = std::ffi::OsString::from(".");
            prefix.push(file_name(&target)?);
            prefix.push(".");
            let create = |path: &Path| options(self.owner_only).create_new(true).open(path);
            tempfile::Builder::new().prefix(&prefix).make_in(folder, create)?
        };
        if let Some(permissions) = permissions(&target, self.owner_only) {
            file.as_file().set_permissions(permissions)?;
        }
        Ok(StagedFile { file, target })
    }
}

/// Temporary file that replaces the target on [`commit`](Self::commit). Dropping the value removes
/// the temporary file.
#[derive(Debug)]
pub struct StagedFile {
    file: NamedTempFile<File>,
    target: PathBuf,
}

impl StagedFile {
    /// Returns the open temporary file.
    #[must_use]
    pub fn as_file(&self) -> &File {
        self.file.as_file()
    }

    /// Calls fsync on the file, renames it to its target, and calls fsync on the folder. Returns
    /// the open file, which is readable and writable.
    ///
    /// # Errors
    /// If one of the steps fails. The old file is unchanged, unless fsync of the folder failed.
    pub fn commit(self) -> io::Result<File> {
        let (file, path) = self.file.into_parts();
        let published = publish(&file, &path, &self.target);
        // Dropping `path` removes the temporary file if the rename failed, and nothing otherwise.
        published.map(|()| file)
    }

    /// Flushes the content to disk with fsync.
    ///
    /// # Errors
    /// If fsync fails, for example because the disk is full.
    pub fn sync(&self) -> io::Result<()> {
        sync_file(self.file.as_file())
    }

    /// Renames the file to its target without fsync, for callers that hold a lock and must not wait
    /// for the disk. Call [`sync`](Self::sync) before, and [`sync_folder`](crate::sync_folder)
    /// after: without the first a power failure can leave an incomplete file, without the second
    /// the old one.
    ///
    /// # Errors
    /// If the rename fails. The old file is then unchanged.
    pub fn publish(self) -> io::Result<File> {
        let (file, path) = self.file.into_parts();
        rename(&path, &self.target)?;
        Ok(file)
    }
}

impl Write for StagedFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.file.as_file_mut().write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_file_mut().flush()
    }
}

/// Returns the temporary path `NAME.new` that a single writer uses.
fn fixed_temporary_path(target: &Path) -> io::Result<PathBuf> {
    let mut name = file_name(target)?.to_owned();
    name.push(".new");
    Ok(target.with_file_name(name))
}

/// Returns whether `path` exists and is neither a regular file nor a folder.
fn is_stream(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir())
}

/// Resolves a symbolic link. Returns any other path unchanged.
fn resolve_link(path: PathBuf) -> PathBuf {
    match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_symlink() => fs::canonicalize(&path).unwrap_or(path),
        _ => path,
    }
}

/// Returns the options for opening the temporary file: readable, writable and, on Unix, with mode
/// 0600 from its creation if `owner_only` is set.
fn options(owner_only: bool) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    #[cfg(unix)]
    if owner_only {
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    }
    #[cfg(not(unix))]
    let _ = owner_only;
    options
}

/// Returns the permissions to set on the temporary file; `None` keeps the permissions that it was
/// created with.
#[cfg(unix)]
fn permissions(target: &Path, owner_only: bool) -> Option<fs::Permissions> {
    use std::os::unix::fs::PermissionsExt as _;
    if owner_only {
        // A temporary file that a crash left behind may have another mode.
        return Some(fs::Permissions::from_mode(0o600));
    }
    fs::metadata(target).ok().map(|metadata| metadata.permissions())
}

#[cfg(not(unix))]
fn permissions(_target: &Path, _owner_only: bool) -> Option<fs::Permissions> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::testing::{Interrupted, names};

    #[test]
    fn an_interrupted_write_leaves_the_old_or_the_new_content() {
        for single_writer in [false, true] {
            for operations in 0..=3 {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("run.json");
                fs::write(&path, "old").unwrap();
                let replace = AtomicWrite { single_writer, ..AtomicWrite::new(&path) };
                let interrupted = Interrupted::after(operations, true);
                let written = replace.clone().write("new");
                interrupted.end();
                assert_eq!(written.is_ok(), operations == 3, "{operations}");
                let expected = if operations < 2 { "old" } else { "new" };
                assert_eq!(fs::read_to_string(&path).unwrap(), expected, "{operations}");
                replace.write("newer").unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), "newer");
            }
        }
    }

    #[test]
    fn content_is_flushed_before_the_rename_and_the_folder_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let interrupted = Interrupted::after(10, true);
        write(folder.path().join("x"), "").unwrap();
        assert_eq!(interrupted.end(), ["sync file", "rename", "sync folder"]);
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        write(&path, "old").unwrap();
        let written = AtomicWrite::new(&path).write_with(|out| {
            out.write_all(b"new")?;
            Err(io::Error::other("disk full"))
        });
        assert_eq!(written.unwrap_err().to_string(), "disk full");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["x"]);
    }

    #[test]
    fn a_single_writer_overwrites_the_temporary_file_that_a_crash_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        fs::write(folder.path().join("x.new"), "half of a longer content").unwrap();
        let replace = AtomicWrite::new(&path).single_writer();
        replace.clone().write("whole").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(names(folder.path()), ["x"]);
        fs::write(folder.path().join("x.new"), "half").unwrap();
        replace.remove_leftover().unwrap();
        replace.remove_leftover().unwrap();
        assert_eq!(names(folder.path()), ["x"]);
    }

    #[test]
    fn missing_folders_are_an_error_unless_create_folders_is_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/x");
        assert_eq!(write(&path, "1").unwrap_err().kind(), io::ErrorKind::NotFound);
        AtomicWrite::new(&path).create_folders().write("1").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"1");
        assert_eq!(write("/", "1").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_committed_file_is_returned_open_for_reading_and_writing() {
        use std::io::{Read as _, Seek as _};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut staged = AtomicWrite::new(&path).stage().unwrap();
        staged.write_all(b"ab").unwrap();
        assert!(!path.exists());
        let mut file = staged.commit().unwrap();
        file.write_all(b"c").unwrap();
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "abc");
        assert_eq!(names(folder.path()), ["x"]);
    }

    #[cfg(unix)]
    #[test]
    fn an_existing_file_keeps_its_permissions_unless_owner_only_is_set() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        fs::write(&path, "1").unwrap();
        let default_mode = mode();
        fs::remove_file(&path).unwrap();
        write(&path, "1").unwrap();
        assert_eq!(mode(), default_mode, "a new file has the mode that the umask gives");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        write(&path, "2").unwrap();
        assert_eq!(mode(), 0o640);
        AtomicWrite::new(&path).owner_only().write("3").unwrap();
        assert_eq!(mode(), 0o600);
        fs::write(folder.path().join("x.new"), "leftover").unwrap();
        AtomicWrite::new(&path).owner_only().single_writer().write("4").unwrap();
        assert_eq!(mode(), 0o600);
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        write(&link, "x").unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("/dev/null"));
        assert_eq!(names(folder.path()), ["link"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_is_followed_and_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("real");
        let link = folder.path().join("link");
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink("real", &link).unwrap();
        write(&link, "new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
    }
}
