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
    let server = ModelServer::with_tiny_models(python, &folder)?;
    server.run(python, "adapters")?;
    server.run(python, "imports")?;
    server.run(python, "exports")?;
    let variants = folder.join("variants");
    script("model_variants", python).argument(&server.models).argument(&variants).run()?;
    // The next servers use the same data folder.
    drop(server);
    let all = models_in(&variants)?;
    ModelServer::run_in_groups(&folder, &variants, &all, |server| server.run(python, "folders"))
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
    /// Starts a server with small models of all supported architectures. Everything is written into
    /// `folder`.
    fn with_tiny_models(python: &Path, folder: &Path) -> Result<Self, XtaskError> {
        let models = make_tiny_models(python, folder, TinyModels::Only)?;
        let all = models_in(&models)?;
        Self::start(folder.to_owned(), models, &all)
    }

    /// Calls `run` with servers that together serve `all`. `folder` and `models` are as for
    /// [`start`](Self::start).
    pub(crate) fn run_in_groups(
        folder: &Path,
        models: &Path,
        all: &[NamedModel],
        run: impl Fn(&Self) -> Result<(), XtaskError>,
    ) -> Result<(), XtaskError> {
        for some in all.chunks(MODELS_PER_SERVER) {
            run(&Self::start(folder.to_owned(), models.to_owned(), some)?)?;
        }
        Ok(())
    }

    /// Starts a server with the models `some`. Programs compare with those in the folder `models`,
    /// and write into `folder`.
    fn start(folder: PathBuf, models: PathBuf, some: &[NamedModel]) -> Result<Self, XtaskError> {
        let server = TestServer::start(&folder.join("data"), some, true)?;
        Ok(Self { server, folder, models })
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

/// Builds the programs, and makes small models of all supported architectures. Everything is written
/// into `folder`. Returns the folder of the models.
pub(crate) fn make_tiny_models(
    python: &Path,
    folder: &Path,
    kinds: TinyModels,
) -> Result<PathBuf, XtaskError> {
    TestServer::build()?;
    cargo("command line", &["build", "--locked", "--package", "tinkex-cli"]).run()?;
    // Files of an earlier run must not be compared, and would not be replaced.
    let _ = std::fs::remove_dir_all(folder);
    let models = folder.join("models");
    let wide: &[&str] = if kinds == TinyModels::AndWide { &["wide"] } else { &[] };
    script("tiny_models", python).argument(&models).arguments(wide).run()?;
    Ok(models)
}

/// Creates a step that runs the Python program `name`.
pub(super) fn script(name: &'static str, python: &Path) -> Step {
    tool(name, python, &[&format!("crates/server/tests/python/{name}.py")])
        // The programs import each other. Keep compiled files out of the source folder.
        .variable("PYTHONDONTWRITEBYTECODE", "1")
}

/// Returns the models in the folder `parent`, each under the name of its folder, in their order.
pub(crate) fn models_in(parent: &Path) -> Result<Vec<NamedModel>, XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot read {}: {error}", parent.display()));
    let entries = std::fs::read_dir(parent).map_err(failed)?;
    let model = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.map_err(failed)?;
        Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
    };
    let mut models: Vec<NamedModel> = entries.map(model).collect::<Result<_, _>>()?;
    models.sort();
    Ok(models)
}
