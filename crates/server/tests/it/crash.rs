//! Thirty training steps through the client while the server is killed and its disk is full at
//! random moments. Losses and weights must be bit-identical to an undisturbed run.

#![cfg(target_os = "linux")]

use std::time::Duration;

use tinkex::{AdamParams, Datum, ErrorCategory, LoraOptions, LossFn, TrainingClient};

use crate::child_server::ChildOptions;
use crate::harness::{Http, MODEL};
use crate::process::Process;

const STEPS: usize = 30;
/// Maximum number of steps in flight.
const AHEAD: usize = 6;

/// Faults to inject into a run.
#[derive(Clone, Copy, Debug)]
struct Faults {
    seed: u64,
    /// Number of times that the server is killed.
    kills: usize,
    /// Number of times that the disk is full.
    full: usize,
    /// Compute time in seconds after which a snapshot is taken.
    snapshot: u64,
}

const NONE: Faults = Faults { seed: 0, kills: 0, full: 0, snapshot: 20 };

/// Deterministic pseudo-random numbers.
struct FaultRng(u64);

impl FaultRng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Saves a checkpoint, retrying while the disk is full.
async fn save(model: &TrainingClient, name: &str) {
    for attempt in 0.. {
        match model.save_state(&*format!("{name}-{attempt}")).await {
            Ok(_) => return,
            // Only a server error, the full disk, is expected.
            Err(error) => assert_eq!(error.category(), Some(ErrorCategory::Server), "{error}"),
        }
    }
}

/// Runs the training and returns the losses and the exported files.
async fn run(faults: Faults) -> (Vec<u64>, Vec<Vec<u8>>) {
    let data = tempfile::tempdir().unwrap();
    let options = ChildOptions {
        snapshot_after: Some(Duration::from_secs(faults.snapshot)),
        ..ChildOptions::default()
    };
    let mut process = Process::with(data.path(), 0, options.clone());
    let port = process.port();
    let service = crate::harness::client(&process.url);
    let model = service
        .create_lora_training_client(LoraOptions::new(MODEL).rank(4).seed(11))
        .await
        .unwrap();
    let rest = service.rest();
    let (finished, mut progress) = tokio::sync::watch::channel(0_usize);
    let total = faults.kills + faults.full;
    let (faults_left, mut left) = tokio::sync::watch::channel(total);
    let steps = async {
        let mut in_flight = std::collections::VecDeque::new();
        let mut losses = Vec::new();
        for n in 0..STEPS + AHEAD {
            if n < STEPS {
                let first = u32::try_from(n).unwrap() + 3;
                let batch = vec![Datum::completion([first, 4, 5], [9, 10]).unwrap(); 2];
                let adam = AdamParams::with_learning_rate(1e-2);
                in_flight.push_back(model.step(batch, LossFn::CrossEntropy, adam));
            }
            if n >= AHEAD
                && let Some(step) = in_flight.pop_front()
            {
                losses.push(step.await.unwrap().pass.metrics["loss:sum"].as_f64().to_bits());
                finished.send_replace(losses.len());
            }
            if n % 10 == 9 {
                save(&model, &format!("at-{n}")).await;
            }
        }
        // A fast run must not end before the last fault.
        left.wait_for(|left| *left == 0).await.unwrap();
        let saved = model.save_weights_external("end").await.unwrap();
        (losses, rest.get_external_weights_urls(&saved.path).await.unwrap().urls)
    };
    let mut steps = std::pin::pin!(steps);
    let mut rng = FaultRng(faults.seed);
    let mut kills: Vec<bool> = (0..total).map(|n| n < faults.kills).collect();
    for n in (1..total).rev() {
        kills.swap(n, usize::try_from(rng.below(n as u64 + 1)).unwrap());
    }
    let mut injected = 0;
    let (losses, urls) = loop {
        // Spread the faults over the run. The random number of yields makes the moment independent
        // of the end of a step.
        let after = (injected + 1) * STEPS / (total + 2);
        let yields = rng.below(500);
        let moment = async {
            progress.wait_for(|finished| *finished >= after).await.unwrap();
            for _ in 0..yields {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            done = steps.as_mut() => break done,
            () = moment, if injected < total => {}
        }
        let is_kill = kills[injected];
        injected += 1;
        faults_left.send_replace(total - injected);
        if is_kill {
            process.kill();
            process = Process::with(data.path(), port, options.clone());
        } else {
            // Fail in the middle of a payload or of a commit, or before anything is written.
            let limit = match rng.below(4) {
                0 => 100,
                1 => process.payloads() + rng.below(400),
                _ => process.wal() + rng.below(20_000),
            };
            process.fill_disk(limit);
            // Keep the disk full during some health checks, which must succeed.
            let checks = rng.below(150);
            let http = Http::new(&process.url);
            let full = async {
                for _ in 0..checks {
                    assert_eq!(http.get("/api/v1/healthz").await.0, 200);
                }
            };
            tokio::select! {
                done = steps.as_mut() => break done,
                () = full => {}
            }
            process.free_disk();
        }
    };
    assert_eq!(injected, total, "the run ended before all faults");
    let mut files = Vec::new();
    for url in urls.values() {
        let response = crate::harness::http_client().get(url).send().await.unwrap();
        files.push(response.bytes().await.unwrap().to_vec());
    }
    (losses, files)
}

#[tokio::test(flavor = "multi_thread")]
async fn training_survives_kills_and_full_disks() {
    let undisturbed = run(NONE).await;
    assert!(f64::from_bits(undisturbed.0[29]) < f64::from_bits(undisturbed.0[0]));
    assert_eq!(run(Faults { seed: 1, kills: 3, ..NONE }).await, undisturbed);
    assert_eq!(run(Faults { seed: 2, full: 3, snapshot: 0, ..NONE }).await, undisturbed);
}

/// Many seeds; run by `cargo xtask crash`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; cargo xtask crash runs it"]
async fn training_survives_faults_over_many_seeds() {
    let undisturbed = run(NONE).await;
    let seeds =
        crate::harness::setting("TINKEX_CRASH_SEEDS").map_or(25, |seeds| seeds.parse().unwrap());
    for seed in 1..=seeds {
        let snapshot = if seed % 2 == 0 { 0 } else { 20 };
        let (kills, full) = [(5, 0), (0, 5), (3, 3)][usize::try_from(seed % 3).unwrap()];
        let faults = Faults { seed, kills, full, snapshot };
        assert_eq!(run(faults).await, undisturbed, "{faults:?}");
        eprintln!("{faults:?}: bit-identical");
    }
}
