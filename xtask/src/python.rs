//! Python environments under `target`, made once and again when what they hold changes.

use std::path::{Path, PathBuf};

use crate::step::{Failure, target, tool};

/// What to do without Python.
const WITHOUT: &str = "\
  this needs python3 (3.10 or newer, with its venv module) and a package registry;
  `cargo xtask test --without-python` leaves it out";

/// The Python of an environment in a folder of `target` that has these packages.
pub(crate) fn environment(folder: &Path, packages: &[&str]) -> Result<PathBuf, Failure> {
    make(folder, packages).map_err(|failure| Failure::new(format!("{failure}\n{WITHOUT}")))
}

fn make(folder: &Path, packages: &[&str]) -> Result<PathBuf, Failure> {
    let folder = target().join(folder);
    let python = folder.join("bin").join("python");
    // Written last, so that half an installation is not taken for one.
    let marker = folder.join("holds");
    let holds = packages.join("\n");
    if std::fs::read_to_string(&marker).is_ok_and(|found| found == holds) {
        return Ok(python);
    }
    tool("a Python environment", "python3", &["-m", "venv", "--clear"]).argument(&folder).run()?;
    tool("Python packages", &python, &["-m", "pip", "install", "--quiet"])
        .arguments(packages)
        .run()?;
    std::fs::write(&marker, holds)
        .map_err(|why| Failure::new(format!("{}: {why}", marker.display())))?;
    Ok(python)
}
