//! `cargo xtask load`: many clients of several users, compared with one client.
//!
//! Every user has as many clients as every other user, in the same roles: most of them complete
//! prompts, some of them read streams, sample through the Tinker API, or train. One client for each
//! user has the dashboard open. A client sends its next request when it has the response to the
//! previous one.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use tokio::task::JoinSet;

use crate::api::{Api, MODEL, datum};
use crate::server::{ServerProcess, ServerStart, peak_memory};
use crate::statistics::{jain_index, quantile};

/// Timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Tokens of a completion, of a stream, and of a sample.
const TOKENS: u32 = 16;

/// Pause of a client that has the dashboard open, between two documents.
const DASHBOARD_PAUSE: Duration = Duration::from_secs(1);

/// Smallest accepted fairness between users.
const MIN_FAIRNESS: f64 = 0.9;

/// Arguments of the load.
#[derive(Args)]
pub(crate) struct LoadArgs {
    /// Program to measure
    #[arg(long, value_name = "FILE")]
    program: PathBuf,
    /// Number of clients
    #[arg(long, value_name = "N", default_value_t = 200)]
    clients: usize,
    /// Number of users
    #[arg(long, value_name = "N", default_value_t = 20)]
    users: usize,
    /// Duration of the measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    seconds: u64,
}

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Completion,
    Stream,
    Sample,
    Training,
    Dashboard,
}

impl Role {
    /// Returns the role of the client with the number `n` of its user.
    pub(crate) fn of_client(n: usize) -> Self {
        match n % 10 {
            0 => Self::Training,
            1 => Self::Dashboard,
            2 | 3 => Self::Stream,
            4 | 5 => Self::Sample,
            _ => Self::Completion,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Completion => "completion",
            Self::Stream => "stream",
            Self::Sample => "sample",
            Self::Training => "training step",
            Self::Dashboard => "dashboard",
        }
    }
}

/// Requests of one client.
pub(crate) struct ClientTimes {
    user: usize,
    role: Role,
    pub(crate) times: Vec<Duration>,
    pub(crate) failures: Vec<String>,
}

/// Requests of all clients.
pub(crate) struct Measured {
    pub(crate) clients: Vec<ClientTimes>,
    seconds: f64,
}

impl Measured {
    fn times(&self, role: Role) -> Vec<Duration> {
        let clients = self.clients.iter().filter(|client| client.role == role);
        clients.flat_map(|client| client.times.iter().copied()).collect()
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate to print")]
    fn rate(&self, role: Role) -> f64 {
        self.times(role).len() as f64 / self.seconds
    }

    /// Returns the fairness between the numbers of requests of the users.
    #[expect(clippy::cast_precision_loss, reason = "numbers of requests are small")]
    fn fairness(&self, role: Role, users: usize) -> f64 {
        let mut requests = vec![0.0; users];
        for client in self.clients.iter().filter(|client| client.role == role) {
            requests[client.user] += client.times.len() as f64;
        }
        jain_index(&requests)
    }
}

/// Measures one client of each role alone, then all clients, and prints tables.
///
/// # Errors
/// If a request fails, or the users are not treated alike.
pub(crate) async fn run(args: &LoadArgs) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let data = folder.path().join("data");
    let program = &args.program;
    let start = ServerStart { program, data: &data, memory: None, arguments: &[] };
    let server = ServerProcess::start(&start)?;
    let administrator = Api::new(&server.address, Some(&server.key));
    let mut keys = Vec::new();
    for user in 0..args.users {
        keys.push(administrator.user(&format!("user-{user}"), &server.key).await?);
    }
    let roles = [Role::Completion, Role::Stream, Role::Sample, Role::Training, Role::Dashboard];
    let alone = Duration::from_secs((args.seconds / 20).clamp(2, 10));
    println!("| client | alone, /s | together, /s | p50, ms | p99, ms | fairness |");
    println!("|---|---|---|---|---|---|");
    let mut rates = Vec::new();
    for role in roles {
        let end = Instant::now() + alone;
        rates.push(measure(&server.address, &keys[..1], &[role], end).await?.rate(role));
    }
    let per_user = (args.clients / args.users).max(1);
    let all: Vec<Role> = (0..per_user).map(Role::of_client).collect();
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let measured = measure(&server.address, &keys, &all, end).await?;
    let mut unfair = Vec::new();
    for (role, alone) in roles.into_iter().zip(rates) {
        let mut times = measured.times(role);
        if times.is_empty() {
            continue;
        }
        let fairness = measured.fairness(role, args.users);
        println!(
            "| {} | {alone:.1} | {:.1} | {} | {} | {fairness:.3} |",
            role.name(),
            measured.rate(role),
            quantile(&mut times, 0.5).as_millis(),
            quantile(&mut times, 0.99).as_millis(),
        );
        if fairness < MIN_FAIRNESS {
            unfair.push(format!("{}: fairness {fairness:.3}", role.name()));
        }
    }
    let memory = peak_memory(server.pid()).unwrap_or_default() >> 20;
    println!(
        "\n{} clients of {} users, {:.0} s; peak memory of the server: {memory} MiB",
        per_user * args.users,
        args.users,
        measured.seconds
    );
    let mut failures = measured.clients.iter().flat_map(|client| client.failures.iter());
    if let Some(failure) = failures.next() {
        return Err(format!("{} requests failed: {failure}", failures.count() + 1));
    }
    if unfair.is_empty() { Ok(()) } else { Err(unfair.join("\n")) }
}

/// Runs clients with these roles for every key, until `end`.
///
/// # Errors
/// If a client panics.
pub(crate) async fn measure(
    address: &str,
    keys: &[String],
    roles: &[Role],
    end: Instant,
) -> Result<Measured, String> {
    let start = Instant::now();
    let mut clients = JoinSet::new();
    for (user, key) in keys.iter().enumerate() {
        for (n, role) in roles.iter().copied().enumerate() {
            let api = Arc::new(Api::new(address, Some(key)));
            clients.spawn(client(api, user, n, role, end));
        }
    }
    let mut measured = Vec::new();
    while let Some(ended) = clients.join_next().await {
        measured.push(ended.map_err(|error| format!("a client panicked: {error}"))?);
    }
    Ok(Measured { clients: measured, seconds: start.elapsed().as_secs_f64() })
}

/// Sends requests until `end`.
async fn client(api: Arc<Api>, user: usize, n: usize, role: Role, end: Instant) -> ClientTimes {
    let mut client = ClientTimes { user, role, times: Vec::new(), failures: Vec::new() };
    if let Err(failure) = repeat(&api, n, &mut client, end).await {
        client.failures.push(format!("{}: {failure}", role.name()));
    }
    client
}

async fn repeat(api: &Api, n: usize, client: &mut ClientTimes, end: Instant) -> Result<(), String> {
    let number = u32::try_from(client.user * 1_000 + n).unwrap_or_default();
    let prepared = Prepared::new(api, client.role).await?;
    for round in 0_u32.. {
        if Instant::now() >= end {
            break;
        }
        let start = Instant::now();
        prepared.request(api, client.role, number, round).await?;
        client.times.push(start.elapsed());
        if client.role == Role::Dashboard {
            tokio::time::sleep(DASHBOARD_PAUSE).await;
        }
    }
    Ok(())
}

/// Id of the model or sampling session of a client; empty if it has none.
struct Prepared(String);

impl Prepared {
    async fn new(api: &Api, role: Role) -> Result<Self, String> {
        let id = match role {
            Role::Training => api.model(&api.session(TIMEOUT).await?, TIMEOUT).await?,
            Role::Sample => api.sampler(&api.session(TIMEOUT).await?, TIMEOUT).await?,
            Role::Completion | Role::Stream | Role::Dashboard => String::new(),
        };
        Ok(Self(id))
    }

    /// Sends one request and waits for its result.
    async fn request(&self, api: &Api, role: Role, number: u32, round: u32) -> Result<(), String> {
        match role {
            Role::Completion | Role::Stream => {
                let body = json!({
                    "model": MODEL, "prompt": format!("Question {number} {round}:"),
                    "max_tokens": TOKENS, "temperature": 1, "ignore_eos": true,
                    "stream": role == Role::Stream,
                });
                let response = api.http.succeed("/v1/completions", &body, TIMEOUT).await?;
                let text = String::from_utf8_lossy(&response.body);
                if role == Role::Stream && !text.ends_with("data: [DONE]\n\n") {
                    return Err("the stream is not complete".to_owned());
                }
            }
            Role::Sample => {
                let body = json!({
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [
                        number % 90 + 5, round % 90 + 5,
                    ]}]},
                    "sampling_params": {"max_tokens": TOKENS, "stop": []},
                    "sampling_session_id": self.0, "seq_id": round,
                });
                let future = api.request("asample", &body, TIMEOUT).await?;
                api.result(&future, TIMEOUT).await?;
            }
            Role::Training => {
                let data = vec![datum(64, number)?, datum(64, number + round)?];
                api.step(&self.0, u64::from(round) * 2 + 1, data, TIMEOUT).await?;
            }
            Role::Dashboard => {
                for name in ["info", "runs", "server"] {
                    let path = format!("/ui/api/{name}");
                    let response = api.http.call("GET", &path, &[], b"", TIMEOUT).await?;
                    if !response.is_success() {
                        return Err(format!("{path}: status {}", response.status));
                    }
                }
            }
        }
        Ok(())
    }
}
