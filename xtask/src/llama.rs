//! `cargo xtask llama`: exported GGUF files load in llama.cpp and generate what the server generates,
//! with the checkpoint that was exported and with the file as base model.
//!
//! `greedy.py` trains and exports models and writes what the server generates, `gguf_bases.py` does
//! the same for the exported files as base models, and `llama.py` compares. They run in different
//! Python environments.

use std::path::Path;

use crate::conformance::{ModelServer, TinyModels, make_tiny_models, models_in, torch_environment};
use crate::python;
use crate::step::{XtaskError, target, tool};
use crate::test_server::NamedModel;

const COMPARE: &str = "crates/server/tests/python/llama.py";

pub(crate) fn run() -> Result<(), XtaskError> {
    let llama = python::llama_cpp()?;
    let torch = torch_environment()?;
    let folder = target().join("llama");
    let models = make_tiny_models(&torch, &folder, TinyModels::AndWide)?;
    let all = models_in(&models)?;
    ModelServer::run_in_groups(&folder, &models, &all, |server| server.run(&torch, "greedy"))?;
    let files = gguf_files(&folder.join("greedy"))?;
    ModelServer::run_in_groups(&folder, &models, &files, |server| {
        server.run(&torch, "gguf_bases")
    })?;
    tool("llama.cpp", llama, &[COMPARE]).argument(folder.join("greedy/cases.json")).run()
}

/// Returns the GGUF files in a folder, each under its name without the extension.
fn gguf_files(folder: &Path) -> Result<Vec<NamedModel>, XtaskError> {
    let files = models_in(folder)?.into_iter();
    let named = |(file, path): NamedModel| Some((file.strip_suffix(".gguf")?.to_owned(), path));
    Ok(files.filter_map(named).collect())
}
