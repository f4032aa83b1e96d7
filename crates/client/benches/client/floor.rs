//! The floor: the same HTTP requests without client logic, a lower bound for this HTTP stack.
//!
//! Bodies, headers and lanes are recorded from the client, so that both remain equal when the
//! client changes. They are then replayed over as many connections as the client would use, and the
//! responses are received and dropped. The measurement with all samples at once keeps prompts and
//! results, as a program would, because it measures memory.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use parking_lot::Mutex;
use tinkex::{HttpFailure, HttpService, Lane, LoraOptions};
use tinkex_wire::ClientConfig;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::Outcome;
use crate::ours;
use crate::usage::Stopwatch;
use crate::work::{Kind, MODEL, Work, batch, prompt};

/// Requests per HTTP client, as in the client.
const REQUESTS_PER_CLIENT: usize = 50;
/// Samples submitted at the same time, as in the client.
const MAX_SUBMITTING: usize = 400;

pub(crate) async fn run(work: &Work) -> Outcome<()> {
    let recorder = Recorder { client: client()?, log: Arc::default() };
    let log = Arc::clone(&recorder.log);
    let service = ours::builder(&work.url)?.http(recorder).build()?;
    let workers = match work.kind {
        Kind::Samples | Kind::Burst => {
            let sampler = service.create_sampling_client(MODEL).await?;
            clear(&log);
            ours::sample(&sampler, 7).await?;
            work.concurrent
        }
        Kind::Steps => {
            let model =
                service.create_lora_training_client(LoraOptions::new(MODEL).rank(32)).await?;
            clear(&log);
            ours::step(&model, batch()?).await?;
            1
        }
        Kind::Start | Kind::Services => return Err("this measurement has no floor".into()),
    };
    let recorded = clear(&log);
    drop(service);
    if work.kind == Kind::Burst {
        let watch = Stopwatch::start();
        let results = burst(&recorded, work.count).await?;
        watch.report(u32::try_from(results.len())?);
        return Ok(());
    }
    let replays = replays(&recorded, workers)?;
    replay(&replays, 2 * u32::try_from(workers)?).await?;
    let watch = Stopwatch::start();
    replay(&replays, work.count).await?;
    watch.report(work.count);
    Ok(())
}

type Log = Mutex<Vec<(Lane, Request<Bytes>, Duration)>>;

fn clear(log: &Log) -> Vec<(Lane, Request<Bytes>, Duration)> {
    std::mem::take(&mut *log.lock())
}

/// The requests of one sample or step, each with the HTTP client that sends it.
type Replay = Vec<(reqwest::Client, reqwest::Request)>;

/// Creates one replay per worker; every lane has its own HTTP clients.
fn replays(recorded: &[(Lane, Request<Bytes>, Duration)], workers: usize) -> Outcome<Vec<Replay>> {
    let mut clients: Vec<(Lane, usize, reqwest::Client)> = Vec::new();
    let mut replays = Vec::with_capacity(workers);
    for worker in 0..workers {
        let index = worker / REQUESTS_PER_CLIENT;
        let mut replay = Replay::new();
        for (lane, request, timeout) in recorded {
            let known = clients.iter().find(|(l, i, _)| (l, i) == (lane, &index));
            let client = match known {
                Some((.., client)) => client.clone(),
                None => {
                    let client = client()?;
                    clients.push((*lane, index, client.clone()));
                    client
                }
            };
            let mut request = reqwest::Request::try_from(request.clone())?;
            *request.timeout_mut() = Some(*timeout);
            replay.push((client, request));
        }
        replays.push(replay);
    }
    Ok(replays)
}

/// Sends the replays until `count` have been sent in total.
async fn replay(replays: &[Replay], count: u32) -> Outcome<()> {
    let workers = u32::try_from(replays.len())?;
    let mut tasks = JoinSet::new();
    for (worker, replay) in (0..workers).zip(replays) {
        let times = count / workers + u32::from(worker < count % workers);
        let same = |(c, r): &(reqwest::Client, reqwest::Request)| Some((c.clone(), r.try_clone()?));
        let replay: Replay = replay.iter().filter_map(same).collect();
        tasks.spawn(async move {
            for _ in 0..times {
                for (client, request) in &replay {
                    let request = request.try_clone().expect("bodies are bytes");
                    let response = client.execute(request).await?.error_for_status()?;
                    drop(response.bytes().await?);
                }
            }
            Ok::<_, reqwest::Error>(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

/// Starts all samples at once: as many as the server allows are in flight, the others wait.
async fn burst(
    recorded: &[(Lane, Request<Bytes>, Duration)],
    count: u32,
) -> Outcome<Vec<Box<[u8]>>> {
    let at_once = usize::try_from(ClientConfig::default().sample_max_concurrent_requests)?;
    let prompts: Vec<Vec<u32>> = (0..count).map(prompt).collect();
    let prompts = Arc::new(Mutex::new(prompts));
    // The same concurrency limits and requests per HTTP client as in the client.
    let mut steps = Vec::new();
    for (lane, request, timeout) in recorded {
        let max_concurrent = if *lane == Lane::Sample { MAX_SUBMITTING } else { at_once };
        let clients = (0..max_concurrent.div_ceil(REQUESTS_PER_CLIENT))
            .map(|_| Ok((client()?, Semaphore::new(REQUESTS_PER_CLIENT))))
            .collect::<Outcome<Vec<_>>>()?;
        let mut request = reqwest::Request::try_from(request.clone())?;
        *request.timeout_mut() = Some(*timeout);
        steps.push((clients, request));
    }
    let steps = Arc::new(steps);
    let mut workers = JoinSet::new();
    for worker in 0..at_once {
        let steps = Arc::clone(&steps);
        let prompts = Arc::clone(&prompts);
        workers.spawn(async move {
            let mut results: Vec<Box<[u8]>> = Vec::new();
            let next = || prompts.lock().pop();
            while let Some(_prompt) = next() {
                let mut result = Bytes::new();
                for (clients, request) in &*steps {
                    let (client, limit) = &clients[worker % clients.len()];
                    let _permit = limit.acquire().await;
                    let request = request.try_clone().expect("bodies are bytes");
                    let response = client.execute(request).await?.error_for_status()?;
                    result = response.bytes().await?;
                }
                results.push(Box::from(&result[..]));
            }
            Ok::<_, reqwest::Error>(results)
        });
    }
    let mut results = Vec::new();
    while let Some(done) = workers.join_next().await {
        results.extend(done??);
    }
    Ok(results)
}

/// Forwards requests and records them.
struct Recorder {
    client: reqwest::Client,
    log: Arc<Log>,
}

impl HttpService for Recorder {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let mut log = self.log.lock();
        log.push((lane, request.clone(), timeout));
        drop(log);
        Box::pin(async move {
            let request = reqwest::Request::try_from(request).map_err(HttpFailure::connect)?;
            let mut received = self.client.execute(request).await.map_err(HttpFailure::connect)?;
            let mut response = Response::builder().status(received.status());
            if let Some(headers) = response.headers_mut() {
                *headers = std::mem::take(received.headers_mut());
            }
            let body = received.bytes().await.map_err(HttpFailure::connect)?;
            response.body(body).map_err(HttpFailure::connect)
        })
    }
}

/// Creates an HTTP client with the settings of the client. TLS is configured but not used.
fn client() -> Outcome<reqwest::Client> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    Ok(reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never().max_retries_per_request(0))
        .connect_timeout(Duration::from_secs(5))
        .tcp_keepalive(Duration::from_secs(30))
        .build()?)
}
