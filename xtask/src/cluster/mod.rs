//! `cargo xtask cluster`: checks the client, the command line and the gateway against SkyRL's own
//! server.
//!
//! Installs SkyRL from PyPI into `target/cluster`, starts it on a loopback address with its JAX
//! backend on the CPU, and runs the checks against it directly and through `tinkex serve
//! --upstream`. [`kills`] and [`upstreams`] kill processes.

mod gateway;
mod http;
mod kills;
mod model;
mod program;
mod sdk;
mod server;
mod upstreams;

use std::time::Instant;

use clap::{Args, Subcommand};

use crate::contract;
use crate::step::{XtaskError, cargo, ignored_test, target};

use gateway::Gateway;
use program::Program;
use sdk::SdkPrograms;
use server::{SkyrlServer, SkyrlSettings};

/// Release of SkyRL to check, and the port of its server.
struct Release {
    version: &'static str,
    port: u16,
    /// What the official SDK completes without a gateway, before it fails.
    sdk_completes: &'static str,
    /// Number of runs at once whose losses do not depend on each other. 0.3.0 computes the passes
    /// of all models in one batch.
    at_once: usize,
}

/// Releases to check. `--record` records the exchanges of the first.
const RELEASES: [Release; 2] = [
    Release { version: "0.4.0", port: 8391, sdk_completes: "train → save", at_once: 5 },
    Release { version: "0.3.0", port: 8392, sdk_completes: "", at_once: 1 },
];
/// Port of a second server.
const SECOND_PORT: u16 = 8393;
/// Port of the gateway. Further gateways have the next ports.
const GATEWAY_PORT: u16 = 8394;

/// Check that fails, and why.
type Difference = (&'static str, &'static str);

/// Checks of the contract suite that SkyRL fails without a gateway.
const DIRECT_DIFFERENCES: &[Difference] = &[
    ("every_documented_loss_runs", "there is no loss `dro`"),
    ("the_most_likely_tokens_are_reported", "the JAX backend has no top-k log-probabilities"),
    (
        "saved_weights_can_be_sampled",
        "the JAX backend loads a sampled checkpoint into the model in training",
    ),
    ("invalid_samples_are_rejected", "token ids outside the vocabulary are accepted"),
    ("missing_objects_are_not_found", "a missing model or checkpoint fails at the first sample"),
];

/// Checks of the contract suite that fail through the gateway: what the upstream cannot compute.
const GATEWAY_DIFFERENCES: &[Difference] = &[
    ("every_documented_loss_runs", "there is no loss `dro`"),
    ("the_most_likely_tokens_are_reported", "the JAX backend has no top-k log-probabilities"),
];

/// Checks of the conformance suite that fail through the gateway.
const CONFORMANCE_DIFFERENCES: &[Difference] = &[
    ("every_loss_runs", "there is no loss `dro`, and `gspo` not in the JAX backend"),
    ("prompt_logprobs_are_returned", "the JAX backend has no top-k log-probabilities"),
    ("every_sampling_option_is_accepted", "the JAX backend has no top-k log-probabilities"),
    ("both_optimizers_work", "there is no optimizer Dimuon"),
];

/// Arguments of `cargo xtask cluster`.
#[derive(Args)]
pub(crate) struct ClusterArgs {
    /// Checks that kill servers, instead of the others.
    #[command(subcommand)]
    killing: Option<KillingChecks>,
    /// Check one release of SkyRL only
    #[arg(long, value_name = "VERSION", value_parser = ["0.4.0", "0.3.0"], global = true)]
    skyrl: Option<String>,
    /// Run the checks without the gateway only
    #[arg(long, conflicts_with = "gateway")]
    direct: bool,
    /// Run the checks through the gateway only
    #[arg(long)]
    gateway: bool,
    /// Run only the checks whose names contain this text; repeatable
    #[arg(long = "check", value_name = "NAME", global = true)]
    checks: Vec<String>,
    /// Record the exchanges that the tests replay; needs SkyRL 0.4.0
    #[arg(long)]
    record: bool,
}

/// Checks that kill servers.
#[derive(Subcommand)]
enum KillingChecks {
    /// Train while the gateway or SkyRL is killed, and compare losses
    Kills {
        /// Number of runs in which the gateway is killed; SkyRL is killed in half as many
        #[arg(long, value_name = "N", default_value_t = 10)]
        seeds: u64,
    },
    /// Train through one gateway on two servers, of which the second is killed
    Upstreams,
}

impl ClusterArgs {
    fn releases(&self) -> impl Iterator<Item = &'static Release> {
        let selected = |release: &&Release| {
            self.skyrl.as_ref().is_none_or(|version| version == release.version)
        };
        RELEASES.iter().filter(selected)
    }
}

/// Rows of the final table.
struct Table {
    rows: Vec<String>,
    failures: usize,
    /// Parts of the names of the checks to run; empty for all checks.
    checks: Vec<String>,
}

impl Table {
    fn new(checks: Vec<String>) -> Self {
        Self { rows: Vec::new(), failures: 0, checks }
    }

    /// Runs a check and adds a row with its result and its time. A check that fails does not end
    /// the command: the others run, too.
    fn check(
        &mut self,
        release: &str,
        server: &str,
        name: &str,
        run: impl FnOnce() -> Result<String, XtaskError>,
    ) {
        if !self.checks.is_empty() && !self.checks.iter().any(|part| name.contains(part)) {
            return;
        }
        let start = Instant::now();
        let result = run();
        let seconds = start.elapsed().as_secs_f64();
        let result = result.unwrap_or_else(|error| {
            println!("    {error}");
            self.failures += 1;
            "FAILED".to_owned()
        });
        println!("    {name}: {result} ({seconds:.0} s)");
        self.rows.push(format!("| {release} | {server} | {name} | {result} | {seconds:.0} |"));
    }

    /// Prints the table.
    ///
    /// # Errors
    /// If a check has failed, or there was none.
    fn finish(&self) -> Result<(), XtaskError> {
        println!("\n| SkyRL | Through | Check | Result | Seconds |\n|---|---|---|---|---|");
        for row in &self.rows {
            println!("{row}");
        }
        match (self.rows.len(), self.failures) {
            (0, _) => {
                let names = self.checks.join(", ");
                Err(XtaskError::new(format!("cluster: there is no check {names}")))
            }
            (_, 0) => Ok(()),
            (checks, failures) => {
                Err(XtaskError::new(format!("cluster: {failures} of {checks} checks failed")))
            }
        }
    }
}

pub(crate) fn run(args: &ClusterArgs) -> Result<(), XtaskError> {
    if args.record && !args.releases().any(|release| release.version == RELEASES[0].version) {
        return Err(XtaskError::new("cluster: --record needs SkyRL 0.4.0"));
    }
    cargo("command line", &["build", "--locked", "--package", "tinkex-cli"]).run()?;
    let sdk = SdkPrograms::install()?;
    let mut table = Table::new(args.checks.clone());
    for release in args.releases() {
        match args.killing {
            Some(KillingChecks::Kills { seeds }) => check_kills(release, seeds, &sdk, &mut table)?,
            Some(KillingChecks::Upstreams) => check_upstreams(release, &sdk, &mut table)?,
            None => check_all(release, args, &sdk, &mut table)?,
        }
    }
    let finished = table.finish();
    if args.killing.is_none() {
        print_differences("Contract suite, directly", DIRECT_DIFFERENCES);
        print_differences("Contract suite, through the gateway", GATEWAY_DIFFERENCES);
        print_differences("Conformance, through the gateway", CONFORMANCE_DIFFERENCES);
    }
    println!("\nLogs and environments: {}", target().join("cluster").display());
    finished
}

/// Starts a server with the small model.
fn start_server(release: &Release) -> Result<SkyrlServer, XtaskError> {
    let Release { version, port, .. } = *release;
    SkyrlServer::start(SkyrlSettings { version, port, model: model::create("tiny")? })
}

/// Runs all checks that kill no server.
fn check_all(
    release: &Release,
    args: &ClusterArgs,
    sdk: &SdkPrograms,
    table: &mut Table,
) -> Result<(), XtaskError> {
    let server = start_server(release)?;
    if !args.gateway {
        check_directly(&server, release, sdk, table)?;
    }
    if args.record && release.version == RELEASES[0].version {
        let test = "recorded_server::record_skyrl_0_4";
        ignored_test("recording", "tinkex", test, &["--all-features"])?
            .variable("TINKEX_RECORD_URL", server.url())
            .run()?;
    }
    if !args.direct {
        let upstream = [server.url().to_owned()];
        let gateway = Gateway::start(release.version, GATEWAY_PORT, &upstream)?;
        check_gateway(&gateway, &server, release.version, sdk, table)?;
        println!("\nLogs: {}\n      {}", gateway.log_path(), server.log_path());
    }
    Ok(())
}

/// Runs the checks against SkyRL itself.
fn check_directly(
    server: &SkyrlServer,
    release: &Release,
    sdk: &SdkPrograms,
    table: &mut Table,
) -> Result<(), XtaskError> {
    let url = server.url();
    let model = server.model();
    let version = release.version;
    let mut check = |name: &str, run: &dyn Fn() -> _| table.check(version, "nothing", name, run);
    let folder = target().join("cluster").join(version).join("direct");
    let program = Program::new(folder, url, &model)?;
    // First: SkyRL lists the oldest runs, and a check expects its own among them.
    check("contract suite", &|| contract_suite(url, &model, DIRECT_DIFFERENCES));
    check("official SDK", &|| sdk.lifecycle_fails(url, &model, release.sdk_completes));
    check("tinkex train", &|| program.train());
    check("tinkex sample", &|| program.sample());
    check("tinkex train --resume", &|| program.resume());
    Ok(())
}

/// Runs the checks through the gateway.
fn check_gateway(
    gateway: &Gateway,
    server: &SkyrlServer,
    version: &str,
    sdk: &SdkPrograms,
    table: &mut Table,
) -> Result<(), XtaskError> {
    let url = gateway.url();
    let model = server.model();
    let mut check = |name: &str, run: &dyn Fn() -> _| table.check(version, "gateway", name, run);
    let folder = target().join("cluster").join(version).join("gateway");
    let program = Program::new(folder, url, &model)?;
    let names: Vec<&str> = CONFORMANCE_DIFFERENCES.iter().map(|(name, _)| *name).collect();
    check("official SDK", &|| sdk.lifecycle(url, &model));
    check("tinkex train", &|| program.train());
    check("tinkex sample", &|| program.sample());
    check("tinkex train --resume", &|| program.resume());
    check("openai chat", &|| sdk.chat(url, &model));
    check("contract suite", &|| contract_suite(url, &model, GATEWAY_DIFFERENCES));
    check("conformance", &|| sdk.conformance(url, &model, &names));
    Ok(())
}

fn check_kills(
    release: &Release,
    seeds: u64,
    sdk: &SdkPrograms,
    table: &mut Table,
) -> Result<(), XtaskError> {
    let mut server = start_server(release)?;
    let kills = kills::Kills::new(&server, sdk, GATEWAY_PORT, release.at_once)?;
    table.check(release.version, "gateway", "gateway killed", || {
        kills.of_gateway(GATEWAY_PORT, seeds)
    });
    table.check(release.version, "gateway", "SkyRL killed", || {
        kills.of_upstream(&mut server, GATEWAY_PORT, seeds.div_ceil(2))
    });
    println!("\nLog: {}", server.log_path());
    Ok(())
}

fn check_upstreams(
    release: &Release,
    sdk: &SdkPrograms,
    table: &mut Table,
) -> Result<(), XtaskError> {
    let ports = [release.port, SECOND_PORT, GATEWAY_PORT];
    let model = model::create("tiny")?;
    let other = model::create("other")?;
    table.check(release.version, "gateway", "two models", || {
        let models = [model.clone(), other];
        upstreams::different_models(release.version, ports, models, sdk)
    });
    table.check(release.version, "gateway", "two servers with one model", || {
        upstreams::same_model(release.version, ports, &model, sdk)
    });
    Ok(())
}

/// Runs the contract suite and returns a summary.
fn contract_suite(
    url: &str,
    model: &str,
    differences: &[Difference],
) -> Result<String, XtaskError> {
    let report = target().join("cluster").join("contract-report");
    let names: Vec<&str> = differences.iter().map(|(name, _)| *name).collect();
    let _ = std::fs::remove_file(&report);
    contract::step(url)?
        .variable("TINKEX_CONTRACT_MODEL", model)
        .variable("TINKEX_CONTRACT_DIFFERENCES", names.join(","))
        .variable("TINKEX_CONTRACT_REPORT", &report)
        .run()?;
    let report = std::fs::read_to_string(&report)
        .map_err(|error| XtaskError::new(format!("the contract suite left no report: {error}")))?;
    let count = |outcome: &str| report.lines().filter(|line| line.starts_with(outcome)).count();
    let passed = count("passed");
    let differ = count("differs");
    let skipped = count("skipped");
    Ok(format!("{passed} passed, {differ} differ, {skipped} without the endpoint"))
}

fn print_differences(title: &str, differences: &[Difference]) {
    println!("\n{title}: checks that fail, and why");
    for (check, reason) in differences {
        println!("  {check}: {reason}");
    }
}
