//! `cargo xtask llama`: exported GGUF files load in llama.cpp and generate what the server generates.
//!
//! `greedy.py` trains and exports models and writes what the server generates; `llama.py` compares.
//! They run in different Python environments.

use crate::conformance::{ModelServer, torch_environment};
use crate::python;
use crate::step::{XtaskError, target, tool};

const COMPARE: &str = "crates/server/tests/python/llama.py";

pub(crate) fn run() -> Result<(), XtaskError> {
    let llama = python::llama_cpp()?;
    let torch = torch_environment()?;
    let folder = target().join("llama");
    ModelServer::with_tiny_models(&torch, &folder)?.run(&torch, "greedy")?;
    tool("llama.cpp", llama, &[COMPARE]).argument(folder.join("greedy/cases.json")).run()
}
