//! `cargo xtask cluster upstreams`: one gateway in front of two SkyRL servers, with different models
//! and with the same one, of which one is killed and started again.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::step::XtaskError;

use super::gateway::Gateway;
use super::http;
use super::kills::{Running, TrainingProgram, compare};
use super::sdk::SdkPrograms;
use super::server::{SkyrlServer, SkyrlSettings};

/// Metric that reports whether an upstream responds.
const UP: &str = "tinkex_upstream_up";
/// Time in which the gateway notices that an upstream is down or responds again.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of steps after which an upstream is killed.
const STEPS_BEFORE_KILL: usize = 15;

/// Two servers with the models of the folders `models`, and a gateway in front of them.
struct Pair {
    a: SkyrlServer,
    b: SkyrlServer,
    gateway: Gateway,
    ports: [u16; 2],
}

impl Pair {
    fn start(
        name: &str,
        version: &'static str,
        ports: [u16; 3],
        models: [PathBuf; 2],
    ) -> Result<Self, XtaskError> {
        let [port_a, port_b, port] = ports;
        let [model_a, model_b] = models;
        let a = SkyrlServer::start(SkyrlSettings { version, port: port_a, model: model_a })?;
        let b = SkyrlServer::start(SkyrlSettings { version, port: port_b, model: model_b })?;
        let upstreams = [format!("a={}", a.url()), format!("b={}", b.url())];
        let gateway = Gateway::start(name, port, &upstreams)?;
        let pair = Self { a, b, gateway, ports: [port_a, port_b] };
        pair.wait_until_up("a", 1.0)?;
        pair.wait_until_up("b", 1.0)?;
        Ok(pair)
    }

    /// Waits until the gateway reports whether an upstream responds.
    fn wait_until_up(&self, upstream: &str, up: f64) -> Result<(), XtaskError> {
        let start = Instant::now();
        let label = format!("upstream=\"{upstream}\"");
        while start.elapsed() < NOTICE_TIMEOUT {
            if self.gateway.metric(UP, &label) == Some(up) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let seconds = NOTICE_TIMEOUT.as_secs();
        Err(self.failed(&format!("{UP}{{{label}}} was not {up} within {seconds} s")))
    }

    /// Returns the numbers of models that both servers have created.
    fn created(&self) -> [usize; 2] {
        self.ports.map(|port| {
            let runs = http::get(port, "/api/v1/training_runs?limit=100").unwrap_or_default();
            runs.matches("\"training_run_id\"").count()
        })
    }

    fn failed(&self, cause: &str) -> XtaskError {
        XtaskError::new(format!("{cause}\n  log: {}", self.gateway.log_path()))
    }
}

/// Trains on two models at once, kills the server of one, and starts it again: the other run is not
/// affected, and both have the numbers of an undisturbed run.
pub(super) fn different_models(
    version: &'static str,
    ports: [u16; 3],
    models: [PathBuf; 2],
    sdk: &SdkPrograms,
) -> Result<String, XtaskError> {
    let mut pair = Pair::start("different-models", version, ports, models)?;
    let url = pair.gateway.url().to_owned();
    let model_a = pair.a.model();
    let model_b = pair.b.model();
    let capabilities = http::get(ports[2], "/api/v1/get_server_capabilities").unwrap_or_default();
    if [&model_a, &model_b].iter().any(|model| !capabilities.contains(model.as_str())) {
        return Err(pair.failed(&format!("a model is not listed: {capabilities}")));
    }
    let start =
        |name: &str, model: &str| Running::start(TrainingProgram::Sdk(sdk), name, &url, model);
    let expected = start("undisturbed", &model_a)?.finish()?;
    let before = pair.created();
    let on_a = start("a", &model_a)?;
    let mut on_b = start("b", &model_b)?;
    on_b.wait_for(STEPS_BEFORE_KILL)?;
    pair.b.kill();
    pair.wait_until_up("b", 0.0)?;
    compare(&on_a.finish()?, &expected)?;
    let after = pair.created();
    pair.b.start_again()?;
    pair.wait_until_up("b", 1.0)?;
    // Both servers have the same weights under different names.
    compare(&on_b.finish()?, &expected)?;
    Ok(format!(
        "two runs at once; SkyRL b killed: a finished meanwhile, b afterwards, all losses equal; \
         models created on a: {}",
        after[0] - before[0]
    ))
}

/// Trains twice at once on two servers with the same model: each server gets a run. Kills one server
/// and starts it again.
pub(super) fn same_model(
    version: &'static str,
    ports: [u16; 3],
    model: &std::path::Path,
    sdk: &SdkPrograms,
) -> Result<String, XtaskError> {
    let models = [model.to_owned(), model.to_owned()];
    let mut pair = Pair::start("same-model", version, ports, models)?;
    let url = pair.gateway.url().to_owned();
    let name = pair.a.model();
    let start = |run: &str| Running::start(TrainingProgram::Sdk(sdk), run, &url, &name);
    let mut first = start("first")?;
    first.wait_for(1)?;
    let mut second = start("second")?;
    second.wait_for(STEPS_BEFORE_KILL)?;
    let created = pair.created();
    if created.contains(&0) {
        return Err(pair.failed(&format!("one server got both runs: models {created:?}")));
    }
    pair.b.kill();
    pair.wait_until_up("b", 0.0)?;
    // New runs go to the server that responds.
    let third = start("third")?.finish()?;
    pair.b.start_again()?;
    pair.wait_until_up("b", 1.0)?;
    compare(&first.finish()?, &third)?;
    compare(&second.finish()?, &third)?;
    Ok("runs shared by load; SkyRL b killed: a new run went to a, all losses equal".to_owned())
}
