//! The hub cache on this machine, laid out as every hub client lays it out:
//!
//! ```text
//! models--org--name/refs/main                the commit that a revision stood for
//!                   snapshots/<commit>/file  a link to the file's content
//!                   blobs/<etag>             the content
//!                   .no_exist/<commit>/file  the hub has no such file there
//! ```
//!
//! Everything appears in one move, so a reader never sees half of it and writers cannot hurt each
//! other. What is here was read from disk or will be written there; call it off the runtime.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::files;
use super::id::TokenizerId;

/// What the cache has of one repository.
#[derive(Clone, Debug)]
pub(crate) struct Repo(PathBuf);

/// A revision as far as it is here.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) folder: PathBuf,
    /// Whether everything is here that the hub has, as far as we can tell.
    pub(crate) complete: bool,
}

impl Repo {
    pub(crate) fn new(cache: &Path, id: &TokenizerId) -> Self {
        Self(cache.join(format!("models--{}", id.repo().replace('/', "--"))))
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    /// A revision's snapshot, if its tokenizer is here.
    pub(crate) fn snapshot(&self, revision: &str) -> Option<Snapshot> {
        let commit = fs::read_to_string(self.reference(revision));
        let commit = commit.as_deref().map_or(revision, str::trim);
        let leads_elsewhere = commit.is_empty() || commit.contains(['/', '\\']) || commit == "..";
        let folder = self.0.join("snapshots").join(commit);
        if leads_elsewhere || !files::are_in(&folder) {
            return None;
        }
        // Others may have fetched the tokenizer alone. Without its settings it has no end token and
        // no template, so that is worth asking for.
        let absent = self.absent(commit, files::CONFIG).is_file();
        let complete = absent || folder.join(files::CONFIG).is_file();
        Some(Snapshot { folder, complete })
    }

    pub(crate) fn snapshot_folder(&self, commit: &str) -> PathBuf {
        self.0.join("snapshots").join(commit)
    }

    fn has_blob(&self, name: &str) -> bool {
        self.blob(name).is_file()
    }

    /// Remembers what a revision stands for.
    pub(crate) fn refer(&self, revision: &str, commit: &str) -> io::Result<()> {
        let path = self.reference(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|old| old.trim() == commit) {
            return Ok(());
        }
        in_one_move(&path, |beside| fs::write(beside, commit))
    }

    /// Remembers that the hub has no such file.
    pub(crate) fn mark_absent(&self, commit: &str, file: &str) -> io::Result<()> {
        in_one_move(&self.absent(commit, file), |beside| fs::write(beside, ""))
    }

    /// Puts a blob into a snapshot under a file's name.
    pub(crate) fn place(&self, blob: &str, commit: &str, file: &str) -> io::Result<()> {
        let path = self.snapshot_folder(commit).join(file);
        in_one_move(&path, |beside| link(&Path::new("../../blobs").join(blob), beside))
            // Where there are no links the content is there twice.
            .or_else(|_| in_one_move(&path, |to| fs::copy(self.blob(blob), to).map(|_| ())))
    }

    /// Content that is here already, or a file to download it to.
    pub(crate) fn open(&self, blob: Option<&str>) -> io::Result<Opened> {
        let here = |blob: Option<&str>| blob.filter(|blob| self.has_blob(blob)).map(str::to_owned);
        if let Some(blob) = here(blob) {
            return Ok(Opened::Whole(blob));
        }
        let partial = self.partial(blob)?;
        // Whoever had the lock before us may have finished it.
        Ok(here(blob).map_or(Opened::Partial(partial), Opened::Whole))
    }

    /// The file that a download goes to until it is whole: what an earlier one left, unless another
    /// process is at it right now.
    fn partial(&self, blob: Option<&str>) -> io::Result<Partial> {
        let blobs = self.0.join("blobs");
        fs::create_dir_all(&blobs)?;
        if let Some(blob) = blob {
            let path = blobs.join(format!("{blob}.tinkex-incomplete"));
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)?;
            match file.try_lock() {
                Ok(()) => {
                    let len = file.metadata()?.len();
                    return Ok(Partial { repo: self.clone(), path, file, len, own: false });
                }
                Err(TryLockError::WouldBlock) => {
                    tracing::debug!(
                        blob,
                        "another process is downloading this; doing so beside it"
                    );
                }
                Err(TryLockError::Error(error)) => {
                    tracing::debug!(%error, "no locks here; this download cannot be resumed");
                }
            }
        }
        let path = blobs.join(format!("{}.tinkex-incomplete", Uuid::new_v4()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        Ok(Partial { repo: self.clone(), path, file, len: 0, own: true })
    }

    fn blob(&self, name: &str) -> PathBuf {
        self.0.join("blobs").join(name)
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.0.join("refs").join(revision)
    }

    fn absent(&self, commit: &str, file: &str) -> PathBuf {
        self.0.join(".no_exist").join(commit).join(file)
    }
}

/// What is there of some content.
#[derive(Debug)]
pub(crate) enum Opened {
    /// All of it, under this name.
    Whole(String),
    /// A part, perhaps nothing yet.
    Partial(Partial),
}

/// A file that is not whole yet. It is locked against other processes while this lives.
#[derive(Debug)]
pub(crate) struct Partial {
    repo: Repo,
    path: PathBuf,
    file: File,
    len: u64,
    /// Nobody else will go on with it.
    own: bool,
}

impl Partial {
    /// How much is here.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.len))?;
        self.file.write_all(bytes)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn restart(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.len = 0;
        Ok(())
    }

    pub(crate) fn sha256(&mut self) -> io::Result<String> {
        self.file.seek(SeekFrom::Start(0))?;
        let (mut sum, mut buffer) = (Sha256::new(), vec![0; 1 << 16]);
        loop {
            match self.file.read(&mut buffer)? {
                0 => break,
                n => sum.update(&buffer[..n]),
            }
        }
        Ok(sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// It is whole and right: from now on it is the blob of this name.
    pub(crate) fn keep(mut self, blob: &str) -> io::Result<()> {
        self.file.sync_all()?;
        // Whoever was first is as right as we are; a blob that is in use is not replaced.
        if !self.repo.has_blob(blob) {
            fs::rename(&self.path, self.repo.blob(blob))?;
            self.own = false;
        } else if !self.own {
            fs::remove_file(&self.path).or_else(gone_is_fine)?;
        }
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if self.own {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn gone_is_fine(why: io::Error) -> io::Result<()> {
    if why.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(why) }
}

/// Writes something beside its place and moves it there.
fn in_one_move(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let beside = folder.join(format!(".{}", Uuid::new_v4()));
    let written = write(&beside).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(unix)]
fn link(to: &Path, at: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(to, at)
}

#[cfg(not(unix))]
fn link(_to: &Path, _at: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repo() -> (tempfile::TempDir, Repo) {
        let cache = tempfile::tempdir().unwrap();
        let repo = Repo::new(cache.path(), &TokenizerId::new("org/name").unwrap());
        (cache, repo)
    }

    fn fill(repo: &Repo, blob: &str, text: &[u8]) {
        let mut partial = repo.partial(Some(blob)).unwrap();
        partial.append(text).unwrap();
        partial.keep(blob).unwrap();
    }

    #[test]
    fn what_is_kept_is_found_again_in_the_common_layout() {
        let (cache, repo) = repo();
        assert!(repo.snapshot("main").is_none());
        fill(&repo, "e1", b"{}");
        repo.place("e1", "c0ffee", files::TOKENIZER).unwrap();
        assert!(repo.snapshot("main").is_none(), "no revision stands for it yet");
        repo.refer("main", "c0ffee").unwrap();
        let found = repo.snapshot("main").unwrap();
        assert!(!found.complete, "nobody asked for its settings");
        repo.mark_absent("c0ffee", files::CONFIG).unwrap();
        assert!(repo.snapshot("main").unwrap().complete);
        assert!(repo.snapshot("c0ffee").is_some(), "a commit is a revision too");
        let path = cache.path().join("models--org--name/snapshots/c0ffee/tokenizer.json");
        assert_eq!(fs::read(path).unwrap(), b"{}");
        let left = fs::read_dir(repo.folder().join("blobs")).unwrap().count();
        assert_eq!(left, 1, "nothing is left beside it");
    }

    #[test]
    fn a_reference_that_leads_elsewhere_is_not_followed() {
        let (_cache, repo) = repo();
        for commit in ["..", "../../x", "", "a\\b"] {
            repo.refer("main", commit).unwrap();
            assert!(repo.snapshot("main").is_none(), "{commit:?}");
        }
    }

    #[test]
    fn a_download_goes_on_where_it_ended_and_is_not_shared() {
        let (_cache, repo) = repo();
        let mut first = repo.partial(Some("e1")).unwrap();
        first.append(b"ab").unwrap();
        let second = repo.partial(Some("e1")).unwrap();
        assert_eq!(second.len(), 0, "the first is at it");
        let own = second.path.clone();
        drop(second);
        assert!(!own.exists(), "nobody would go on with it");
        drop(first);
        let mut third = repo.partial(Some("e1")).unwrap();
        assert_eq!(third.len(), 2);
        third.append(b"c").unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(third.sha256().unwrap(), abc);
    }

    #[test]
    fn two_that_finish_the_same_file_do_not_disturb_each_other() {
        let (_cache, repo) = repo();
        let mut first = repo.partial(Some("e1")).unwrap();
        let mut second = repo.partial(Some("e1")).unwrap();
        first.append(b"x").unwrap();
        second.append(b"x").unwrap();
        first.keep("e1").unwrap();
        second.keep("e1").unwrap();
        let left = fs::read_dir(repo.folder().join("blobs")).unwrap().count();
        assert_eq!((left, repo.has_blob("e1")), (1, true));
    }
}
