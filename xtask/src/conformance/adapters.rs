//! The step `adapters`: adapters that the server trained or imported, exported models, and model
//! folders in many forms compute the same in `peft`, `transformers` and the server. The checks are in
//! `crates/server/tests/python`.

use std::path::{Path, PathBuf};

use crate::step::{Step, XtaskError, cargo, target, tool};
use crate::test_server::{NamedModel, TestServer};

/// Number of model folders that one server serves. A loaded model reserves a gigabyte of address space
/// for its KV cache.
const MODELS_PER_SERVER: usize = 6;

/// Runs the checks with the interpreter `python`, which has the SDK, torch, transformers and peft.
pub(super) fn check(python: &Path) -> Result<(), XtaskError> {
    let folder = target().join("conformance/adapters");
    let server = ModelServer::with_tiny_models(python, &folder, TinyModels::Only)?;
    server.run(python, "adapters")?;
    server.run(python, "imports")?;
    server.run(python, "exports")?;
    let variants = folder.join("variants");
    script("model_variants", python).argument(&server.models).argument(&variants).run()?;
    // The next servers use the same data folder.
    drop(server);
    for models in models_in(&variants)?.chunks(MODELS_PER_SERVER) {
        ModelServer::start(folder.clone(), variants.clone(), models)?.run(python, "folders")?;
    }
    Ok(())
}

/// Models that `tiny_models.py` makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TinyModels {
    /// Models with rows of less than 256 weights.
    Only,
    /// Also models with rows of whole blocks of 256 weights.
    AndWide,
}

/// Server with models of one folder.
pub(crate) struct ModelServer {
    server: TestServer,
    folder: PathBuf,
    models: PathBuf,
}

impl ModelServer {
    /// Builds the programs, and starts a server with small models of all supported architectures.
    /// Everything is written into `folder`.
    pub(crate) fn with_tiny_models(
        python: &Path,
        folder: &Path,
        kinds: TinyModels,
    ) -> Result<Self, XtaskError> {
        TestServer::build()?;
        cargo("command line", &["build", "--locked", "--package", "tinkex-cli"]).run()?;
        // Files of an earlier run must not be compared, and would not be replaced.
        let _ = std::fs::remove_dir_all(folder);
        let models = folder.join("models");
        let wide: &[&str] = if kinds == TinyModels::AndWide { &["wide"] } else { &[] };
        script("tiny_models", python).argument(&models).arguments(wide).run()?;
        let all = models_in(&models)?;
        Self::start(folder.to_owned(), models, &all)
    }

    /// Starts a server with some of the models in the folder `models`.
    fn start(folder: PathBuf, models: PathBuf, some: &[NamedModel]) -> Result<Self, XtaskError> {
        let server = TestServer::start(&folder.join("data"), some, true)?;
        Ok(Self { server, folder, models })
    }

    /// Stops this server and calls `run` with servers of all files in the folder `files` that have
    /// the extension `extension`. Each file is served under its name without the extension.
    pub(crate) fn serve_files(
        self,
        files: &Path,
        extension: &str,
        run: impl Fn(&Self) -> Result<(), XtaskError>,
    ) -> Result<(), XtaskError> {
        let Self { server, folder, models } = self;
        // The next servers use the same data folder.
        drop(server);
        let has_extension = |path: &Path| path.extension().is_some_and(|end| end == extension);
        let name =
            |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let all: Vec<NamedModel> = models_in(files)?
            .into_iter()
            .filter(|(_, path)| has_extension(path))
            .map(|(_, path)| (name(&path), path))
            .collect();
        for some in all.chunks(MODELS_PER_SERVER) {
            run(&Self::start(folder.clone(), models.clone(), some)?)?;
        }
        Ok(())
    }

    /// Runs the Python program `name`, which writes into a folder of that name.
    pub(crate) fn run(&self, python: &Path, name: &'static str) -> Result<(), XtaskError> {
        script(name, python)
            .argument(&self.server.url)
            .argument(target().join("debug/tinkex"))
            .argument(&self.models)
            .argument(self.folder.join(name))
            .run()
    }
}

/// Creates a step that runs the Python program `name`.
pub(super) fn script(name: &'static str, python: &Path) -> Step {
    tool(name, python, &[&format!("crates/server/tests/python/{name}.py")])
        // The programs import each other. Keep compiled files out of the source folder.
        .variable("PYTHONDONTWRITEBYTECODE", "1")
}

/// Returns the models in the folder `parent`, each under the name of its folder.
fn models_in(parent: &Path) -> Result<Vec<NamedModel>, XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot read {}: {error}", parent.display()));
    let entries = std::fs::read_dir(parent).map_err(failed)?;
    let model = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.map_err(failed)?;
        Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
    };
    entries.map(model).collect()
}
