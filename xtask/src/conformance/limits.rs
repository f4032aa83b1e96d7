//! Limits of users with the official SDK: a 429 delays a program, and a spent quota ends it.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use crate::step::{XtaskError, root, target};
use crate::test_server::{MODEL, TestServer, golden_model};

const PROGRAM: &str = "crates/server/tests/python/limits.py";
/// Key of the administrator of the test server.
const KEY: &str = "tml-conformance-0123456789abcdef";

/// Runs the program against a new server with a key.
pub(super) fn check(python: &Path) -> Result<(), XtaskError> {
    println!("\n==> conformance: limits of users");
    let folder = target().join("conformance");
    std::fs::create_dir_all(&folder).map_err(|error| XtaskError::new(error.to_string()))?;
    let io = |error: std::io::Error| XtaskError::new(format!("cannot write the key: {error}"));
    let key_file = folder.join("limits.key");
    let _ = std::fs::remove_file(&key_file);
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    // The server refuses a key file that other users can read.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(&key_file).and_then(|mut file| file.write_all(KEY.as_bytes())).map_err(io)?;
    let arguments = ["--api-key-file", &key_file.display().to_string()];
    let server =
        TestServer::start_with(&folder.join("data-limits"), &[golden_model()], &arguments)?;
    let status = Command::new(python)
        .arg(root().join(PROGRAM))
        .args([&server.url, MODEL, KEY])
        .status()
        .map_err(|error| XtaskError::new(format!("cannot run {}: {error}", python.display())))?;
    if status.success() {
        return Ok(());
    }
    Err(XtaskError::new(format!("the limits of users with the SDK failed: {status}")))
}
