//! Runs the contenders in alternation against one server and compares the results.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use crate::Outcome;
use crate::table::{Row, Target, micros, millis, table};
use crate::usage::Usage;
use crate::work::{Kind, Work};

/// Amount of work per measurement.
struct Plan {
    rounds: usize,
    /// Repetitions for Python, and for the other contenders, which are faster.
    samples: (u32, u32),
    steps: (u32, u32),
    /// Process starts per contender.
    starts: usize,
    /// Samples at once, for the measurements of memory.
    burst: u32,
    /// Samples at once, for the check that no result is lost.
    many: u32,
    /// Samples at once of one and of several service clients.
    divided: u32,
}

const FULL: Plan = Plan {
    rounds: 3,
    samples: (2_000, 20_000),
    steps: (10, 50),
    starts: 15,
    burst: 10_000,
    many: 100_000,
    divided: 15_000,
};

/// Plan that only checks that everything runs; its figures are not meaningful.
const QUICK: Plan = Plan {
    rounds: 1,
    samples: (300, 3_000),
    steps: (2, 10),
    starts: 3,
    burst: 1_000,
    many: 5_000,
    divided: 1_500,
};

/// Number of samples in progress at the same time.
const CONCURRENT: usize = 128;
/// Milliseconds by which the server delays results, so that thousands of samples are pending at the
/// same time.
const HOLD_MS: u32 = 500;
/// Number of service clients among which samples are divided.
const SERVICES: usize = 6;

/// Runs the comparison. Returns whether all targets were met.
pub(crate) fn run(options: &[&str]) -> Outcome<bool> {
    let mut python = None;
    let mut plan = &FULL;
    let mut rest = options.iter();
    while let Some(option) = rest.next() {
        match *option {
            "--quick" => plan = &QUICK,
            "--python" => python = rest.next().map(PathBuf::from),
            other => return Err(format!("unknown option {other}").into()),
        }
    }
    let python =
        python.ok_or("--python PATH is missing: pass a Python interpreter with tinker==0.36.0")?;
    let comparison = Comparison { server: Server::start()?, python };
    let rows = comparison.rows(plan)?;
    println!("\n{}", table(&rows));
    let met = rows.iter().all(Row::met);
    if plan.many < FULL.many {
        println!("quick run: the figures are not meaningful");
        return Ok(true);
    }
    Ok(met)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contender {
    Python,
    Floor,
    Ours,
}

struct Comparison {
    server: Server,
    python: PathBuf,
}

impl Comparison {
    /// Runs all measurements and returns one row for each.
    fn rows(&self, plan: &Plan) -> Outcome<Vec<Row>> {
        let mut rows = Vec::new();
        let before = self.server.usage()?;
        let samples = self.rounds(plan, Kind::Samples)?;
        let served = self.server.usage()?;
        let cpu = samples.map(|best| best.cpu_each);
        rows.push(Row::new(
            "CPU per sample",
            cpu,
            micros,
            &[Target::OfPeer(30.0), Target::OfFloor(2.0)],
        ));
        let rate = samples.map(|best| best.per_second);
        let rate_row = |n: f64| format!("{n:.0}");
        rows.push(Row::new("samples per second", rate, rate_row, &[Target::TimesPeer(20.0)]));
        let each = (served.cpu_seconds - before.cpu_seconds) / (served.count - before.count);
        // A sample takes two requests: one to submit it and one to poll for its result.
        let most = 0.5 / each;
        println!("server: {} of CPU per request, so {most:.0} samples/s at most", micros(each));

        let steps = self.rounds(plan, Kind::Steps)?;
        let cpu = steps.map(|best| best.cpu_each);
        rows.push(Row::new("CPU per training step", cpu, millis, &[Target::OfPeer(10.0)]));

        let start = self.starts(plan)?;
        rows.push(Row::new("start to first sample", start, millis, &[Target::OfPeer(20.0)]));

        let memory = |usage: Usage| usage.peak_kib * 1024.0 / 1e6;
        let megabytes = |n: f64| format!("{n:.0} MB");
        let target = [Target::AtMost(150.0, "150 MB")];
        let python = memory(self.burst(Contender::Python, plan.burst, 0)?);
        let ours = memory(self.burst(Contender::Ours, plan.burst, 0)?);
        let name = format!("peak memory, {} samples at once", plan.burst);
        let peaks = PerContender { python: Some(python), floor: None, ours };
        rows.push(Row::new(&name, peaks, megabytes, &target));
        // With two thousand connections HTTP needs most of the memory, so the target is
        // relative to the floor.
        let floor = memory(self.burst(Contender::Floor, plan.burst, HOLD_MS)?);
        let ours = memory(self.burst(Contender::Ours, plan.burst, HOLD_MS)?);
        let name = format!("all at once, each result delayed by {HOLD_MS} ms");
        let peaks = PerContender { python: None, floor: Some(floor), ours };
        rows.push(Row::new(&name, peaks, megabytes, &[Target::OfFloor(1.25)]));

        // Every result is checked against its prompt: a lost one fails the run.
        let many = self.burst(Contender::Ours, plan.many, HOLD_MS)?;
        let name = format!("results of {} samples at once", plan.many);
        let counted = PerContender { python: None, floor: None, ours: many.count };
        let target = Target::AtLeast(f64::from(plan.many), "all");
        rows.push(Row::new(&name, counted, rate_row, &[target]));
        println!(
            "{} samples at once: {:.1} s, {:.0} MB",
            plan.many,
            many.wall_seconds,
            memory(many)
        );

        let (one, several) = self.services(plan)?;
        let name = format!("{} samples of {SERVICES} service clients at once", plan.divided);
        let figures = PerContender { python: None, floor: Some(one), ours: several };
        let seconds = |n: f64| format!("{n:.2} s");
        rows.push(Row::new(&name, figures, seconds, &[Target::OfOneService(1.3)]));
        Ok(rows)
    }

    /// Returns the seconds that samples take with one service client and divided among several, the
    /// best of all rounds.
    fn services(&self, plan: &Plan) -> Outcome<(f64, f64)> {
        let mut best = [f64::INFINITY; 2];
        for round in 1..=plan.rounds {
            for (services, best) in [1, SERVICES].into_iter().zip(&mut best) {
                let url = self.server.url(HOLD_MS);
                let count = plan.divided;
                let work = Work { kind: Kind::Services, url, count, concurrent: services };
                let usage = self.work(Contender::Ours, &work)?;
                let seconds = usage.wall_seconds;
                println!("{services} service clients, round {round}: {seconds:.2} s");
                *best = best.min(seconds);
            }
        }
        let [one, several] = best;
        Ok((one, several))
    }

    /// Runs all three contenders in alternation and keeps the best round of each.
    fn rounds(&self, plan: &Plan, kind: Kind) -> Outcome<PerContender<Best>> {
        let (few, many) = if kind == Kind::Samples { plan.samples } else { plan.steps };
        let mut best = [Best::NONE; 3];
        for round in 1..=plan.rounds {
            let all = [Contender::Python, Contender::Floor, Contender::Ours];
            for (contender, best) in all.into_iter().zip(&mut best) {
                let count = if contender == Contender::Python { few } else { many };
                let work = Work { kind, url: self.server.url(0), count, concurrent: CONCURRENT };
                let usage = self.work(contender, &work)?;
                let cpu = usage.cpu_each();
                let rate = usage.per_second();
                let name = kind.name();
                println!(
                    "{name}, round {round}, {contender:?}: {} of CPU, {rate:.1}/s",
                    micros(cpu)
                );
                best.cpu_each = best.cpu_each.min(cpu);
                best.per_second = best.per_second.max(rate);
            }
        }
        let [python, floor, ours] = best;
        Ok(PerContender { python: Some(python), floor: Some(floor), ours })
    }

    /// Returns the median time from process start to first sample.
    fn starts(&self, plan: &Plan) -> Outcome<PerContender<f64>> {
        let work = Work { kind: Kind::Start, url: self.server.url(0), count: 1, concurrent: 1 };
        let mut python = Vec::new();
        let mut ours = Vec::new();
        for _ in 0..plan.starts {
            for (contender, times) in
                [(Contender::Python, &mut python), (Contender::Ours, &mut ours)]
            {
                let start = Instant::now();
                self.work(contender, &work)?;
                times.push(start.elapsed().as_secs_f64());
            }
        }
        let python = median(python);
        let ours = median(ours);
        println!("start to first sample: Python {}, ours {}", millis(python), millis(ours));
        Ok(PerContender { python: Some(python), floor: None, ours })
    }

    /// Starts `count` samples at once, with results delayed by `hold_ms` milliseconds.
    fn burst(&self, contender: Contender, count: u32, hold_ms: u32) -> Outcome<Usage> {
        let url = self.server.url(hold_ms);
        let work = Work { kind: Kind::Burst, url, count, concurrent: 1 };
        self.work(contender, &work)
    }

    /// Runs the process of a contender until it reports its usage.
    fn work(&self, contender: Contender, work: &Work) -> Outcome<Usage> {
        let mut command = match contender {
            Contender::Python => {
                let mut command = Command::new(&self.python);
                command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/client/peer.py"));
                // Precompiled modules and no telemetry, both in favour of Python.
                command.env_remove("PYTHONDONTWRITEBYTECODE").env("TINKER_TELEMETRY", "0");
                command
            }
            Contender::Floor | Contender::Ours => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg(if contender == Contender::Ours { "ours" } else { "floor" });
                command
            }
        };
        command.args(work.arguments()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{contender:?}: {error}"))?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let usage = Usage::parse(line.trim());
        // The exit of the process is not measured.
        let status =
            if usage.is_ok() { child.kill().and_then(|()| child.wait()) } else { child.wait() };
        usage.map_err(|error| {
            format!("{contender:?}, {}: {error} ({status:?})", work.kind.name()).into()
        })
    }
}

/// One figure for each contender.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerContender<T> {
    pub(crate) python: Option<T>,
    pub(crate) floor: Option<T>,
    pub(crate) ours: T,
}

impl<T> PerContender<T> {
    fn map<U>(self, f: impl Fn(&T) -> U) -> PerContender<U> {
        let Self { python, floor, ours } = &self;
        PerContender {
            python: python.as_ref().map(&f),
            floor: floor.as_ref().map(&f),
            ours: f(ours),
        }
    }
}

/// Best figures of all rounds, which need not be of the same round.
#[derive(Clone, Copy, Debug)]
struct Best {
    cpu_each: f64,
    per_second: f64,
}

impl Best {
    const NONE: Self = Self { cpu_each: f64::INFINITY, per_second: 0.0 };
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The benchmark server, in a process of its own.
struct Server {
    child: Child,
    /// Standard input and output of the server, used by [`Server::usage`].
    pipes: std::cell::RefCell<(ChildStdin, BufReader<ChildStdout>)>,
    port: u16,
}

impl Server {
    fn start() -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child =
            command.arg("server").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the server has no pipes".into());
        };
        let mut stdout = BufReader::new(stdout);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        let port = line.trim().parse()?;
        Ok(Self { child, pipes: (stdin, stdout).into(), port })
    }

    fn url(&self, hold_ms: u32) -> String {
        let Self { port, .. } = self;
        match hold_ms {
            0 => format!("http://127.0.0.1:{port}"),
            _ => format!("http://127.0.0.1:{port}/hold/{hold_ms}"),
        }
    }

    /// Returns the resources the server has used.
    fn usage(&self) -> Outcome<Usage> {
        let (stdin, stdout) = &mut *self.pipes.borrow_mut();
        writeln!(stdin)?;
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        Usage::parse(line.trim())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
