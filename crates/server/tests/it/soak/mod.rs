//! Soak test: client programs against two servers, of which one is killed or stopped at random
//! moments.
//!
//! The other server runs undisturbed. Every program runs on both and must compute the same. At the
//! end, no process may use more memory, file handles, threads or disk than at the start. Leaks of a
//! server process show in the undisturbed server, leaks of a data folder in the killed one, and
//! leaks of the client in the process of the test.

#![cfg(target_os = "linux")]

mod program;
mod usage;

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::{Instant, interval, sleep};

use crate::child_server::ChildOptions;
use crate::harness::{Http, setting};
use crate::process::Process;
use program::StreamCounts;
use usage::{Usage, UsageHistory};

/// Number of programs that run at the same time on each server.
const PROGRAMS: u64 = 3;
/// Fraction of the duration, at its start, that is not compared.
const WARM_UP: f64 = 0.2;
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// A snapshot after each second of compute time, so that kills find snapshots; and a KV cache that
/// is full after seconds, because it is meant to grow up to its limit.
fn child_options() -> ChildOptions {
    ChildOptions {
        snapshot_after: Some(Duration::from_secs(1)),
        cache_bytes: Some(8 << 20),
        ..ChildOptions::default()
    }
}

/// Number of programs that have ended, and what happened to their streams.
#[derive(Default)]
struct Counts {
    programs: AtomicU64,
    streams: AtomicU64,
    interrupted: AtomicU64,
}

/// Runs programs with the seeds `seed`, `seed + PROGRAMS`, … on both servers until `end`.
async fn run_programs(urls: [&str; 2], mut seed: u64, end: Instant, counts: &Counts) {
    while Instant::now() < end {
        let [killed, undisturbed] = urls.map(|url| program::run(url, seed));
        let (killed, undisturbed) = tokio::join!(killed, undisturbed);
        let (computed, streams): (_, StreamCounts) =
            killed.unwrap_or_else(|error| panic!("program {seed} on the killed server: {error}"));
        let (expected, expected_streams) = undisturbed
            .unwrap_or_else(|error| panic!("program {seed} on the undisturbed server: {error}"));
        assert_eq!(computed, expected, "program {seed} computed something else");
        assert_eq!(expected_streams.interrupted, 0, "program {seed}: a stream failed");
        counts.programs.fetch_add(1, Ordering::Relaxed);
        counts.streams.fetch_add(streams.complete + expected_streams.complete, Ordering::Relaxed);
        counts.interrupted.fetch_add(streams.interrupted, Ordering::Relaxed);
        seed += PROGRAMS;
    }
}

/// Number of disturbances of a server.
#[derive(Default)]
struct Disturbances {
    kills: u64,
    /// Times that the process was stopped with SIGSTOP for some seconds.
    stops: u64,
}

/// Kills the server and starts it again, or stops it for some seconds, after random times until
/// `end`.
async fn disturb(process: &Mutex<Process>, data: &Path, seed: u64, end: Instant) -> Disturbances {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut done = Disturbances::default();
    loop {
        let pause = Duration::from_millis(rng.u64(500..12_000));
        if Instant::now() + pause >= end {
            return done;
        }
        sleep(pause).await;
        if rng.u32(0..4) == 0 {
            process.lock().unwrap().send_signal(Signal::STOP);
            sleep(Duration::from_millis(rng.u64(500..8_000))).await;
            process.lock().unwrap().send_signal(Signal::CONT);
            done.stops += 1;
            continue;
        }
        tokio::task::block_in_place(|| {
            let mut process = process.lock().unwrap();
            let port = process.port();
            process.kill_now();
            *process = Process::with(data, port, child_options());
        });
        done.kills += 1;
    }
}

/// Samples the usage of the processes until the future is dropped.
async fn observe(
    processes: [&Mutex<Process>; 2],
    folders: [&Path; 2],
    start: Instant,
    histories: &Mutex<[UsageHistory; 3]>,
) {
    let mut ticks = interval(SAMPLE_INTERVAL);
    loop {
        ticks.tick().await;
        let mut usages = tokio::task::block_in_place(|| {
            let pids = processes.map(|process| process.lock().unwrap().pid());
            [
                Usage::read(pids[0], Some(folders[0])),
                Usage::read(pids[1], Some(folders[1])),
                Usage::read(std::process::id(), None),
            ]
        });
        let mut histories = histories.lock().unwrap();
        for (history, usage) in histories.iter_mut().zip(&mut usages) {
            if let Some(usage) = usage.take() {
                history.push(start.elapsed(), usage);
            }
        }
    }
}

/// Minutes of load; run by `cargo xtask soak`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; cargo xtask soak runs it"]
async fn resources_stay_flat_while_a_server_is_killed() {
    let number = |name: &str, default: u64| {
        setting(name).map_or(default, |value| value.parse().expect("a number"))
    };
    let duration = Duration::from_secs(number("TINKEX_SOAK_SECONDS", 60));
    let seed = number("TINKEX_SOAK_SEED", 1);
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let folders = folders.each_ref().map(tempfile::TempDir::path);
    let processes = folders.map(|folder| Process::with(folder, 0, child_options()));
    let urls = processes.each_ref().map(|process| process.url.clone());
    let urls = urls.each_ref().map(String::as_str);
    let processes = processes.map(Mutex::new);
    let counts = Counts::default();
    let histories = Mutex::new(<[UsageHistory; 3]>::default());
    let start = Instant::now();
    let end = start + duration;
    let first = seed.wrapping_mul(1_000_000);
    let programs = (0..PROGRAMS).map(|n| run_programs(urls, first + n, end, &counts));
    let programs = futures_util::future::join_all(programs);
    let disturbances = disturb(&processes[0], folders[0], seed, end);
    let observation = observe(processes.each_ref(), folders, start, &histories);
    let Disturbances { kills, stops } = tokio::select! {
        (_, done) = async { tokio::join!(programs, disturbances) } => done,
        () = observation => unreachable!("the observation has no end"),
    };
    let mut report = format!(
        "soak: {} s, seed {seed}: {} programs on each server, {kills} kills, {stops} stops, {} complete \
         streams, {} interrupted\n{:<18} {:<13} {:>11} {:>11} {:>9} {:>9}\n",
        duration.as_secs(),
        counts.programs.load(Ordering::Relaxed),
        counts.streams.load(Ordering::Relaxed),
        counts.interrupted.load(Ordering::Relaxed),
        "process",
        "resource",
        "first third",
        "last third",
        "maximum",
        "allowed",
    );
    let names = ["killed server", "undisturbed server", "clients"];
    let period = (duration.mul_f64(WARM_UP), duration);
    let mut growing = Vec::new();
    for (history, name) in histories.into_inner().unwrap().iter().zip(names) {
        growing.extend(history.compare(name, period, &mut report));
    }
    eprintln!("{report}");
    for (url, name) in urls.into_iter().zip(names) {
        let metrics = Http::new(url).metrics().await;
        let held = ["sessions", "requests", "result_bytes", "payload_bytes"];
        let held = held.map(|field| format!("{field} {}", metrics[field]));
        eprintln!("{name} at the end: {}", held.join(", "));
    }
    assert!(counts.programs.into_inner() > 0, "no program ended");
    assert!(growing.is_empty(), "not flat: {growing:?}");
}
