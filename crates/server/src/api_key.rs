//! The API key that a server creates for itself: see
//! [`ServerOptions::create_api_key`](crate::ServerOptions::create_api_key).

use std::io;
use std::path::{Path, PathBuf};

use tinkex_files::{create_private_file, read_private_file};
use tinkex_wire::Secret;

use crate::start_error::StartError;

/// Minimum and maximum length of the key in the file, in bytes.
const KEY_LENGTH: std::ops::RangeInclusive<usize> = 20..=200;

/// Returns the path of the file that has the API key of a server with
/// [`ServerOptions::create_api_key`](crate::ServerOptions::create_api_key): `key` in its data
/// folder.
#[must_use]
pub fn api_key_file(data_dir: impl AsRef<Path>) -> PathBuf {
    data_dir.as_ref().join("key")
}

/// Reads the API key of a file that only this user can access, such as [`api_key_file`].
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] if other users can access the file or if it belongs to
/// another user, [`io::ErrorKind::InvalidData`] if it is a symbolic link or does not contain a key,
/// [`io::ErrorKind::NotFound`] if it does not exist.
pub fn read_api_key(path: impl AsRef<Path>) -> io::Result<Secret> {
    // A line break may follow the key.
    let text = read_private_file(path, *KEY_LENGTH.end() as u64 + 2)?;
    let key = text.trim_ascii();
    let valid = key.starts_with(b"tml-") && key.iter().all(u8::is_ascii_graphic);
    match std::str::from_utf8(key) {
        Ok(key) if valid && KEY_LENGTH.contains(&key.len()) => Ok(Secret::from(key.to_owned())),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "expected a key of {} to {} characters that starts with tml-",
                KEY_LENGTH.start(),
                KEY_LENGTH.end()
            ),
        )),
    }
}

/// Reads the API key in the data folder, or creates it. The caller holds the lock of the folder.
pub(crate) fn read_or_create(data_dir: &Path) -> Result<Secret, StartError> {
    let path = api_key_file(data_dir);
    let key = match read_api_key(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Each UUID has 122 random bits of the operating system.
            let random = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].map(uuid::Uuid::simple);
            let key = format!("tml-{}{}", random[0], random[1]);
            create_private_file(&path, format!("{key}\n")).map(|()| Secret::from(key))
        }
        read => read,
    };
    key.map_err(|source| StartError::ApiKeyFile { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_created_once_for_each_folder() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [key, other] = folders.each_ref().map(|folder| read_or_create(folder.path()).unwrap());
        assert!(key.expose().starts_with("tml-") && key.expose().len() == 68);
        assert_ne!(key.expose(), other.expose());
        assert_eq!(read_or_create(folders[0].path()).unwrap().expose(), key.expose());
        let text = std::fs::read_to_string(api_key_file(folders[0].path())).unwrap();
        assert_eq!(text.trim_end(), key.expose(), "`cat` prints the key");
    }

    #[test]
    fn a_file_without_a_key_is_refused_and_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = api_key_file(folder.path());
        for text in ["", "secret-0123456789abcdef0123", "tml-short", "tml-0123456789 0123456789"] {
            create_private_file(&path, text).unwrap();
            let error = read_or_create(folder.path()).unwrap_err().to_string();
            assert!(error.contains("expected a key of 20 to 200 characters"), "{error}");
            assert!(!error.contains("0123456789"), "{error}");
            std::fs::remove_file(&path).unwrap();
        }
    }
}
