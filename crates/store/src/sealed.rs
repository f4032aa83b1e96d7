//! Sealed files and folders: their names end with a digest of their content.
//!
//! The records of checkpoints, snapshots and sampling sessions, and the requests that load weights,
//! refer to a folder by its name. Because the name contains the digest, every reference can verify
//! the content, and a folder can be verified without the database. A name without a digest, from a
//! folder of Tinkex before the digests, is not verified.
//!
//! Write the file or folder under a plain name and [`seal`] it. Store the name that [`seal`]
//! returns, and [`verify`] the path before each use.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tinkex_files::{FileOperation, announce};

/// Separates the plain name from the digest.
const SEPARATOR: char = '~';
/// Number of hexadecimal digits of a digest: 128 bits of SHA-256.
const DIGITS: usize = 32;
/// Size of the buffer for reading files, in bytes.
const BUFFER: usize = 1 << 18;

/// Renames the file or folder at `path`, whose files are durable, so that its name ends with the
/// digest of its content. `on_digest` receives the new name before the rename. Returns the new name.
///
/// # Errors
/// If the content cannot be read, or if the rename fails. The file or folder then has its old name,
/// unless only the flush of the parent folder failed.
pub fn seal(path: &Path, on_digest: impl FnOnce(&str)) -> io::Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no file name"))?;
    let sealed = format!("{name}{SEPARATOR}{}", digest(path)?);
    on_digest(&sealed);
    let target = path.with_file_name(&sealed);
    if path.is_dir() {
        tinkex_files::replace_folder(path, target)?;
    } else {
        tinkex_files::publish(&File::open(path)?, path, target)?;
    }
    Ok(sealed)
}

/// Verifies that the content of the file or folder at `path` matches the digest in its name.
///
/// # Errors
/// `InvalidData` if the content does not match, or the error of reading the content. The message
/// does not contain the path.
pub fn verify(path: &Path) -> io::Result<()> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match digest_of_name(name) {
        Some(expected) if digest(path)? != expected => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the stored files are damaged: they do not match their digest",
        )),
        _ => Ok(()),
    }
}

/// Returns the digest in the name of a sealed file or folder; `None` if it is not sealed.
#[must_use]
pub fn digest_of_name(name: &str) -> Option<&str> {
    let (_, digest) = name.rsplit_once(SEPARATOR)?;
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (digest.len() == DIGITS && digest.bytes().all(is_digit)).then_some(digest)
}

/// Computes the digest of a file, or of the names and contents of all files of a folder. Names that
/// start with a dot are ignored: file managers add such files.
fn digest(path: &Path) -> io::Result<String> {
    announce(FileOperation::Read(path))?;
    let mut hash = Sha256::new();
    if path.is_dir() {
        let mut files: Vec<(String, PathBuf)> = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.starts_with('.') {
                files.push((name, entry.path()));
            }
        }
        files.sort();
        for (name, file) in files {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update(digest_of_file(&file)?);
        }
    } else {
        hash.update(digest_of_file(path)?);
    }
    let digest = hash.finalize();
    Ok(digest.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(DIGITS).map(hex).collect())
}

fn digest_of_file(path: &Path) -> io::Result<[u8; 32]> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().into()),
            read => hash.update(&buffer[..read]),
        }
    }
}

fn hex(digit: u8) -> char {
    char::from_digit(u32::from(digit), 16).unwrap_or('0')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(path: &Path, files: &[(&str, &[u8])]) {
        fs::create_dir(path).unwrap();
        for (name, content) in files {
            fs::write(path.join(name), content).unwrap();
        }
    }

    #[test]
    fn every_change_of_a_sealed_folder_is_found() {
        let root = tempfile::tempdir().unwrap();
        let plain = root.path().join("snapshot-1");
        folder_with(&plain, &[("adapter", &[7; 5000]), ("optimizer", b"state")]);
        let mut announced = None;
        let name = seal(&plain, |name| announced = Some(name.to_owned())).unwrap();
        assert_eq!(announced.as_ref(), Some(&name));
        assert!(name.starts_with("snapshot-1~") && digest_of_name(&name).is_some(), "{name}");
        assert!(!plain.exists());
        let sealed = root.path().join(&name);
        verify(&sealed).unwrap();
        fs::write(sealed.join(".DS_Store"), "").unwrap();
        verify(&sealed).unwrap();

        let original = fs::read(sealed.join("adapter")).unwrap();
        let mut flipped = original.clone();
        flipped[4096] ^= 1;
        let changes: [&dyn Fn(); 4] = [
            &|| fs::write(sealed.join("adapter"), &flipped).unwrap(),
            &|| fs::write(sealed.join("adapter"), &original[1..]).unwrap(),
            &|| fs::rename(sealed.join("adapter"), sealed.join("renamed")).unwrap(),
            &|| fs::write(sealed.join("added"), "").unwrap(),
        ];
        for (n, change) in changes.into_iter().enumerate() {
            change();
            let error = verify(&sealed).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{n}: {error}");
            assert!(!error.to_string().contains(&name), "{error}");
            for name in ["renamed", "added"] {
                let _ = fs::remove_file(sealed.join(name));
            }
            fs::write(sealed.join("adapter"), &original).unwrap();
            verify(&sealed).unwrap();
        }
        fs::remove_dir_all(&sealed).unwrap();
        assert_eq!(verify(&sealed).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_is_sealed_and_a_name_without_a_digest_is_not_verified() {
        let root = tempfile::tempdir().unwrap();
        let plain = root.path().join("progress");
        fs::write(&plain, "content").unwrap();
        verify(&plain).unwrap();
        let sealed = root.path().join(seal(&plain, |_| {}).unwrap());
        verify(&sealed).unwrap();
        fs::write(&sealed, "Content").unwrap();
        verify(&sealed).unwrap_err();
        for name in ["a", "a~", "a~12", "a~0123456789abcdef0123456789abcdeF"] {
            assert_eq!(digest_of_name(name), None, "{name}");
        }
    }
}
