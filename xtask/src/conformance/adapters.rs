//! `cargo xtask conformance adapters`: checks that adapters trained by the server load in `peft`
//! and compute the same numbers there. The checks are in `crates/server/tests/python/adapters.py`.

use std::path::Path;

use crate::step::{XtaskError, cargo, target, tool};
use crate::test_server::{NamedModel, TestServer};

const MAKE_MODELS: &str = "crates/server/tests/python/tiny_models.py";
const CHECKS: &str = "crates/server/tests/python/adapters.py";

/// Runs the checks with the interpreter `python`, which has the SDK, torch, transformers and peft.
pub(super) fn check(python: &Path) -> Result<(), XtaskError> {
    cargo("command line", &["build", "--locked", "--package", "tinkex-cli"]).run()?;
    let folder = target().join("conformance/adapters");
    // Downloads of an earlier run would not be replaced.
    let _ = std::fs::remove_dir_all(&folder);
    let (models, downloads) = (folder.join("models"), folder.join("downloads"));
    tool("models", python, &[MAKE_MODELS]).argument(&models).run()?;
    let server = TestServer::start(&folder.join("data"), &models_in(&models)?, true)?;
    tool("adapters", python, &[CHECKS, &server.url])
        .argument(target().join("debug/tinkex"))
        .argument(models)
        .argument(downloads)
        .run()
}

/// Returns the models in the folders of `parent`, named after their folders.
fn models_in(parent: &Path) -> Result<Vec<NamedModel>, XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot read {}: {error}", parent.display()));
    let entries = std::fs::read_dir(parent).map_err(failed)?;
    let model = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.map_err(failed)?;
        Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
    };
    entries.map(model).collect()
}
