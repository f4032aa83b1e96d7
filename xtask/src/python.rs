//! Python virtual environments under the target folder.
//!
//! An environment is reused until its interpreter, its packages or the options that they are
//! installed with change; then it is created again.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::step::{XtaskError, target, tool};

const REQUIREMENTS: &str = "\
  Python must be 3.10 or newer and have the module venv.
  Run `cargo xtask test --without-python` to skip it in the tests.";

/// Interpreter and packages of an environment.
pub(crate) struct Packages<'a> {
    /// Python to create the environment with.
    pub(crate) interpreter: &'a str,
    /// Packages that are installed without those that they depend on.
    pub(crate) without_dependencies: &'a [&'a str],
    /// Packages with build tools, installed first. Builds from source find their programs on `PATH`.
    pub(crate) build_tools: &'a [&'a str],
    /// Options for `pip install`, for example `--no-binary`.
    pub(crate) pip_options: &'a [&'a str],
    pub(crate) names: &'a [&'a str],
}

impl<'a> Packages<'a> {
    /// Packages that are installed from wheels.
    pub(crate) const fn wheels(names: &'a [&'a str]) -> Self {
        Self {
            interpreter: "python3",
            without_dependencies: &[],
            build_tools: &[],
            pip_options: &[],
            names,
        }
    }

    /// Returns everything that decides what an environment contains, including the version of the
    /// interpreter: the packages of an environment do not work with another version.
    fn description(&self) -> Result<String, XtaskError> {
        let version = tool("Python", self.interpreter, &["--version"]).output()?;
        let description = json!({
            "interpreter": self.interpreter,
            "version": version.trim(),
            "without_dependencies": self.without_dependencies,
            "build_tools": self.build_tools,
            "pip_options": self.pip_options,
            "names": self.names,
        });
        Ok(description.to_string())
    }
}

/// Returns the Python interpreter of the environment `folder`, relative to the target folder.
///
/// Creates the environment if it does not exist or was created from another description.
pub(crate) fn environment(folder: &Path, packages: &Packages<'_>) -> Result<PathBuf, XtaskError> {
    create(folder, packages).map_err(|failure| {
        let interpreter = packages.interpreter;
        let needs = format!("This command needs {interpreter} and a package registry.");
        XtaskError::new(format!("{failure}\n  {needs}\n{REQUIREMENTS}"))
    })
}

/// Returns a Python interpreter with llama.cpp, which is built from source for this CPU.
pub(crate) fn llama_cpp() -> Result<PathBuf, XtaskError> {
    let packages = Packages {
        build_tools: &["cmake", "ninja"],
        pip_options: &["--no-binary", "llama-cpp-python"],
        ..Packages::wheels(&["llama-cpp-python[server]", "gguf", "numpy"])
    };
    environment(Path::new("bench-llama"), &packages)
}

fn create(folder: &Path, packages: &Packages<'_>) -> Result<PathBuf, XtaskError> {
    let folder = target().join(folder);
    let bin = folder.join(if cfg!(windows) { "Scripts" } else { "bin" });
    let python = bin.join("python");
    // The marker is written last. An environment without it is incomplete and is created again.
    let marker = folder.join("installed-packages");
    let installed = packages.description()?;
    if std::fs::read_to_string(&marker).is_ok_and(|found| found == installed) {
        return Ok(python);
    }
    let venv = ["-m", "venv", "--clear"];
    tool("Python environment", packages.interpreter, &venv).argument(&folder).run()?;
    let pip = || tool("Python packages", &python, &["-m", "pip", "install", "--quiet"]);
    if !packages.build_tools.is_empty() {
        pip().arguments(packages.build_tools).run()?;
    }
    #[expect(clippy::disallowed_methods, reason = "extended for the child process")]
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path)))
        .map_err(|error| XtaskError::new(format!("cannot extend PATH: {error}")))?;
    pip().arguments(packages.pip_options).arguments(packages.names).variable("PATH", path).run()?;
    for package in packages.without_dependencies {
        pip().arguments(&["--no-deps", package]).run()?;
    }
    std::fs::write(&marker, installed)
        .map_err(|error| XtaskError::new(format!("cannot write {}: {error}", marker.display())))?;
    Ok(python)
}
