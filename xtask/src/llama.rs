//! `cargo xtask llama`: exported GGUF files load in llama.cpp and generate what the server generates,
//! with the checkpoint that was exported and with the file as base model.
//!
//! `greedy.py` trains and exports models and writes what the server generates, `gguf_bases.py` does
//! the same for the exported files as base models, and `llama.py` compares. They run in different
//! Python environments.

use crate::conformance::{ModelServer, TinyModels, torch_environment};
use crate::python;
use crate::step::{XtaskError, target, tool};

const COMPARE: &str = "crates/server/tests/python/llama.py";

pub(crate) fn run() -> Result<(), XtaskError> {
    let llama = python::llama_cpp()?;
    let torch = torch_environment()?;
    let folder = target().join("llama");
    let server = ModelServer::with_tiny_models(&torch, &folder, TinyModels::AndWide)?;
    server.run(&torch, "greedy")?;
    server
        .serve_files(&folder.join("greedy"), "gguf", |server| server.run(&torch, "gguf_bases"))?;
    tool("llama.cpp", llama, &[COMPARE]).argument(folder.join("greedy/cases.json")).run()
}
