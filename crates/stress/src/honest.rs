//! [`HonestUser`]: small requests beside an attack, whose durations and results are checked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::api::{Api, datum};
use crate::server::peak_memory;

/// Longest time that any request of the honest user may take before it counts as failed.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Pause between two health checks, and between two completions.
const PAUSE: Duration = Duration::from_millis(50);

/// Pause between two training steps.
const STEP_PAUSE: Duration = Duration::from_millis(200);

/// A user who trains a model and completes prompts of four tokens.
pub(crate) struct HonestUser {
    model: String,
    next_seq: u64,
    /// Results of the training passes so far.
    pub(crate) results: Vec<Vec<u8>>,
}

impl HonestUser {
    /// Creates a model, and loads the base model by a first completion.
    ///
    /// # Errors
    /// If a request fails.
    pub(crate) async fn new(api: &Api) -> Result<Self, String> {
        let session = api.session(TIMEOUT).await?;
        let model = api.model(&session, TIMEOUT).await?;
        api.complete(4, TIMEOUT).await?;
        Ok(Self { model, next_seq: 1, results: Vec::new() })
    }

    /// Trains one step.
    ///
    /// # Errors
    /// If a request fails, or takes longer than `timeout`.
    pub(crate) async fn step(&mut self, api: &Api, timeout: Duration) -> Result<(), String> {
        let first = u32::try_from(self.next_seq).unwrap_or_default();
        let data = vec![datum(12, first)?, datum(7, first + 3)?];
        let result = api.step(&self.model, self.next_seq, data, timeout).await?;
        self.next_seq += 2;
        self.results.push(result);
        Ok(())
    }

    /// Returns the results of `steps` steps on a server that is not attacked.
    ///
    /// # Errors
    /// If a request fails.
    pub(crate) async fn undisturbed(api: &Api, steps: usize) -> Result<Vec<Vec<u8>>, String> {
        let mut user = Self::new(api).await?;
        for _ in 0..steps {
            user.step(api, TIMEOUT).await?;
        }
        Ok(user.results)
    }
}

/// What the honest user has observed.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    /// Longest time of a health check over a new connection.
    pub(crate) health: Duration,
    /// Longest time of a completion of four tokens.
    pub(crate) completion: Duration,
    /// Longest time of a training step.
    pub(crate) step: Duration,
    /// Peak resident memory of the server in bytes.
    pub(crate) memory: u64,
    pub(crate) failures: Vec<String>,
}

/// Probes the server in a thread of its own until `stop` is set. The requests of the attack, which
/// run in the threads of another runtime, hence do not delay the measurements.
pub(crate) fn probe(
    address: &str,
    key: &str,
    pid: u32,
    user: HonestUser,
    max_steps: usize,
    stop: &Arc<AtomicBool>,
) -> std::thread::JoinHandle<(HonestUser, Observed)> {
    let api = Api::new(address, Some(key));
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        match runtime {
            Ok(runtime) => runtime.block_on(observe(&api, pid, user, max_steps, &stop)),
            Err(error) => {
                let failures = vec![format!("cannot create a runtime: {error}")];
                (user, Observed { failures, ..Observed::default() })
            }
        }
    })
}

async fn observe(
    api: &Api,
    pid: u32,
    mut user: HonestUser,
    max_steps: usize,
    stop: &AtomicBool,
) -> (HonestUser, Observed) {
    let health = repeat(stop, PAUSE, async || {
        // A new client, because a health check must not need an open connection.
        let fresh = Api::new(api.http.address(), None);
        let response = fresh.http.call("GET", "/api/v1/healthz", &[], b"", TIMEOUT).await?;
        if response.status == 200 { Ok(()) } else { Err(format!("status {}", response.status)) }
    });
    let completion = repeat(stop, PAUSE, async || api.complete(4, TIMEOUT).await.map(drop));
    let steps = async {
        let mut times = Times::default();
        // A step that failed is repeated: its sequence number must not be skipped.
        while !stop.load(Ordering::Relaxed) && user.results.len() < max_steps {
            times.add(async || user.step(api, TIMEOUT).await).await;
            tokio::time::sleep(STEP_PAUSE).await;
        }
        times
    };
    let memory = async {
        let mut peak = 0;
        while !stop.load(Ordering::Relaxed) {
            peak = peak_memory(pid).unwrap_or_default().max(peak);
            tokio::time::sleep(PAUSE).await;
        }
        peak
    };
    let (health, completion, steps, memory) = tokio::join!(health, completion, steps, memory);
    let mut failures = Vec::new();
    for (name, times) in [("health check", &health), ("completion", &completion), ("step", &steps)]
    {
        if let Some(failure) = &times.failure {
            failures.push(format!("{name} failed {} times: {failure}", times.failed));
        }
    }
    let observed = Observed {
        health: health.longest,
        completion: completion.longest,
        step: steps.longest,
        memory,
        failures,
    };
    (user, observed)
}

/// Durations of a request that is repeated.
#[derive(Default)]
struct Times {
    longest: Duration,
    failed: u64,
    /// First failure.
    failure: Option<String>,
}

impl Times {
    async fn add(&mut self, request: impl AsyncFnOnce() -> Result<(), String>) {
        let start = Instant::now();
        let result = request().await;
        self.longest = start.elapsed().max(self.longest);
        if let Err(error) = result {
            self.failed += 1;
            self.failure.get_or_insert(error);
        }
    }
}

async fn repeat(
    stop: &AtomicBool,
    pause: Duration,
    mut request: impl AsyncFnMut() -> Result<(), String>,
) -> Times {
    let mut times = Times::default();
    while !stop.load(Ordering::Relaxed) {
        times.add(&mut request).await;
        tokio::time::sleep(pause).await;
    }
    times
}
