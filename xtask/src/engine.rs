//! `cargo xtask bench engine`: the engine against torch, transformers and peft.
//!
//! Each piece of work runs in a process of its own, ours and the peer's in turns, so that both see
//! the same machine and the peak of memory is each one's own. The best of all rounds counts.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::step::{Failure, cargo, root};

const PYTHON_PACKAGES: [&str; 3] = ["torch", "transformers", "peft"];
const TURNS: usize = 3;

/// What is measured: model, precision, work, and rounds in each process.
const CASES: [(&str, &str, &str, &str); 13] = [
    ("A", "f32", "train", "5"),
    ("A", "bf16", "train", "5"),
    ("A", "f32", "ragged", "3"),
    ("A", "f32", "decode1", "3"),
    ("A", "f32", "decode8", "3"),
    ("B", "f32", "train", "2"),
    ("B", "bf16", "train", "2"),
    ("B", "f32", "ragged", "1"),
    ("B", "f32", "decode1", "2"),
    ("B", "bf16", "decode1", "2"),
    ("B", "f32", "decode8", "2"),
    ("B", "bf16", "decode8", "2"),
    ("B", "bf16", "load", "1"),
];

/// What ours alone is measured on: many adapters should cost no more than one.
const OURS: [(&str, &str, &str, &str); 2] =
    [("A", "f32", "adapters1", "3"), ("A", "f32", "adapters8", "3")];

#[derive(Clone, Copy)]
struct Measured {
    seconds: f64,
    cpu: f64,
    peak: f64,
}

impl Measured {
    /// Reads the line that both sides print.
    fn read(output: &str) -> Option<Self> {
        let line = output.lines().find_map(|line| line.strip_prefix("RESULT "))?;
        let field = |name: &str| {
            line.split_whitespace().find_map(|part| part.strip_prefix(name)?.parse::<f64>().ok())
        };
        Some(Self { seconds: field("wall=")?, cpu: field("cpu=")?, peak: field("peak=")? })
    }

    fn best(self, other: Self) -> Self {
        Self {
            seconds: self.seconds.min(other.seconds),
            cpu: self.cpu.min(other.cpu),
            peak: self.peak.max(other.peak),
        }
    }
}

pub(crate) fn bench() -> Result<(), Failure> {
    let python = environment()?;
    let models = root().join("target/bench-models");
    peer(&python, &["make", &text(&models)])?;
    cargo("build", &["bench", "--locked", "--package", "tinkex-engine", "--bench", "engine"])
        .arguments(&["--no-run"])
        .run()?;
    println!(
        "\n| model | weights | work | ours s | torch s | speed | ours MiB | torch MiB | memory |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (model, precision, work, rounds) in CASES {
        let folder = text(&models.join(model));
        let (mut ours, mut theirs): (Option<Measured>, Option<Measured>) = (None, None);
        for _ in 0..TURNS {
            let one = own(&[&folder, precision, work, rounds])?;
            ours = Some(ours.map_or(one, |best| best.best(one)));
            let output = peer(&python, &["run", &folder, precision, work, rounds])?;
            let one = read(&output)?;
            theirs = Some(theirs.map_or(one, |best| best.best(one)));
        }
        if let (Some(ours), Some(theirs)) = (ours, theirs) {
            println!(
                "| {model} | {precision} | {work} | {:.3} | {:.3} | {:.2}× | {:.0} | {:.0} | {:.2}× |",
                ours.seconds,
                theirs.seconds,
                theirs.seconds / ours.seconds,
                ours.peak,
                theirs.peak,
                ours.peak / theirs.peak
            );
        }
    }
    for (model, precision, work, rounds) in OURS {
        let one = own(&[&text(&models.join(model)), precision, work, rounds])?;
        println!("{model} {precision} {work}: {:.3} s, {:.3} s of CPU", one.seconds, one.cpu);
    }
    Ok(())
}

fn own(arguments: &[&str]) -> Result<Measured, Failure> {
    let output = cargo(
        "the engine",
        &["bench", "--locked", "--package", "tinkex-engine", "--bench", "engine"],
    )
    .arguments(&["--"])
    .arguments(arguments)
    .output()?;
    read(&output)
}

fn read(output: &str) -> Result<Measured, Failure> {
    Measured::read(output).ok_or_else(|| Failure::new(format!("no result in: {output}")))
}

/// A Python with the peer's packages, made once.
fn environment() -> Result<PathBuf, Failure> {
    let folder = root().join("target/bench-python");
    let python = folder.join("bin/python");
    if !python.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        run(Command::new(&python).args(["-m", "pip", "install", "-q"]).args(PYTHON_PACKAGES))?;
    }
    Ok(python)
}

fn peer(python: &Path, arguments: &[&str]) -> Result<String, Failure> {
    let script = root().join("crates/engine/benches/peer.py");
    run(Command::new(python).arg(script).args(arguments))
}

fn run(command: &mut Command) -> Result<String, Failure> {
    let line = format!("{command:?}");
    let failed = |why: String| Failure::new(format!("{line}: {why}"));
    match command.output() {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(failed(format!("{}\n{said}", output.status)))
        }
        Err(why) => Err(failed(why.to_string())),
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
