//! Tests of the versions of the format.

use std::path::PathBuf;

use super::*;
use crate::disk::DATABASE;
use crate::disk::tests::{append, open, open_error};

#[test]
fn other_versions_are_refused_by_name_and_unchanged() {
    for (version, reason) in [
        (2, "the data folder has format 2 of a newer version of Tinkex"),
        (0, "the data folder has format 0 of an unknown version of Tinkex"),
        (-1, "the data folder has format -1 of an unknown version of Tinkex"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        append(&mut open(folder.path()).unwrap().0, "a", b"body").unwrap();
        let connection = Connection::open(folder.path().join(DATABASE)).unwrap();
        connection.pragma_update(None, "user_version", version).unwrap();
        connection.close().unwrap();
        let content = || {
            let entries = std::fs::read_dir(folder.path()).unwrap();
            let mut files: Vec<(PathBuf, Vec<u8>)> = entries
                .map(|entry| entry.unwrap().path())
                .map(|path| (path.clone(), std::fs::read(path).unwrap()))
                .collect();
            files.sort();
            files
        };
        let before = content();
        let message = open_error(folder.path());
        let database = folder.path().join(DATABASE);
        assert!(message.contains(&database.display().to_string()), "{message}");
        assert!(message.contains(reason), "{message}");
        assert!(message.contains("this version reads format 1; use that version"), "{message}");
        assert!(content() == before, "a file has changed");
    }
}
