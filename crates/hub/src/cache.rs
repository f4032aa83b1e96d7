//! [`TokenizerCache`]: tokenizer files in the local hub cache, in the layout that all hub clients
//! share (see [`tinkex_files::HubCache`]).
//!
//! Every file is written under a temporary name and then renamed, so readers never see an
//! incomplete file, and several processes can write the same file. All functions block; call them
//! on the blocking thread pool.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use tinkex_files::{AtomicWrite, CachedRepo, HubCache, LockError};
use tinkex_text::files;
use uuid::Uuid;

use crate::checksum::sha256_hex;
use tinkex_transport::download::resume::PartialFile;
use tinkex_transport::error::{Error, ErrorKind};

use crate::tokenizer_id::TokenizerId;

/// Cached files of one tokenizer repository.
#[derive(Clone, Debug)]
pub(crate) struct TokenizerCache(CachedRepo);

/// Cached files of one revision.
#[derive(Debug)]
pub(crate) struct CachedSnapshot {
    pub(crate) folder: PathBuf,
    /// Whether `tokenizer_config.json` is cached, or known not to exist.
    pub(crate) complete: bool,
}

impl TokenizerCache {
    pub(crate) fn new(cache: &HubCache, id: &TokenizerId) -> Self {
        Self(cache.model(id.repo()))
    }

    pub(crate) fn folder(&self) -> &Path {
        self.0.folder()
    }

    /// Returns the snapshot of a revision, if its tokenizer is cached.
    pub(crate) fn snapshot(&self, revision: &str) -> Option<CachedSnapshot> {
        let commit = self.0.commit(revision)?;
        let folder = self.0.snapshot(&commit);
        if !files::has_tokenizer(&folder) {
            return None;
        }
        // Other programs may have cached the tokenizer without `tokenizer_config.json`. Without
        // this file the tokenizer has no end token and no chat template, so such a snapshot is
        // incomplete, and the file is downloaded from the hub.
        let absent = self.0.absence_marker(&commit, files::CONFIG).is_file();
        let complete = absent || folder.join(files::CONFIG).is_file();
        Some(CachedSnapshot { folder, complete })
    }

    pub(crate) fn snapshot_folder(&self, commit: &str) -> PathBuf {
        self.0.snapshot(commit)
    }

    /// Stores the commit that a revision refers to.
    pub(crate) fn set_reference(&self, revision: &str, commit: &str) -> io::Result<()> {
        let path = self.0.reference(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|old| old.trim() == commit) {
            return Ok(());
        }
        AtomicWrite::new(path).create_folders().write(commit)
    }

    /// Records that a commit has no file of this name on the hub.
    pub(crate) fn mark_absent(&self, commit: &str, file: &str) -> io::Result<()> {
        AtomicWrite::new(self.0.absence_marker(commit, file)).create_folders().write("")
    }

    /// Adds a blob to a snapshot under a file name.
    pub(crate) fn add_to_snapshot(&self, blob: &str, commit: &str, file: &str) -> io::Result<()> {
        let path = self.0.snapshot(commit).join(file);
        if replace_link(&Path::new("../../blobs").join(blob), &path).is_ok() {
            return Ok(());
        }
        // Symbolic links are not supported, so copy the content of the blob.
        let mut content = File::open(self.blob(blob))?;
        AtomicWrite::new(&path)
            .create_folders()
            .write_with(|out| io::copy(&mut content, out).map(drop))
    }

    /// Opens the cached content of a file. If the content is not cached, opens a partial blob to
    /// download it to.
    pub(crate) fn open(&self, expected: ExpectedContent) -> io::Result<OpenedBlob> {
        let cached = |expected: &ExpectedContent| {
            expected.blob.clone().filter(|blob| self.blob(blob).is_file())
        };
        if let Some(blob) = cached(&expected) {
            return Ok(OpenedBlob::Cached(blob));
        }
        let partial = self.open_partial(expected)?;
        // Check again: the process that held the lock before may have completed the file.
        Ok(cached(&partial.expected).map_or(OpenedBlob::Partial(partial), OpenedBlob::Cached))
    }

    /// Opens the partial blob of an earlier download. If another process is downloading the same
    /// file, opens a new partial blob instead.
    fn open_partial(&self, expected: ExpectedContent) -> io::Result<PartialBlob> {
        let blobs = self.0.blobs();
        fs::create_dir_all(&blobs)?;
        if let Some(blob) = &expected.blob {
            let path = blobs.join(format!("{blob}.tinkex-incomplete"));
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let file = tinkex_files::no_follow(&mut options).open(&path)?;
            match tinkex_files::try_lock(&file) {
                Ok(()) => {
                    let length = file.metadata()?.len();
                    return Ok(PartialBlob::new(self, path, file, length, false, expected));
                }
                Err(LockError::InUse) => {
                    tracing::debug!(
                        blob,
                        "another process downloads this file; downloading a copy"
                    );
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot lock the file; this download cannot be resumed");
                }
            }
        }
        let path = blobs.join(format!("{}.tinkex-incomplete", Uuid::new_v4()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        Ok(PartialBlob::new(self, path, file, 0, true, expected))
    }

    fn blob(&self, name: &str) -> PathBuf {
        self.0.blobs().join(name)
    }
}

/// Name, size and checksum of a file's content, as far as the hub announced them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExpectedContent {
    /// Name of the blob; if `None`, the blob is named after its checksum.
    pub(crate) blob: Option<String>,
    /// Size in bytes.
    pub(crate) size: Option<u64>,
    /// SHA-256 in lower-case hex.
    pub(crate) sha256: Option<String>,
}

/// Complete or partial content of a file in the cache.
#[derive(Debug)]
pub(crate) enum OpenedBlob {
    /// All content, in the blob of this name.
    Cached(String),
    /// The start of the content, or an empty blob.
    Partial(PartialBlob),
}

/// Incomplete blob, locked against other processes.
#[derive(Debug)]
pub(crate) struct PartialBlob {
    cache: TokenizerCache,
    path: PathBuf,
    file: File,
    length: u64,
    /// Whether the file has a random name, so that no later download can resume it. Such a file is
    /// removed on drop.
    private: bool,
    expected: ExpectedContent,
    /// Checksum of the content, once verified.
    sha256: Option<String>,
}

impl PartialBlob {
    fn new(
        cache: &TokenizerCache,
        path: PathBuf,
        file: File,
        length: u64,
        private: bool,
        expected: ExpectedContent,
    ) -> Self {
        Self { cache: cache.clone(), path, file, length, private, expected, sha256: None }
    }

    fn compute_sha256(&mut self) -> io::Result<String> {
        self.file.seek(SeekFrom::Start(0))?;
        Ok(sha256_hex(&self.file)?.0)
    }
}

impl PartialFile for PartialBlob {
    /// The name of the blob.
    type Complete = String;

    fn len(&self) -> u64 {
        self.length
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.length))?;
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    fn restart(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.length = 0;
        Ok(())
    }

    fn set_etag(&mut self, _etag: Option<&str>) -> io::Result<()> {
        // Nothing to store: the name of the blob is the entity tag.
        Ok(())
    }

    fn verify(&mut self) -> io::Result<bool> {
        let sha256 = self.compute_sha256()?;
        let expected = &self.expected;
        let matches = expected.size.is_none_or(|size| size == self.length)
            && expected.sha256.as_ref().is_none_or(|expected| *expected == sha256);
        self.sha256 = Some(sha256);
        Ok(matches)
    }

    fn finish(mut self) -> io::Result<String> {
        let sha256 = match self.sha256.take() {
            Some(sha256) => sha256,
            None => self.compute_sha256()?,
        };
        let blob = self.expected.blob.take().unwrap_or(sha256);
        // Do not replace an existing blob: it has the same content and may be in use.
        let path = self.cache.blob(&blob);
        if !path.is_file() {
            tinkex_files::publish(&self.file, &self.path, path)?;
            self.private = false;
        } else if !self.private {
            tinkex_files::remove_file_if_exists(&self.path)?;
        }
        Ok(blob)
    }

    fn error(error: &io::Error) -> Error {
        cache_error(error)
    }
}

impl Drop for PartialBlob {
    fn drop(&mut self) {
        if self.private {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Error returned when the cache cannot be read or written.
pub(crate) fn cache_error(error: &io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot use the hub cache: {error}"))
        .with_hint("Set HF_HUB_CACHE to a folder that can be written to.")
}

/// Replaces `path` with a symbolic link atomically.
fn replace_link(target: &Path, path: &Path) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let temporary = folder.join(format!(".{}", Uuid::new_v4()));
    let replaced = symlink(target, &temporary).and_then(|()| fs::rename(&temporary, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    replaced?;
    tinkex_files::sync_folder(folder)
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_target: &Path, _link: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, TokenizerCache) {
        let folder = tempfile::tempdir().unwrap();
        let id = TokenizerId::new("org/name").unwrap();
        let cache = TokenizerCache::new(&HubCache::new(folder.path()), &id);
        (folder, cache)
    }

    fn partial(cache: &TokenizerCache, blob: &str) -> PartialBlob {
        let blob = Some(blob.to_owned());
        cache.open_partial(ExpectedContent { blob, ..ExpectedContent::default() }).unwrap()
    }

    #[test]
    fn a_downloaded_file_is_found_in_the_shared_layout() {
        let (folder, cache) = cache();
        assert!(cache.snapshot("main").is_none());
        let mut blob = partial(&cache, "e1");
        blob.append(b"{}").unwrap();
        assert_eq!(blob.finish().unwrap(), "e1");
        cache.add_to_snapshot("e1", "c0ffee", files::TOKENIZER).unwrap();
        assert!(cache.snapshot("main").is_none(), "no reference names the commit yet");
        cache.set_reference("main", "c0ffee").unwrap();
        let found = cache.snapshot("main").unwrap();
        assert!(!found.complete, "the settings were never requested");
        cache.mark_absent("c0ffee", files::CONFIG).unwrap();
        assert!(cache.snapshot("main").unwrap().complete);
        assert!(cache.snapshot("c0ffee").is_some(), "a commit is a revision too");
        let path = folder.path().join("models--org--name/snapshots/c0ffee/tokenizer.json");
        assert_eq!(fs::read(path).unwrap(), b"{}");
        let blobs = fs::read_dir(cache.folder().join("blobs")).unwrap().count();
        assert_eq!(blobs, 1, "no partial file is left");
    }

    #[test]
    fn a_reference_that_leads_out_of_the_cache_is_not_followed() {
        let (_folder, cache) = cache();
        for commit in ["..", "../../x", "", "a\\b"] {
            cache.set_reference("main", commit).unwrap();
            assert!(cache.snapshot("main").is_none(), "{commit:?}");
        }
    }

    #[test]
    fn a_partial_blob_is_resumed_later_and_not_shared_meanwhile() {
        let (_folder, cache) = cache();
        let mut first = partial(&cache, "e1");
        first.append(b"ab").unwrap();
        let second = partial(&cache, "e1");
        assert_eq!(second.len(), 0, "the first one holds the lock");
        let path = second.path.clone();
        drop(second);
        assert!(!path.exists(), "a copy that no download can resume is removed");
        drop(first);
        let mut third = partial(&cache, "e1");
        assert_eq!(third.len(), 2);
        third.append(b"c").unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(third.compute_sha256().unwrap(), abc);
    }

    #[test]
    fn size_and_checksum_are_verified() {
        let (_folder, cache) = cache();
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".to_owned();
        let expected = ExpectedContent { blob: None, size: Some(3), sha256: Some(sha256.clone()) };
        for (content, matches) in [(&b"abc"[..], true), (b"abd", false), (b"abcd", false)] {
            let mut blob = cache.open_partial(expected.clone()).unwrap();
            blob.append(content).unwrap();
            assert_eq!(blob.verify().unwrap(), matches);
            if matches {
                assert_eq!(blob.finish().unwrap(), sha256, "named after its checksum");
            }
        }
    }

    #[test]
    fn two_downloads_of_the_same_file_both_succeed() {
        let (_folder, cache) = cache();
        let mut first = partial(&cache, "e1");
        let mut second = partial(&cache, "e1");
        first.append(b"x").unwrap();
        second.append(b"x").unwrap();
        first.finish().unwrap();
        second.finish().unwrap();
        let blobs = fs::read_dir(cache.folder().join("blobs")).unwrap().count();
        assert_eq!((blobs, cache.blob("e1").is_file()), (1, true));
    }
}
