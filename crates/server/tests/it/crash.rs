//! Thirty steps by the client while the server is killed and its disk is full, at any moment: the
//! same losses and weights, bit for bit, as if nothing had happened.

#![cfg(target_os = "linux")]

use tinkex::{AdamParams, Datum, ErrorCategory, LossFn, TrainingClient};

use crate::harness::{Http, MODEL};
use crate::process::Process;

const STEPS: usize = 30;
/// Steps that are under way at once.
const AHEAD: usize = 6;

/// What happens to the server.
#[derive(Clone, Copy, Debug)]
struct Troubles {
    seed: u64,
    kills: usize,
    full: usize,
    /// Seconds of work before a snapshot.
    snapshot: &'static str,
}

const NONE: Troubles = Troubles { seed: 0, kills: 0, full: 0, snapshot: "20" };

struct Noise(u64);

impl Noise {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Saves, however often the disk is full.
async fn save(model: &TrainingClient, name: &str) {
    for attempt in 0.. {
        match model.save_state(&*format!("{name}-{attempt}")).await {
            Ok(_) => return,
            // The only thing that may go wrong.
            Err(error) => assert_eq!(error.category(), Some(ErrorCategory::Server), "{error}"),
        }
    }
}

/// Returns the losses and the last weights.
async fn run(troubles: Troubles) -> (Vec<u64>, Vec<Vec<u8>>) {
    let data = tempfile::tempdir().unwrap();
    let more = ["--snapshot-after", troubles.snapshot];
    let mut process = Process::on(data.path(), 0, &more);
    let port = process.port();
    let service = crate::harness::client(&process.url);
    let model = service.create_lora_training_client(MODEL).rank(4).seed(11).create().await.unwrap();
    let rest = service.rest();
    let (finished, mut progress) = tokio::sync::watch::channel(0_usize);
    let steps = async {
        let mut ahead = std::collections::VecDeque::new();
        let mut losses = Vec::new();
        for n in 0..STEPS + AHEAD {
            if n < STEPS {
                let first = u32::try_from(n).unwrap() + 3;
                let batch = vec![Datum::completion([first, 4, 5], [9, 10]).unwrap(); 2];
                let adam = AdamParams::with_learning_rate(1e-2);
                ahead.push_back(model.step(batch, LossFn::CrossEntropy, adam));
            }
            if n >= AHEAD
                && let Some((pass, step)) = ahead.pop_front()
            {
                losses.push(pass.await.unwrap().metrics["loss:sum"].as_f64().to_bits());
                step.await.unwrap();
                finished.send_replace(losses.len());
            }
            if n % 10 == 9 {
                save(&model, &format!("at-{n}")).await;
            }
        }
        let saved = model.save_weights_external("end").await.unwrap();
        (losses, rest.get_external_weights_urls(&saved.path).await.unwrap().urls)
    };
    let mut steps = std::pin::pin!(steps);
    let mut noise = Noise(troubles.seed);
    let total = troubles.kills + troubles.full;
    let mut kills: Vec<bool> = (0..total).map(|n| n < troubles.kills).collect();
    for n in (1..total).rev() {
        kills.swap(n, usize::try_from(noise.below(n as u64 + 1)).unwrap());
    }
    let mut met = 0;
    let (losses, urls) = loop {
        // Spread over the run, and then a moment that has nothing to do with what is answered.
        let (after, turns) = ((met + 1) * STEPS / (total + 2), noise.below(500));
        let moment = async {
            progress.wait_for(|finished| *finished >= after).await.unwrap();
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            done = steps.as_mut() => break done,
            () = moment, if met < total => {}
        }
        if kills[met] {
            process.kill();
            process = Process::on(data.path(), port, &more);
        } else {
            // In the middle of a payload, or of a commit, or so early that nothing can be written.
            let room = match noise.below(4) {
                0 => 100,
                1 => process.payloads() + noise.below(400),
                _ => process.wal() + noise.below(20_000),
            };
            process.full(room);
            // For as long as some calls take, which are answered all the time.
            let calls = noise.below(150);
            let http = Http::new(&process.url);
            let full = async {
                for _ in 0..calls {
                    assert_eq!(http.get("/api/v1/healthz").await.0, 200);
                }
            };
            tokio::select! {
                done = steps.as_mut() => break done,
                () = full => {}
            }
            process.free();
        }
        met += 1;
    };
    assert_eq!(met, total, "everything happened before the end");
    let mut files = Vec::new();
    for url in urls.values() {
        let reply = crate::harness::plain().get(url).send().await.unwrap();
        files.push(reply.bytes().await.unwrap().to_vec());
    }
    (losses, files)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_of_the_client_survives_kills_and_full_disks_at_any_moment() {
    let whole = run(NONE).await;
    assert!(f64::from_bits(whole.0[29]) < f64::from_bits(whole.0[0]));
    assert_eq!(run(Troubles { seed: 1, kills: 3, ..NONE }).await, whole);
    assert_eq!(run(Troubles { seed: 2, full: 3, snapshot: "0", ..NONE }).await, whole);
}

/// The same over many seeds: `cargo xtask crash`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; cargo xtask crash runs it"]
async fn runs_of_the_client_survive_troubles_over_many_seeds() {
    let whole = run(NONE).await;
    let seeds =
        crate::harness::setting("TINKEX_CRASH_SEEDS").map_or(25, |seeds| seeds.parse().unwrap());
    for seed in 1..=seeds {
        let snapshot = if seed % 2 == 0 { "0" } else { "20" };
        let (kills, full) = [(5, 0), (0, 5), (3, 3)][usize::try_from(seed % 3).unwrap()];
        let troubles = Troubles { seed, kills, full, snapshot };
        assert_eq!(run(troubles).await, whole, "{troubles:?}");
        eprintln!("{troubles:?}: the same bits");
    }
}
