//! Python virtual environments under the target folder.
//!
//! An environment is reused until its list of packages changes; then it is created again.

use std::path::{Path, PathBuf};

use crate::step::{XtaskError, target, tool};

const REQUIREMENTS: &str = "\
  This command needs python3 (3.10 or newer, with the venv module) and a package registry.
  Run `cargo xtask test --without-python` to skip it in the tests.";

/// Packages of an environment.
pub(crate) struct Packages<'a> {
    /// Packages with build tools, installed first. Builds from source find their programs on `PATH`.
    pub(crate) build_tools: &'a [&'a str],
    /// Options for `pip install`, for example `--no-binary`.
    pub(crate) pip_options: &'a [&'a str],
    pub(crate) names: &'a [&'a str],
}

impl<'a> Packages<'a> {
    /// Packages that are installed from wheels.
    pub(crate) const fn wheels(names: &'a [&'a str]) -> Self {
        Self { build_tools: &[], pip_options: &[], names }
    }
}

/// Returns the Python interpreter of the environment `folder`, relative to the target folder.
///
/// Creates the environment if it does not exist or has other packages.
pub(crate) fn environment(folder: &Path, packages: &Packages<'_>) -> Result<PathBuf, XtaskError> {
    create(folder, packages)
        .map_err(|failure| XtaskError::new(format!("{failure}\n{REQUIREMENTS}")))
}

fn create(folder: &Path, packages: &Packages<'_>) -> Result<PathBuf, XtaskError> {
    let folder = target().join(folder);
    let bin = folder.join("bin");
    let python = bin.join("python");
    // The marker is written last. An environment without it is incomplete and is created again.
    let marker = folder.join("installed-packages");
    let installed = packages.names.join("\n");
    if std::fs::read_to_string(&marker).is_ok_and(|found| found == installed) {
        return Ok(python);
    }
    tool("Python environment", "python3", &["-m", "venv", "--clear"]).argument(&folder).run()?;
    let pip = || tool("Python packages", &python, &["-m", "pip", "install", "--quiet"]);
    if !packages.build_tools.is_empty() {
        pip().arguments(packages.build_tools).run()?;
    }
    #[expect(clippy::disallowed_methods, reason = "extended for the child process")]
    let path = std::env::var("PATH").unwrap_or_default();
    pip()
        .arguments(packages.pip_options)
        .arguments(packages.names)
        .variable("PATH", &format!("{}:{path}", bin.display()))
        .run()?;
    std::fs::write(&marker, installed)
        .map_err(|error| XtaskError::new(format!("cannot write {}: {error}", marker.display())))?;
    Ok(python)
}
