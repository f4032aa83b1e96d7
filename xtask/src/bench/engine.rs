//! `cargo xtask bench engine`: the engine compared with torch, transformers and peft, and with
//! llama.cpp.
//!
//! Every measurement runs in its own process, alternating between the engine and its peer, so that
//! both see the same load on the machine and the peak memory is per measurement. The best of all
//! repetitions counts. If a row misses its target, the command fails after it has printed all rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::engine_rows::{self as rows, Peer, ROWS, Row};
use crate::python::{self, Packages};
use crate::step::{XtaskError, cargo, root, target};

/// Timeout of a torch measurement as a multiple of the engine's time. On a CPU without bf16
/// instructions, torch would run for hours.
const TORCH_TIMEOUT_FACTOR: f64 = 4.0;
/// Lower bound of that timeout, in seconds.
const TORCH_MIN_TIMEOUT: f64 = 60.0;

/// Name of the adapter in place of a weight format, in file names.
const ADAPTER: &str = "lora";

/// Measurements of one process by name: `wall` and `cpu` in seconds, `peak` in MiB, `first` (time
/// to the first token) in seconds. `longer` is present if the process was stopped at its timeout.
/// `file` and `cache` are the sizes of the model's file and of the KV cache in MiB.
pub(super) type Measurements = BTreeMap<String, f64>;

/// Measurement of a row: of the engine, or of its peer.
#[derive(Clone, Copy)]
struct Side {
    program: Peer,
    precision: &'static str,
    work: &'static str,
}

/// Programs and models that the measurements use.
struct Tools {
    /// Benchmark program of the engine.
    engine: PathBuf,
    /// Folder of the models.
    models: PathBuf,
    /// Python interpreter with torch, transformers and peft.
    python: PathBuf,
    /// Python interpreter with llama.cpp, or the reason why it could not be installed.
    llama: Result<PathBuf, String>,
}

/// Arguments of `cargo xtask bench engine`.
#[derive(Args)]
pub(crate) struct EngineArgs {
    /// Measure only the rows with these labels: workloads, models and weight formats [default: all]
    #[arg(value_name = "LABEL", value_parser = PossibleValuesParser::new(rows::labels()))]
    labels: Vec<String>,
    /// Number of measurements per row
    #[arg(long, value_name = "N", default_value_t = 3)]
    repeat: usize,
}

/// Measures the rows that match the labels in `args`.
pub(super) fn run(args: &EngineArgs) -> Result<(), XtaskError> {
    let labels: Vec<&str> = args.labels.iter().map(String::as_str).collect();
    let rows: Vec<&Row> = ROWS.iter().filter(|row| row.matches(&labels)).collect();
    if rows.is_empty() {
        return Err(XtaskError::new(format!(
            "bench engine: no row has the labels {}",
            labels.join(" ")
        )));
    }
    let tools = Tools::prepare(&rows)?;
    if let Err(cause) = &tools.llama
        && rows.iter().any(|row| row.needs_llama())
    {
        println!("\nskipping llama.cpp: {cause}");
    }
    println!("\n| model | weights | work | engine | peer | ratio | target | peak MiB | |");
    println!("|---|---|---|---|---|---|---|---|---|");
    // Results by program and workload: a measurement that several rows need runs once.
    let mut known = BTreeMap::new();
    let mut missed = 0;
    for row in rows {
        if row.peer == Peer::Llama && tools.llama.is_err() {
            continue;
        }
        match tools.measure(row, args.repeat, &mut known) {
            Ok((ours, theirs)) => missed += usize::from(!row.print(&ours, &theirs)?),
            // A peer may need more memory than the machine has; the other rows are measured.
            Err(error) => {
                let reason = error.to_string();
                let reason = reason.lines().next().unwrap_or_default();
                println!("| {} | {} | {} | {reason} |", row.model, row.precision, row.work);
                missed += 1;
            }
        }
    }
    match missed {
        0 => Ok(()),
        some => Err(XtaskError::new(format!("{some} rows missed their target"))),
    }
}

impl Tools {
    /// Installs the peers of `rows` and creates the models.
    fn prepare(rows: &[&Row]) -> Result<Self, XtaskError> {
        let packages = Packages::wheels(&["torch", "transformers", "peft"]);
        let python = python::environment(Path::new("bench-python"), &packages)?;
        let models = target().join("bench-models");
        output(Command::new(&python).arg(script("peer.py")).arg("make").arg(&models))?;
        let llama = if rows.iter().any(|row| row.needs_llama()) {
            llama_environment(&models, rows).map_err(|failure| failure.to_string())
        } else {
            Err("no row needs it".to_owned())
        };
        Ok(Self { engine: build()?, models, python, llama })
    }

    /// Returns the best measurements of the engine and of the peer.
    fn measure(
        &self,
        row: &Row,
        repeats: usize,
        known: &mut BTreeMap<(Peer, String), Measurements>,
    ) -> Result<(Measurements, Measurements), XtaskError> {
        let ours = Side { program: Peer::Engine, precision: row.precision, work: row.work };
        let theirs =
            Side { program: row.peer, precision: row.peer_precision(), work: row.peer_work() };
        let key =
            |side: &Side| (side.program, format!("{} {} {}", row.model, side.precision, side.work));
        let sides = [ours, theirs];
        let missing: Vec<Side> = sides
            .into_iter()
            .filter(|side| side.program != Peer::None && !known.contains_key(&key(side)))
            .collect();
        for _ in 0..repeats {
            for side in &missing {
                let ours = known.get(&key(&ours)).and_then(|ours| ours.get("wall"));
                let timeout = ours.map_or(TORCH_MIN_TIMEOUT, |ours| {
                    (ours * TORCH_TIMEOUT_FACTOR).max(TORCH_MIN_TIMEOUT)
                });
                // A measurement that reached the timeout is not repeated.
                if known.get(&key(side)).is_some_and(|best| best.contains_key("longer")) {
                    continue;
                }
                let one = parse_result(&output(&mut self.command(row, *side, timeout))?)?;
                let best = known.entry(key(side)).or_insert_with(|| one.clone());
                for (field, value) in one {
                    let kept = best.entry(field.clone()).or_insert(value);
                    *kept = if field == "peak" { kept.max(value) } else { kept.min(value) };
                }
            }
        }
        let [ours, theirs] = sides.map(|side| known.get(&key(&side)).cloned());
        Ok((ours.unwrap_or_default(), theirs.unwrap_or_default()))
    }

    fn command(&self, row: &Row, side: Side, timeout: f64) -> Command {
        let Side { program, precision, work } = side;
        let folder = self.models.join(row.model);
        let mut command = match (program, &self.llama) {
            (Peer::Torch, _) => {
                let mut command = Command::new(&self.python);
                command.arg(script("peer.py")).arg("run").arg(folder).arg(precision);
                command
            }
            (Peer::Llama, Ok(python)) => {
                let mut command = Command::new(python);
                command.arg(script("peer_llama.py")).arg("run");
                command.arg(gguf(&self.models, row.model, precision));
                command.arg(gguf(&self.models, row.model, ADAPTER));
                command
            }
            _ => {
                // Quantized weights come from llama.cpp's GGUF file if it exists. Otherwise the
                // engine quantizes the model of the folder.
                let file = gguf(&self.models, row.model, precision);
                let model = if is_quantized(precision) && file.exists() { file } else { folder };
                let mut command = Command::new(&self.engine);
                command.arg(model).arg(precision);
                command
            }
        };
        command.arg(work).arg(row.rounds.to_string());
        if program == Peer::Torch {
            command.arg(format!("{timeout:.0}"));
        }
        command
    }
}

/// Builds the benchmark program of the engine and returns its path.
fn build() -> Result<PathBuf, XtaskError> {
    let arguments = ["bench", "--locked", "--package", "tinkex-engine", "--bench", "engine"];
    let output =
        cargo("build", &arguments).arguments(&["--no-run", "--message-format", "json"]).output()?;
    let path = |line: &str| {
        let (_, rest) = line.split_once("\"executable\":\"")?;
        line.contains("\"kind\":[\"bench\"]").then(|| rest.split('"').next().map(PathBuf::from))?
    };
    output
        .lines()
        .find_map(path)
        .ok_or_else(|| XtaskError::new("cargo did not report the benchmark executable"))
}

/// Parses the `RESULT` line that every benchmark program prints.
fn parse_result(output: &str) -> Result<Measurements, XtaskError> {
    let line = output.lines().find_map(|line| line.strip_prefix("RESULT "));
    let line = line.ok_or_else(|| XtaskError::new(format!("no RESULT line in: {output}")))?;
    let field = |part: &str| {
        let (name, value) = part.split_once('=')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    Ok(line.split_whitespace().filter_map(field).collect())
}

/// Returns a Python interpreter with llama.cpp, built from source, and converts the models of `rows`
/// to GGUF.
fn llama_environment(models: &Path, rows: &[&Row]) -> Result<PathBuf, XtaskError> {
    let python = python::llama_cpp()?;
    let convert = |model: &str, precision: &str, action: &str, from: PathBuf| {
        let file = gguf(models, model, precision);
        if file.exists() {
            return Ok(());
        }
        let mut convert = Command::new(&python);
        convert.arg(script("peer_llama.py")).arg(action).arg(from).arg(precision).arg(&file);
        output(&mut convert).map(drop)
    };
    for row in rows.iter().filter(|row| row.needs_llama()) {
        let Row { model, precision, .. } = row;
        if is_quantized(precision) {
            convert(model, "bf16", "make", models.join(model))?;
            convert(model, precision, "quantize", gguf(models, model, "bf16"))?;
        } else {
            convert(model, precision, "make", models.join(model))?;
        }
        convert(model, ADAPTER, "adapter", models.join(model))?;
    }
    Ok(python)
}

fn gguf(models: &Path, model: &str, precision: &str) -> PathBuf {
    models.join(format!("{model}-{precision}.gguf"))
}

pub(super) fn is_quantized(precision: &str) -> bool {
    precision.starts_with('q')
}

fn script(name: &str) -> PathBuf {
    root().join("crates/engine/benches").join(name)
}

/// Runs a command and returns its standard output.
fn output(command: &mut Command) -> Result<String, XtaskError> {
    let command_line = format!("{command:?}");
    let failed = |cause: String| XtaskError::new(format!("{command_line} failed: {cause}"));
    match command.output() {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            Err(failed(format!("{}\n{stderr}", output.status)))
        }
        Err(error) => Err(failed(error.to_string())),
    }
}
