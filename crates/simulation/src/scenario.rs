//! [`run`]: one scenario from start to end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tinkex_gateway::UpstreamServer;
use tinkex_server::ServerOptions;
use tinkex_server::simulation::{Replay, RequestHandler};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::disk::SimulatedDisk;
use crate::faults::FaultPlan;
use crate::host::Host;
use crate::network::SimulatedNetwork;
use crate::oracle::Oracle;
use crate::program::ClientProgram;
use crate::replay::SequentialReplay;
use crate::task;
use crate::toy_replay::ToyReplay;
use crate::trace::{EventTrace, event};
use crate::upstream::ScriptedUpstream;
use crate::upstream_faults::UpstreamFaults;

/// Name of the base model that all programs use.
pub(crate) const BASE_MODEL: &str = "micro";

/// Simulated time after the last fault within which all programs must end.
const MAX_RECOVERY: Duration = Duration::from_secs(6 * 3_600);

/// Simulated time within which the session of a client that has died must end.
const MAX_EXPIRY: Duration = Duration::from_secs(2 * 3_600);

/// Result of a run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Seed of the run.
    pub seed: u64,
    /// Hash of all events. Two runs with the same seed have the same hash.
    pub hash: u64,
    /// First violation, if any.
    pub failure: Option<String>,
    /// Events, if they were requested.
    pub events: Vec<String>,
    /// Simulated time in seconds.
    pub simulated_seconds: f64,
    /// Number of occurrences of each kind of fault.
    pub counts: BTreeMap<&'static str, u64>,
}

/// Runs the scenario of `seed`. Keeps its events if `keep_events` is true.
///
/// # Errors
/// If the temporary folder or the runtime cannot be created.
pub fn run(seed: u64, keep_events: bool) -> std::io::Result<Report> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let folder = tempfile::Builder::new().prefix("tinkex-simulation-").tempdir_in(parent)?;
    // The client draws its jitter and its ids from the generator of the thread.
    fastrand::seed(seed);
    let trace = runtime.block_on(async {
        let trace = EventTrace::new(keep_events, folder.path());
        scenario(seed, folder.path(), &trace).await;
        trace
    });
    let summary = runtime.block_on(async { trace.finish() });
    Ok(Report {
        seed,
        hash: summary.hash,
        failure: summary.failure,
        events: summary.lines,
        simulated_seconds: summary.simulated_seconds,
        counts: summary.counts,
    })
}

/// Returns the folder of the base model.
fn base_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3")
}

/// Returns whether the server of a scenario is a gateway in front of a scripted upstream.
fn has_gateway(seed: u64) -> bool {
    seed % 4 == 3
}

fn options(data: &Path, rng: &mut Rng, gateway: bool) -> ServerOptions {
    let mut options = ServerOptions::new(data);
    if !gateway {
        options = options.model(BASE_MODEL, base_folder());
    }
    options.threads = 1;
    options.limits.kv_cache_bytes = 1 << 20;
    // With little memory, every datum is a micro-batch of its own.
    options.limits.training_bytes = if rng.bool() { rng.usize(1..200_000) } else { 64 << 20 };
    if rng.bool() {
        options.limits.queued_requests = rng.usize(2..20);
    }
    if rng.bool() {
        options.limits.result_bytes = rng.usize(100..5_000);
    }
    if rng.bool() {
        options.limits.payload_bytes = rng.u64(100..10_000);
    }
    if rng.bool() {
        options.limits.model_bytes = rng.usize(1_000..200_000);
    }
    if rng.bool() {
        options.limits.queued_bytes = rng.usize(500..20_000);
    }
    if rng.bool() {
        options.limits.total_body_bytes = rng.usize(1_000..100_000);
    }
    if rng.bool() {
        options.limits.response_bytes = rng.usize(1_000..10_000);
    }
    if rng.bool() {
        options.limits.sampler_weight_bytes = rng.usize(1_000..50_000);
    }
    if rng.bool() {
        options.timeouts.snapshot_after = Duration::ZERO;
    }
    if rng.bool() {
        options.timeouts.idle_model = Duration::from_secs(rng.u64(1..100));
    }
    options.timeouts.expiry_interval = Duration::from_secs(rng.u64(1..60));
    options.efficient_protocol = rng.u32(0..4) > 0;
    options
}

async fn scenario(seed: u64, folder: &Path, trace: &EventTrace) {
    let mut rng = Rng::with_seed(seed);
    let plan = FaultPlan::choose(&mut rng);
    event!(trace, "{plan:?}");
    let data = folder.join("data");
    let gateway = has_gateway(seed);
    let mut options = options(&data, &mut rng, gateway);
    if gateway {
        let faults = UpstreamFaults::choose(&mut rng, plan.duration);
        event!(trace, "{faults:?}");
        options.checkpoint_every = rng.u32(1..6);
        let upstream = ScriptedUpstream::new(faults, rng.u64(..), trace.clone());
        let server = UpstreamServer::new("http://127.0.0.1:1", None).http(Arc::new(upstream));
        options = options.upstream("up", Arc::new(server));
    }
    event!(trace, "{:?} {:?}", options.limits, options.timeouts);
    let oracle = Oracle::new(trace.clone());
    let disk = SimulatedDisk::new(&data, &plan, rng.u64(..), trace.clone());
    let observed = disk.clone();
    let _observer = tinkex_files::observe_thread(move |operation| observed.observe(operation));
    let host = Host::new(options, &plan, disk, oracle.clone(), rng.u64(..), trace.clone());
    host.start().await;
    let calm_at = Instant::now() + plan.duration;
    let mut programs = Vec::new();
    for client in 0..rng.usize(1..4) {
        let network_seed = rng.u64(..);
        let program_seed = rng.u64(..);
        let network = SimulatedNetwork::new(
            client,
            host.clone(),
            oracle.clone(),
            &plan,
            network_seed,
            trace.clone(),
        );
        let built = ClientProgram::new(
            client,
            network.clone(),
            program_seed,
            gateway,
            oracle.clone(),
            trace.clone(),
        );
        match built {
            Ok(program) => {
                let death =
                    (rng.f64() < plan.client_death).then(|| plan.duration.mul_f64(rng.f64()));
                let oracle = oracle.clone();
                let run = run_program(program, network, death, calm_at, oracle, trace.clone());
                programs.push((client, task::spawn(run)));
            }
            Err(error) => trace.fail(format!("cannot build a client: {error}")),
        }
    }
    let ended = Notify::new();
    let injection = inject_faults(&host, &plan, &mut rng, calm_at, &ended);
    let ending = async {
        for (client, program) in programs {
            if let Err(error) = program.await {
                trace.fail(format!("program of client {client} panicked: {error}"));
            }
        }
        ended.notify_one();
    };
    let limit = plan.duration + MAX_RECOVERY;
    let ended = tokio::time::timeout(limit, async { tokio::join!(injection, ending) }).await;
    if ended.is_err() {
        return trace.fail("a client still waits, hours after the last fault".to_owned());
    }
    if trace.has_failed() {
        return;
    }
    finish(&host, &oracle, folder, gateway, trace).await;
}

/// Runs a program to its end, or until its client dies after the time `death`. Reports a violation
/// if the program ends with an error that no fault explains.
async fn run_program(
    program: ClientProgram,
    network: SimulatedNetwork,
    death: Option<Duration>,
    calm_at: Instant,
    oracle: Oracle,
    trace: EventTrace,
) {
    let client = program.client;
    let death = async {
        match death {
            Some(after) => tokio::time::sleep(after).await,
            None => std::future::pending().await,
        }
        // Kill the client before dropping the program: the drop would finish the session.
        network.kill_client();
    };
    let outcome = tokio::select! {
        biased;
        () = death => None,
        outcome = program.run() => Some(outcome),
    };
    match outcome {
        None => {
            event!(trace, "client {client} dies");
            trace.count("client died");
        }
        Some(Ok(())) => {}
        Some(Err(error)) if is_expected(&error, calm_at) || oracle.explains(&error) => {
            trace.count("program ended by a fault");
        }
        Some(Err(error)) => trace.fail(format!("program of client {client} failed: {error}")),
    }
}

/// Returns whether an error of a program that has just ended is a consequence of faults: the client
/// gave up while the server could not be reached, or the server reported a fault of its disk or a
/// limit on its memory.
fn is_expected(error: &tinkex::Error, calm_at: Instant) -> bool {
    let message = error.to_string();
    let injected = message.contains("simulated") || message.contains("disk may be full");
    let memory = message.contains("bytes, the limit is")
        // A custom loss in a scenario with little memory for activations.
        || message.contains("the evaluation needs more than");
    // The upstream of a gateway could not be reached for as long as requests wait for it.
    let unreached = message.contains("has not responded since the start of the server");
    // The client may give up some time after the last fault.
    let faulty = Instant::now() < calm_at + Duration::from_secs(120);
    injected || memory || unreached || (error.is_retryable() && faulty)
}

/// Kills and restarts the server until the programs end.
async fn inject_faults(
    host: &Host,
    plan: &FaultPlan,
    rng: &mut Rng,
    calm_at: Instant,
    ended: &Notify,
) {
    // End of the last freeze, unless the server is to be killed while it is frozen.
    let mut thawed_at = Instant::now();
    loop {
        let interval = plan.crash_interval.unwrap_or(plan.duration);
        let until = Instant::now().max(thawed_at) + interval.mul_f64(2.0 * rng.f64());
        let killed = tokio::select! {
            biased;
            () = ended.notified() => return,
            () = host.killed_by_disk() => true,
            () = tokio::time::sleep_until(until) => false,
        };
        let now = Instant::now();
        if !killed && (now >= calm_at || plan.crash_interval.is_none()) {
            continue;
        }
        if !killed && host.interruption().is_none() && rng.f64() < plan.second_server {
            host.start_second().await;
            continue;
        }
        if !killed && rng.f64() < plan.freeze {
            let time = plan.max_freeze.mul_f64(rng.f64()).min(calm_at - now);
            host.freeze(time);
            if rng.u32(0..4) > 0 {
                thawed_at = now + time;
            }
            if rng.f64() < plan.suspend {
                host.freeze_clients(time + Duration::from_secs(rng.u64(0..50)));
            }
            continue;
        }
        if !killed && host.interruption().is_none() && rng.f64() < plan.graceful {
            host.stop(rng.f64() < plan.full_at_stop).await;
        } else {
            host.crash(rng.f64() < plan.power_loss).await;
        }
        if rng.f64() < plan.damage {
            host.damage();
        }
        if rng.f64() < plan.clock_set {
            host.set_clock(rng.i64(-40_000_000..40_000_000));
        }
        tokio::time::sleep(plan.max_downtime.mul_f64(rng.f64())).await;
        host.start().await;
    }
}

/// Waits until the server is idle, and checks its state, before and after a restart.
async fn finish(host: &Host, oracle: &Oracle, folder: &Path, gateway: bool, trace: &EventTrace) {
    host.calm();
    // Messages of clients that have died may still be in transit, and the server may be frozen.
    let frozen = if host.is_dead() { None } else { host.interruption() };
    tokio::time::sleep(frozen.unwrap_or_default() + Duration::from_secs(60)).await;
    for _ in 0..1_000 {
        if host.is_dead() {
            // The server still executes the poison request of a dead client, which kills the
            // process again.
            host.crash(false).await;
            host.start().await;
        }
        host.observe();
        if !oracle.has_unfinished() {
            break;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let Some(handler) = host.handler() else {
        return trace.fail("the server does not run at the end".to_owned());
    };
    oracle.check_references(&handler);
    oracle.check_copies(&handler);
    if gateway {
        oracle.check_outcomes(|requests, _, folders| ToyReplay::default().check(requests, folders));
    } else {
        check_autosaves(host, oracle, &handler, trace).await;
        check_replay(host, oracle, &handler, folder, trace);
    }
    // Wait until nothing changes: the disk writer may still have to write changes that are already
    // in memory.
    let mut before = handler.describe();
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let now = handler.describe();
        let settled = now == before;
        before = now;
        if settled {
            break;
        }
    }
    drop(handler);
    host.crash(true).await;
    host.start().await;
    let Some(handler) = host.handler() else { return };
    let after = handler.describe();
    // The start removes results and checkpoints that have expired.
    let may_change = |line: &str| {
        (line.starts_with("request ") && !line.ends_with("unfinished"))
            || line.contains("expires_at: Some(")
            // A restart restores the losses of a session that has ended, for its last requests; the
            // next restart does not.
            || line.starts_with("loss ")
            || is_unconfirmed(line)
    };
    let missing = before.iter().filter(|line| !after.contains(line));
    let lost: Vec<_> = missing.filter(|line| !may_change(line)).collect();
    let new = after.iter().filter(|line| !before.contains(line));
    let new = new.filter(|line| !is_unconfirmed(line) && !line.starts_with("loss "));
    let new: Vec<_> = new.collect();
    // A payload that is damaged since an earlier restart may have been found only now.
    if !(lost.is_empty() && new.is_empty() || oracle.is_damaged()) {
        trace.fail(format!("a restart changes the state: {lost:?} became {new:?}"));
    }
}

/// Returns whether a line describes the usage of inference requests, which the server writes once and
/// does not retry.
fn is_unconfirmed(line: &str) -> bool {
    line.starts_with("usage ") && line.contains("session: \"inference\"")
}

/// Compares the outcomes and the saved weights with the results of a sequential execution.
fn check_replay(
    host: &Host,
    oracle: &Oracle,
    handler: &RequestHandler,
    folder: &Path,
    trace: &EventTrace,
) {
    let scratch = folder.join("replay");
    if let Err(error) = std::fs::create_dir_all(&scratch) {
        return trace.fail(format!("cannot create {}: {error}", scratch.display()));
    }
    let runs = oracle.runs();
    let replay = Replay::new(handler.clone(), runs, oracle.losses(), BASE_MODEL, &base_folder());
    let engine = match replay {
        Ok(engine) => engine,
        Err(error) => return trace.fail(format!("cannot load the model: {error}")),
    };
    let weights = host.data_dir().join("weights");
    let damaged = oracle.is_damaged();
    let replay = SequentialReplay { engine, weights: &weights, damaged, scratch: &scratch };
    oracle.check_outcomes(|requests, samples, folders| replay.check(requests, &samples, folders));
}

/// Waits until the sessions of dead clients expire, and checks that the server has saved their
/// models.
async fn check_autosaves(
    host: &Host,
    oracle: &Oracle,
    handler: &RequestHandler,
    trace: &EventTrace,
) {
    let abandoned = handler.models_in_open_sessions();
    let deadline = Instant::now() + MAX_EXPIRY;
    while !handler.models_in_open_sessions().is_empty() {
        if Instant::now() > deadline {
            return trace.fail("the session of a client that has died does not end".to_owned());
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    host.observe();
    let unsaved = oracle.unsaved_models();
    // A model whose files are damaged cannot be saved.
    if oracle.is_damaged() {
        return;
    }
    if let Some(model) = abandoned.iter().find(|model| unsaved.contains(*model)) {
        trace.fail(format!("the session of {model} ended without a save of its training"));
    }
}
