//! `cargo xtask cluster kills`: training runs of sixty steps while the gateway or the upstream is
//! killed. Their losses must equal those of an undisturbed run bit for bit.

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
/// Number of times that the gateway is killed during a run.
const GATEWAY_KILLS: u64 = 4;
/// Number of times that the upstream is killed during a run. Its start takes most of the time.
const UPSTREAM_KILLS: u64 = 2;
/// Time for one run.
const TIMEOUT: Duration = Duration::from_secs(600);

/// What a run must have in common with the undisturbed one: the bits of its losses, and of a
/// sample from the trained weights.
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

/// Process to kill.
enum Victim<'a> {
    Nothing,
    Gateway,
    Upstream(&'a mut SkyrlServer),
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
            TrainingProgram::Tinkex => program.training("run", STEPS).spawn()?,
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
            check_time(start)?;
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
            check_time(start)?;
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

/// Waits a moment. Fails if the time for one run has passed since `start`.
fn check_time(start: Instant) -> Result<(), XtaskError> {
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

/// Runs the program through a new gateway, and kills the victim at moments that follow from `seed`.
fn run(
    trainer: TrainingProgram<'_>,
    gateway: &mut Gateway,
    model: &str,
    seed: u64,
    mut victim: Victim<'_>,
) -> Result<Numbers, XtaskError> {
    let mut random = KillRng(seed);
    let kills = match victim {
        Victim::Nothing => 0,
        Victim::Gateway => GATEWAY_KILLS,
        Victim::Upstream(_) => UPSTREAM_KILLS,
    };
    let steps = STEPS as u64;
    let mut moments: Vec<u64> = (0..kills).map(|_| random.below(steps - 1)).collect();
    moments.sort_unstable();
    let mut running = Running::start(trainer, "run", gateway.url(), model)?;
    for moment in moments {
        running.wait_for(usize::try_from(moment).unwrap_or(STEPS))?;
        if running.has_ended()? {
            return Err(XtaskError::new("the run ended before all kills"));
        }
        // Somewhere within the next step.
        std::thread::sleep(Duration::from_millis(random.below(400)));
        match &mut victim {
            Victim::Nothing => {}
            Victim::Gateway => gateway.kill_and_start_again()?,
            Victim::Upstream(upstream) => {
                upstream.kill();
                std::thread::sleep(Duration::from_millis(random.below(2_000)));
                upstream.start_again()?;
            }
        }
    }
    running.finish()
}

/// Compares the numbers of a run with those of the undisturbed one.
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

/// Kills the gateway during one run for each of `seeds` seeds, and the upstream during half as many.
pub(super) fn check(
    upstream: &mut SkyrlServer,
    sdk: &SdkPrograms,
    port: u16,
    seeds: u64,
) -> Result<String, XtaskError> {
    let (url, model) = (upstream.url().to_owned(), upstream.model());
    let gateway = |name: &str| Gateway::start(name, port, std::slice::from_ref(&url));
    let trainers = [TrainingProgram::Sdk(sdk), TrainingProgram::Tinkex];
    let mut undisturbed = Vec::new();
    for trainer in trainers {
        let run = || run(trainer, &mut gateway("undisturbed")?, &model, 0, Victim::Nothing);
        let numbers = run()?;
        compare(&run()?, &numbers)?;
        println!("    undisturbed, twice: {} equal numbers", numbers.0.len());
        undisturbed.push(numbers);
    }
    let of = |seed: u64| usize::from(seed.is_multiple_of(2));
    for seed in 1..=seeds {
        let mut gateway = gateway(&format!("gateway-{seed}"))?;
        let failed = |error, log| XtaskError::new(format!("seed {seed}: {error}\n  log: {log}"));
        let start = Instant::now();
        run(trainers[of(seed)], &mut gateway, &model, seed, Victim::Gateway)
            .and_then(|numbers| compare(&numbers, &undisturbed[of(seed)]))
            .map_err(|error| failed(error, gateway.log_path()))?;
        let seconds = start.elapsed().as_secs_f64();
        println!("    seed {seed}: gateway killed {GATEWAY_KILLS} times, equal, {seconds:.0} s");
    }
    let upstream_seeds = seeds.div_ceil(2);
    for seed in 1..=upstream_seeds {
        let mut gateway = gateway(&format!("upstream-{seed}"))?;
        let failed = |error, log| XtaskError::new(format!("seed {seed}: {error}\n  log: {log}"));
        let start = Instant::now();
        run(trainers[of(seed)], &mut gateway, &model, seed, Victim::Upstream(upstream))
            .and_then(|numbers| compare(&numbers, &undisturbed[of(seed)]))
            .map_err(|error| failed(error, gateway.log_path()))?;
        let seconds = start.elapsed().as_secs_f64();
        println!("    seed {seed}: SkyRL killed {UPSTREAM_KILLS} times, equal, {seconds:.0} s");
    }
    let kills = seeds * GATEWAY_KILLS;
    let upstream_kills = upstream_seeds * UPSTREAM_KILLS;
    Ok(format!(
        "{STEPS} steps; gateway killed {kills} times in {seeds} runs, SkyRL {upstream_kills} times \
         in {upstream_seeds} runs: all losses equal bit for bit"
    ))
}
