//! [`CargoTool`]: a cargo subcommand that is installed under target.

use std::path::PathBuf;

use crate::step::{XtaskError, cargo, target};

/// Cargo subcommand in one version. Other versions may read their settings differently.
pub(crate) struct CargoTool {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
}

impl CargoTool {
    /// Returns the folder of the tool. The version is in its name, so that a new version replaces
    /// an installed one.
    fn folder(&self) -> PathBuf {
        target().join(format!("tools/{}-{}", self.name, self.version))
    }

    /// Returns the path of the program, which exists if the tool is installed.
    pub(crate) fn program(&self) -> PathBuf {
        self.folder().join("bin").join(self.name)
    }

    /// Installs the tool if it is not installed, and returns the path of the program.
    pub(crate) fn install(&self) -> Result<PathBuf, XtaskError> {
        let program = self.program();
        if program.exists() {
            return Ok(program);
        }
        let folder = self.folder();
        let build = folder.join("build");
        let version = self.version;
        cargo(self.name, &["install", self.name, "--version", version, "--locked", "--debug"])
            .arguments(&["--root"])
            .argument(&folder)
            // A fixed folder, so that an interrupted build continues with its finished crates.
            .variable("CARGO_TARGET_DIR", &build)
            .run()?;
        // Its size is several hundred megabytes; a failure to remove it does no harm.
        let _ = std::fs::remove_dir_all(&build);
        Ok(program)
    }
}
