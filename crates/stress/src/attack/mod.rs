//! `cargo xtask attack`: attacks on a server, and what must hold beside each of them.
//!
//! Every attack has a server of its own, with an empty data folder, in a limited address space. An
//! honest user trains and completes prompts meanwhile. Then the server is stopped and started again:
//! the honest user's results must equal the results of an undisturbed run, and the server must still
//! know every request that it has accepted from the attacker.

mod connections;
mod documents;
mod requests;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use crate::api::{Api, PollState};
use crate::honest::{HonestUser, Observed, probe};
use crate::server::{ServerProcess, ServerStart};

/// Address space of the attacked server in bytes.
const MEMORY: u64 = 1 << 30;

/// Longest times that the honest user may wait.
const MAX_HEALTH: Duration = Duration::from_secs(1);
const MAX_COMPLETION: Duration = Duration::from_secs(2);
const MAX_STEP: Duration = Duration::from_secs(5);

/// Longest time that a server may take to stop.
const MAX_STOP: Duration = Duration::from_secs(10);

/// Time after which a server that does not stop is killed.
const STOP_LIMIT: Duration = Duration::from_secs(120);

/// Number of steps that the honest user trains after the restart.
const STEPS_AFTER: usize = 3;

/// Time within which requests of an attacker must finish, if they are small.
const FINISH_LIMIT: Duration = Duration::from_secs(120);

/// Arguments of the attacks.
#[derive(Args)]
pub(crate) struct AttackArgs {
    /// Program to attack
    #[arg(long, value_name = "FILE")]
    program: PathBuf,
    /// Duration of each attack
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    seconds: u64,
    /// Run one attack
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Server under attack.
pub(crate) struct Target {
    pub(crate) address: String,
    pub(crate) administrator: String,
    /// Key of the attacker, who is another user than the honest one.
    pub(crate) key: String,
    /// Time at which the attack ends.
    pub(crate) end: Instant,
}

impl Target {
    /// Returns a client that sends the attacker's key.
    pub(crate) fn api(&self) -> Api {
        Api::new(&self.address, Some(&self.key))
    }

    pub(crate) fn has_ended(&self) -> bool {
        Instant::now() >= self.end
    }

    pub(crate) fn time_left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }
}

/// What an attack has done.
#[derive(Debug, Default)]
pub(crate) struct AttackCounts {
    /// Number of requests, or of connections.
    pub(crate) requests: u64,
    /// Number of requests that were answered with an error, or whose connection was closed.
    pub(crate) refused: u64,
    /// Ids of the accepted requests.
    pub(crate) accepted: Vec<String>,
    /// What the attack itself has found.
    pub(crate) violations: Vec<String>,
}

impl AttackCounts {
    /// Adds the counts of another part of the attack.
    pub(crate) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.refused += other.refused;
        self.accepted.extend(other.accepted);
        self.violations.extend(other.violations);
    }

    /// Counts a request by its status; `None` if there was no response.
    pub(crate) fn count(&mut self, status: Option<u16>) {
        self.requests += 1;
        if !status.is_some_and(|status| (200..300).contains(&status)) {
            self.refused += 1;
        }
    }
}

type AttackFuture = Pin<Box<dyn Future<Output = AttackCounts> + Send>>;

/// One attack.
struct Attack {
    name: &'static str,
    run: fn(Arc<Target>) -> AttackFuture,
    /// Whether the accepted requests must finish within [`FINISH_LIMIT`] after the attack. Otherwise
    /// the server must still know them.
    finishes: bool,
}

const ATTACKS: &[Attack] = &[
    Attack { name: "none", run: |target| Box::pin(connections::none(target)), finishes: true },
    Attack {
        name: "slow-bodies",
        run: |target| Box::pin(connections::slow_bodies(target)),
        finishes: true,
    },
    Attack {
        name: "connections",
        run: |target| Box::pin(connections::many_connections(target)),
        finishes: true,
    },
    Attack { name: "login", run: |target| Box::pin(connections::logins(target)), finishes: true },
    Attack {
        name: "long-prompts",
        run: |target| Box::pin(documents::long_prompts(target)),
        finishes: true,
    },
    Attack {
        name: "sessions",
        run: |target| Box::pin(documents::sessions(target)),
        finishes: true,
    },
    Attack { name: "bombs", run: |target| Box::pin(documents::bombs(target)), finishes: true },
    Attack {
        name: "deep-json",
        run: |target| Box::pin(documents::deep_json(target)),
        finishes: true,
    },
    Attack { name: "pass", run: |target| Box::pin(requests::pass(target)), finishes: false },
    Attack {
        name: "starvation",
        run: |target| Box::pin(requests::starvation(target)),
        finishes: false,
    },
    Attack { name: "prefill", run: |target| Box::pin(requests::prefill(target)), finishes: true },
    Attack { name: "users", run: |target| Box::pin(requests::many_users(target)), finishes: true },
    Attack {
        name: "results",
        run: |target| Box::pin(requests::unread_results(target)),
        finishes: true,
    },
];

/// Runs the attacks and prints a table.
///
/// # Errors
/// If a server cannot be started, or a check has failed.
pub(crate) async fn run(args: &AttackArgs) -> Result<(), String> {
    let selected: Vec<&Attack> = ATTACKS
        .iter()
        .filter(|attack| args.only.as_ref().is_none_or(|only| only == attack.name))
        .collect();
    if selected.is_empty() {
        let names: Vec<&str> = ATTACKS.iter().map(|attack| attack.name).collect();
        return Err(format!("no such attack; expected one of: {}", names.join(", ")));
    }
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    // At most five steps per second while an attack runs.
    let max_steps = usize::try_from(args.seconds).unwrap_or(usize::MAX).saturating_mul(5);
    let expected = undisturbed(args, folder.path(), max_steps + STEPS_AFTER).await?;
    println!(
        "| attack | requests | refused | health, ms | completion, ms | step, ms | memory, MiB | \
         stop, s | verdict |\n|---|---|---|---|---|---|---|---|---|"
    );
    let mut violations = Vec::new();
    for attack in selected {
        let data = folder.path().join(attack.name);
        let found = carry_out(attack, args, &data, max_steps, &expected).await;
        let found = found.unwrap_or_else(|error| vec![error]);
        violations.extend(found.into_iter().map(|found| format!("{}: {found}", attack.name)));
        let _ = std::fs::remove_dir_all(&data);
    }
    if violations.is_empty() {
        return Ok(());
    }
    Err(format!("{} violations:\n  {}", violations.len(), violations.join("\n  ")))
}

/// Starts a server with limited memory.
fn start(args: &AttackArgs, data: &Path) -> Result<ServerProcess, String> {
    let program = &args.program;
    ServerProcess::start(&ServerStart { program, data, memory: Some(MEMORY), arguments: &[] })
}

/// Returns the results of the honest user's steps on a server without attacks.
async fn undisturbed(
    args: &AttackArgs,
    folder: &Path,
    steps: usize,
) -> Result<Vec<Vec<u8>>, String> {
    let server = start(args, &folder.join("undisturbed"))?;
    let api = Api::new(&server.address, Some(&server.key));
    HonestUser::undisturbed(&api, steps).await
}

/// Carries out an attack, prints its row of the table, and returns the violations.
async fn carry_out(
    attack: &Attack,
    args: &AttackArgs,
    data: &Path,
    max_steps: usize,
    expected: &[Vec<u8>],
) -> Result<Vec<String>, String> {
    let mut server = start(args, data)?;
    let administrator = Api::new(&server.address, Some(&server.key));
    let honest = administrator.user("honest", &server.key).await?;
    let attacker = administrator.user("attacker", &server.key).await?;
    let user = HonestUser::new(&Api::new(&server.address, Some(&honest))).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let probe = probe(&server.address, &honest, server.pid(), user, max_steps, &stop);
    let target = Target {
        address: server.address.clone(),
        administrator: server.key.clone(),
        key: attacker.clone(),
        end: Instant::now() + Duration::from_secs(args.seconds),
    };
    let mut counts = (attack.run)(Arc::new(target)).await;
    stop.store(true, Ordering::Relaxed);
    let probed = tokio::task::spawn_blocking(|| probe.join()).await;
    let Ok(Ok((mut user, observed))) = probed else {
        return Err("the probe panicked".to_owned());
    };
    let mut found = check(&observed);
    found.append(&mut counts.violations);
    let mut stopped = Duration::ZERO;
    if let Some(status) = server.ended() {
        found.push(format!("the server died: {status}: {}", server.log_end()));
    } else {
        match tokio::task::block_in_place(|| server.terminate(STOP_LIMIT)) {
            Ok(took) => {
                stopped = took;
                if took > MAX_STOP {
                    found.push(format!("the server stopped after {took:.1?}"));
                }
            }
            Err(error) => found.push(error),
        }
    }
    drop(server);
    match start(args, data) {
        Ok(server) => {
            let api = Api::new(&server.address, Some(&honest));
            found.extend(check_results(&api, &mut user, expected).await);
            let api = Api::new(&server.address, Some(&attacker));
            found.extend(check_accepted(&api, &counts.accepted, attack.finishes).await);
        }
        Err(error) => found.push(format!("after the attack: {error}")),
    }
    println!(
        "| {} | {} | {} | {} | {} | {} | {} | {:.1} | {} |",
        attack.name,
        counts.requests,
        counts.refused,
        observed.health.as_millis(),
        observed.completion.as_millis(),
        observed.step.as_millis(),
        observed.memory >> 20,
        stopped.as_secs_f64(),
        if found.is_empty() { "holds" } else { "VIOLATED" },
    );
    Ok(found)
}

/// Checks the observations of the honest user.
fn check(observed: &Observed) -> Vec<String> {
    let mut found = observed.failures.clone();
    for (name, took, limit) in [
        ("a health check", observed.health, MAX_HEALTH),
        ("a completion of four tokens", observed.completion, MAX_COMPLETION),
        ("a training step", observed.step, MAX_STEP),
    ] {
        if took > limit {
            found.push(format!("{name} took {took:.1?}, at most {limit:?} expected"));
        }
    }
    if observed.memory > MEMORY {
        found.push(format!("the server used {} MiB", observed.memory >> 20));
    }
    found
}

/// Trains some more steps, and compares all results with those of an undisturbed run.
async fn check_results(api: &Api, user: &mut HonestUser, expected: &[Vec<u8>]) -> Vec<String> {
    for _ in 0..STEPS_AFTER {
        if let Err(error) = user.step(api, FINISH_LIMIT).await {
            return vec![format!("a step after the restart failed: {error}")];
        }
    }
    let differs =
        user.results.iter().zip(expected).position(|(result, expected)| result != expected);
    match differs {
        Some(step) => vec![format!("step {step} has another result than without the attack")],
        None => Vec::new(),
    }
}

/// Checks that the server knows the requests that it has accepted, and that none was lost.
async fn check_accepted(api: &Api, accepted: &[String], finishes: bool) -> Vec<String> {
    let mut found = Vec::new();
    let end = Instant::now() + FINISH_LIMIT;
    for id in accepted {
        loop {
            // The server holds a poll of an unfinished request for longer.
            let timeout = Duration::from_secs(if finishes { 60 } else { 1 });
            let poll = json!({"request_id": id});
            let polled = api.http.post("/api/v1/retrieve_future", &poll, timeout).await;
            match polled.as_ref().map(|response| (response.status, PollState::of(response))) {
                Ok((200, PollState::Pending)) | Err(_) if !finishes => break,
                Ok((200, PollState::Pending)) | Err(_) if Instant::now() < end => {}
                Ok((200, PollState::Finished)) => break,
                // A failure because of the request itself is a result.
                Ok((200, PollState::Failed(reason))) if reason.starts_with("user") => break,
                Ok((200, PollState::Failed(reason))) => {
                    found.push(format!("accepted request {id} failed: {reason}"));
                    break;
                }
                Ok((status, _)) => {
                    found.push(format!("accepted request {id} is lost: status {status}"));
                    break;
                }
                Err(error) => {
                    found.push(format!("accepted request {id} does not finish: {error}"));
                    break;
                }
            }
        }
    }
    found.truncate(5);
    found
}
