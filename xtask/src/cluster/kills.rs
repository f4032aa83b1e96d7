//! `cargo xtask cluster kills`: training runs of sixty steps while the gateway or the upstream is
//! killed. The losses must equal the losses of an undisturbed run bit for bit.
//!
//! Undisturbed runs, and runs in which SkyRL is killed, share one gateway at the same time: SkyRL's
//! own waits take most of the time of a step.

use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::step::{XtaskError, target};

use super::gateway::Gateway;
use super::program::Program;
use super::sdk::SdkPrograms;
use super::server::SkyrlServer;

/// Number of steps of a run.
pub(super) const STEPS: usize = 60;
/// Number of steps after which `tinkex train` saves a checkpoint.
const SAVE_EVERY: usize = 20;
/// Number of times that the gateway is killed during a run.
const GATEWAY_KILLS: u64 = 4;
/// Number of times that the upstream is killed during a run. Its start takes most of the time.
const UPSTREAM_KILLS: u64 = 2;
/// Time for one run.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Bits of the losses of a run, and of a sample from the trained weights. They must equal the
/// numbers of the undisturbed run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Numbers(Vec<String>);

/// Deterministic pseudo-random numbers.
struct KillRng(u64);

impl KillRng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Program that trains.
#[derive(Clone, Copy)]
pub(super) enum TrainingProgram<'a> {
    /// The official SDK.
    Sdk(&'a SdkPrograms),
    /// `tinkex train`.
    Tinkex,
}

/// A training program that runs.
pub(super) struct Running<'a> {
    trainer: TrainingProgram<'a>,
    process: Child,
    program: Program,
    /// Output of the official SDK.
    output: PathBuf,
}

impl<'a> Running<'a> {
    /// Starts a program. `name` is the name of its folder.
    pub(super) fn start(
        trainer: TrainingProgram<'a>,
        name: &str,
        url: &str,
        model: &str,
    ) -> Result<Self, XtaskError> {
        let folder = target().join("cluster/kills").join(name);
        let program = Program::new(folder.clone(), url, model)?;
        let output = folder.join("steps.txt");
        let process = match trainer {
            TrainingProgram::Sdk(sdk) => sdk.start_steps(url, model, STEPS, &output)?,
            TrainingProgram::Tinkex => program.training("run", STEPS, SAVE_EVERY).spawn()?,
        };
        Ok(Self { trainer, process, program, output })
    }

    /// Returns what the program has written so far.
    pub(super) fn numbers(&self) -> Result<Numbers, XtaskError> {
        Ok(Numbers(match self.trainer {
            TrainingProgram::Sdk(_) => {
                let text = std::fs::read_to_string(&self.output).unwrap_or_default();
                let complete = text.lines().take(text.matches('\n').count());
                let kinds = ["loss ", "sample "];
                let is_number = |line: &&str| kinds.iter().any(|kind| line.starts_with(kind));
                complete.filter(is_number).map(str::to_owned).collect()
            }
            TrainingProgram::Tinkex => {
                let losses = self.program.losses("run")?;
                let line = |(step, loss): (usize, f64)| format!("{step} {:016x}", loss.to_bits());
                losses.into_iter().map(line).collect()
            }
        }))
    }
}

impl Running<'_> {
    /// Waits until the program has finished `count` steps.
    ///
    /// # Errors
    /// If the program fails, or takes longer than [`TIMEOUT`].
    pub(super) fn wait_for(&mut self, count: usize) -> Result<(), XtaskError> {
        let start = Instant::now();
        while self.numbers()?.0.len() < count && !self.has_ended()? {
            wait_for_next_check(start)?;
        }
        Ok(())
    }

    /// Waits for the end of the program and returns its numbers.
    ///
    /// # Errors
    /// If the program fails, or takes longer than [`TIMEOUT`].
    pub(super) fn finish(mut self) -> Result<Numbers, XtaskError> {
        let start = Instant::now();
        while !self.has_ended()? {
            wait_for_next_check(start)?;
        }
        self.numbers()
    }

    /// Returns whether the program has ended with success.
    fn has_ended(&mut self) -> Result<bool, XtaskError> {
        match self.process.try_wait() {
            Ok(Some(status)) if !status.success() => {
                let output = std::fs::read_to_string(&self.output).unwrap_or_default();
                Err(XtaskError::new(format!("the program failed: {status}\n{output}")))
            }
            Ok(ended) => Ok(ended.is_some()),
            Err(error) => Err(XtaskError::new(format!("cannot wait for the program: {error}"))),
        }
    }
}

/// Waits before the next look at a program that started at `start`.
///
/// # Errors
/// If it takes longer than [`TIMEOUT`].
fn wait_for_next_check(start: Instant) -> Result<(), XtaskError> {
    if start.elapsed() > TIMEOUT {
        return Err(XtaskError::new(format!("no end after {} s", TIMEOUT.as_secs())));
    }
    std::thread::sleep(Duration::from_millis(20));
    Ok(())
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Compares the numbers of a run with the numbers of the undisturbed run.
pub(super) fn compare(found: &Numbers, expected: &Numbers) -> Result<(), XtaskError> {
    if found == expected {
        return Ok(());
    }
    let mut pairs = found.0.iter().zip(&expected.0);
    let difference = pairs.find(|(a, b)| a != b).map_or_else(
        || format!("{} lines instead of {}", found.0.len(), expected.0.len()),
        |(a, b)| format!("{a} instead of {b}"),
    );
    Err(XtaskError::new(format!("the run differs from the undisturbed one: {difference}")))
}

/// Moments at which a process is killed during a run.
fn moments(random: &mut KillRng, kills: u64) -> Vec<usize> {
    let mut moments: Vec<usize> = (0..kills)
        .map(|_| usize::try_from(random.below(STEPS as u64 - 1)).unwrap_or_default())
        .collect();
    moments.sort_unstable();
    moments
}

/// Waits for a moment of the run.
fn wait_for_moment(
    running: &mut Running<'_>,
    moment: usize,
    random: &mut KillRng,
) -> Result<(), XtaskError> {
    running.wait_for(moment)?;
    if running.has_ended()? {
        return Err(XtaskError::new("the run ended before all kills"));
    }
    // Somewhere within the next step.
    std::thread::sleep(Duration::from_millis(random.below(400)));
    Ok(())
}

/// Training runs against one SkyRL server.
pub(super) struct Kills<'a> {
    trainers: [TrainingProgram<'a>; 2],
    /// Numbers of undisturbed runs of the trainers.
    undisturbed: [Numbers; 2],
    /// Upstream of the gateways.
    url: String,
    model: String,
    /// Number of runs at the same time.
    at_once: usize,
}

impl<'a> Kills<'a> {
    /// Trains twice with each program and requires equal numbers.
    pub(super) fn new(
        upstream: &SkyrlServer,
        sdk: &'a SdkPrograms,
        port: u16,
        at_once: usize,
    ) -> Result<Self, XtaskError> {
        let url = upstream.url().to_owned();
        let model = upstream.model();
        let trainers = [TrainingProgram::Sdk(sdk), TrainingProgram::Tinkex];
        let undisturbed = [Numbers(Vec::new()), Numbers(Vec::new())];
        let mut kills = Self { trainers, undisturbed, url, model, at_once };
        let gateway = kills.gateway("undisturbed", port)?;
        let runs = [0, 1, 2, 3].map(|n| (n, trainers[n % 2]));
        let mut numbers = Vec::new();
        for runs in runs.chunks(at_once) {
            let start = |&(n, trainer): &(usize, _)| {
                Running::start(trainer, &format!("undisturbed-{n}"), gateway.url(), &kills.model)
            };
            let runs = runs.iter().map(start).collect::<Result<Vec<_>, _>>()?;
            for running in runs {
                numbers.push(running.finish()?);
            }
        }
        for (n, repeated) in numbers.drain(2..).collect::<Vec<_>>().iter().enumerate() {
            compare(repeated, &numbers[n])?;
            println!("    undisturbed, twice: {} equal numbers", repeated.0.len());
        }
        for (n, numbers) in numbers.into_iter().enumerate() {
            kills.undisturbed[n] = numbers;
        }
        Ok(kills)
    }

    fn gateway(&self, name: &str, port: u16) -> Result<Gateway, XtaskError> {
        Gateway::start(name, port, std::slice::from_ref(&self.url))
    }

    /// Returns the index of the program that trains with a seed.
    fn trainer(seed: u64) -> usize {
        usize::from(seed.is_multiple_of(2))
    }

    fn start(&self, name: &str, seed: u64, url: &str) -> Result<Running<'a>, XtaskError> {
        Running::start(self.trainers[Self::trainer(seed)], name, url, &self.model)
    }

    /// Requires that a run with a seed has the numbers of the undisturbed run.
    fn finish(&self, running: Running<'_>, seed: u64) -> Result<(), XtaskError> {
        compare(&running.finish()?, &self.undisturbed[Self::trainer(seed)])
    }

    /// Kills the gateway during one run for each seed from 1 to `seeds`.
    pub(super) fn of_gateway(&self, port: u16, seeds: u64) -> Result<String, XtaskError> {
        // One after the other: gateways that share a SkyRL server would share its slots, in which
        // SkyRL leaves gradients of unloaded models.
        for seed in 1..=seeds {
            self.kill_gateway(port, seed)?;
        }
        let kills = seeds * GATEWAY_KILLS;
        Ok(format!("{kills} times in {seeds} runs of {STEPS} steps: losses equal bit for bit"))
    }

    /// Kills the gateway during a run, at moments that follow from `seed`.
    fn kill_gateway(&self, port: u16, seed: u64) -> Result<(), XtaskError> {
        let start = Instant::now();
        let name = format!("gateway-{seed}");
        let mut gateway = self.gateway(&name, port)?;
        let mut random = KillRng(seed);
        let mut run = || {
            let mut running = self.start(&name, seed, gateway.url())?;
            for moment in moments(&mut random, GATEWAY_KILLS) {
                wait_for_moment(&mut running, moment, &mut random)?;
                gateway.kill_and_start_again()?;
            }
            self.finish(running, seed)
        };
        let run = run();
        run.map_err(|error| seed_failed(seed, &error, &gateway))?;
        let seconds = start.elapsed().as_secs_f64();
        println!("    seed {seed}: gateway killed {GATEWAY_KILLS} times, equal, {seconds:.0} s");
        Ok(())
    }

    /// Kills SkyRL during `seeds` runs, some of them at the same time through one gateway.
    pub(super) fn of_upstream(
        &self,
        upstream: &mut SkyrlServer,
        port: u16,
        seeds: u64,
    ) -> Result<String, XtaskError> {
        let seeds: Vec<u64> = (1..=seeds).collect();
        let mut kills = 0;
        for seeds in seeds.chunks(self.at_once) {
            let start = Instant::now();
            let first = seeds[0];
            let gateway = self.gateway(&format!("upstream-{first}"), port)?;
            self.kill_upstream(upstream, &gateway, seeds)
                .map_err(|error| seed_failed(first, &error, &gateway))?;
            let seconds = start.elapsed().as_secs_f64();
            println!(
                "    seeds {seeds:?} at once: SkyRL killed {UPSTREAM_KILLS} times, equal, \
                 {seconds:.0} s"
            );
            kills += UPSTREAM_KILLS;
        }
        let runs = seeds.len();
        Ok(format!("{kills} times in {runs} runs of {STEPS} steps: losses equal bit for bit"))
    }

    /// Kills SkyRL while it trains the runs of `seeds`, at moments of the first.
    fn kill_upstream(
        &self,
        upstream: &mut SkyrlServer,
        gateway: &Gateway,
        seeds: &[u64],
    ) -> Result<(), XtaskError> {
        let start = |seed: &u64| self.start(&format!("upstream-{seed}"), *seed, gateway.url());
        let mut runs = seeds.iter().map(start).collect::<Result<Vec<_>, _>>()?;
        let mut random = KillRng(seeds[0]);
        for moment in moments(&mut random, UPSTREAM_KILLS) {
            wait_for_moment(&mut runs[0], moment, &mut random)?;
            upstream.kill();
            std::thread::sleep(Duration::from_millis(random.below(2_000)));
            upstream.start_again()?;
        }
        runs.into_iter().zip(seeds).try_for_each(|(running, seed)| self.finish(running, *seed))
    }
}

fn seed_failed(seed: u64, error: &XtaskError, gateway: &Gateway) -> XtaskError {
    XtaskError::new(format!("seed {seed}: {error}\n  log: {}", gateway.log_path()))
}
