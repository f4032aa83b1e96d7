//! `cargo xtask bench engine`: the engine against torch, transformers and peft, and llama.cpp.
//!
//! Each piece of work runs in a process of its own, ours and the peers' in turns, so that all see
//! the same machine and the peak of memory is each one's own. The best of all rounds counts. A row
//! that misses its bar makes the command fail, after all rows are printed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::step::{Failure, cargo, root, target};

mod rows;

use rows::{ROWS, Row, Who};

const TURNS: usize = 3;
/// torch is stopped when its rounds take so many times as long as one of ours, and this many seconds
/// at least: on a machine without bf16 instructions it would go on for hours.
const MUCH_SLOWER: f64 = 4.0;
const LEAST: f64 = 60.0;

/// What one process measured, by name: `wall`, `cpu`, `peak`, and what else it prints.
type Measured = BTreeMap<String, f64>;

/// Programs and models that rows are measured with.
struct Tools {
    engine: PathBuf,
    models: PathBuf,
    python: PathBuf,
    /// Why llama.cpp is not among them, or where its Python is.
    llama: Result<PathBuf, String>,
}

/// Measures the rows that `options` name: kinds of work, models, forms of weights; all of a sort if
/// none is named. `--turns N` says how often.
pub(crate) fn bench(options: &[&str]) -> Result<(), Failure> {
    let (wanted, turns) = read_options(options)?;
    let rows: Vec<&Row> = ROWS.iter().filter(|row| row.is_wanted(&wanted)).collect();
    if rows.is_empty() {
        return Err(Failure::new(format!("no row is {}", wanted.join(" "))));
    }
    let llama = rows.iter().any(|row| row.peer == Who::Llama);
    let tools = Tools::prepare(llama)?;
    if let (true, Err(why)) = (llama, &tools.llama) {
        println!("\nllama.cpp is left out: {why}");
    }
    println!("\n| model | weights | work | ours | peer | ratio | bar | peak MiB | |");
    println!("|---|---|---|---|---|---|---|---|---|");
    // One peer may stand in several rows: it is measured once.
    let mut known = BTreeMap::new();
    let mut missed = 0;
    for row in rows {
        if row.peer == Who::Llama && tools.llama.is_err() {
            continue;
        }
        let (ours, theirs) = tools.measure(row, turns, &mut known)?;
        missed += usize::from(!row.print(&ours, &theirs)?);
    }
    match missed {
        0 => Ok(()),
        some => Err(Failure::new(format!("{some} bars were missed"))),
    }
}

fn read_options<'a>(options: &[&'a str]) -> Result<(Vec<&'a str>, usize), Failure> {
    let (mut wanted, mut turns) = (Vec::new(), TURNS);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        if *option == "--turns" {
            let number = options.next().and_then(|turns| turns.parse().ok());
            turns = number.ok_or_else(|| Failure::new("--turns needs a number"))?;
        } else if rows::labels().any(|label| label == *option) {
            wanted.push(*option);
        } else {
            let all: Vec<&str> = rows::labels().collect();
            let why = format!("bench engine: {option} is none of {}", all.join(", "));
            return Err(Failure::new(why));
        }
    }
    Ok((wanted, turns))
}

impl Tools {
    fn prepare(llama: bool) -> Result<Self, Failure> {
        let python = environment("bench-python", &[], &["torch", "transformers", "peft"])?;
        let models = target().join("bench-models");
        run(Command::new(&python).arg(script("peer.py")).arg("make").arg(&models))?;
        let llama = match llama {
            true => llama_environment(&models).map_err(|why| why.to_string()),
            false => Err("no row needs it".to_owned()),
        };
        Ok(Self { engine: build()?, models, python, llama })
    }

    /// Our best and the peer's best, in turns.
    fn measure(
        &self,
        row: &Row,
        turns: usize,
        known: &mut BTreeMap<(Who, String), Measured>,
    ) -> Result<(Measured, Measured), Failure> {
        let name = |work: &str| format!("{} {} {work}", row.model, row.precision);
        let sides = [(Who::Ours, row.work), (row.peer, row.peer_work())];
        let missing: Vec<_> = sides
            .into_iter()
            .filter(|(who, work)| *who != Who::Nobody && !known.contains_key(&(*who, name(work))))
            .collect();
        for _ in 0..turns {
            for &(who, work) in &missing {
                let ours =
                    known.get(&(Who::Ours, name(row.work))).and_then(|ours| ours.get("wall"));
                let patience = ours.map_or(LEAST, |ours| (ours * MUCH_SLOWER).max(LEAST));
                // Once is enough for what takes that long.
                if known.get(&(who, name(work))).is_some_and(|best| best.contains_key("longer")) {
                    continue;
                }
                let one = read(&run(&mut self.command(who, row, work, patience))?)?;
                let best = known.entry((who, name(work))).or_insert_with(|| one.clone());
                for (field, value) in one {
                    let kept = best.entry(field.clone()).or_insert(value);
                    *kept = if field == "peak" { kept.max(value) } else { kept.min(value) };
                }
            }
        }
        let best = |(who, work): (Who, &str)| known.get(&(who, name(work))).cloned();
        let [ours, theirs] = sides.map(best);
        Ok((ours.unwrap_or_default(), theirs.unwrap_or_default()))
    }

    fn command(&self, who: Who, row: &Row, work: &str, patience: f64) -> Command {
        let folder = self.models.join(row.model);
        let mut command = match (who, &self.llama) {
            (Who::Torch, _) => {
                let mut command = Command::new(&self.python);
                command.arg(script("peer.py")).arg("run").arg(folder).arg(row.precision);
                command
            }
            (Who::Llama, Ok(python)) => {
                let mut command = Command::new(python);
                command.arg(script("peer_llama.py")).arg("run");
                command.arg(gguf(&self.models, row.model, row.precision));
                command
            }
            _ => {
                let mut command = Command::new(&self.engine);
                command.arg(folder).arg(row.precision);
                command
            }
        };
        command.arg(work).arg(row.rounds);
        if who == Who::Torch {
            command.arg(format!("{patience:.0}"));
        }
        command
    }
}

/// The benchmark's program, built.
fn build() -> Result<PathBuf, Failure> {
    let arguments = ["bench", "--locked", "--package", "tinkex-engine", "--bench", "engine"];
    let output =
        cargo("build", &arguments).arguments(&["--no-run", "--message-format", "json"]).output()?;
    let path = |line: &str| {
        let (_, rest) = line.split_once("\"executable\":\"")?;
        line.contains("\"kind\":[\"bench\"]").then(|| rest.split('"').next().map(PathBuf::from))?
    };
    output.lines().find_map(path).ok_or_else(|| Failure::new("cargo built no benchmark"))
}

/// Reads the line that all of them print.
fn read(output: &str) -> Result<Measured, Failure> {
    let line = output.lines().find_map(|line| line.strip_prefix("RESULT "));
    let line = line.ok_or_else(|| Failure::new(format!("no result in: {output}")))?;
    let field = |part: &str| {
        let (name, value) = part.split_once('=')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    Ok(line.split_whitespace().filter_map(field).collect())
}

/// A Python with the packages, made once.
fn environment(name: &str, flags: &[&str], packages: &[&str]) -> Result<PathBuf, Failure> {
    let folder = target().join(name);
    let python = folder.join("bin/python");
    // Written last, so that half an installation is not taken for one.
    let done = folder.join("done");
    if !done.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        let tools = ["-m", "pip", "install", "-q", "cmake", "ninja"];
        run(Command::new(&python).args(tools))?;
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "-q"]).args(flags).args(packages);
        // Builds from source find these tools by their names.
        #[expect(clippy::disallowed_methods, reason = "for the child, which looks for tools in it")]
        let path = std::env::var("PATH").unwrap_or_default();
        pip.env("PATH", format!("{}:{path}", folder.join("bin").display()));
        run(&mut pip)?;
        std::fs::write(&done, "").map_err(|why| Failure::new(why.to_string()))?;
    }
    Ok(python)
}

/// A Python with llama.cpp, and the models in its form.
fn llama_environment(models: &Path) -> Result<PathBuf, Failure> {
    let flags = ["--no-binary", "llama-cpp-python"];
    let packages = ["llama-cpp-python", "gguf", "numpy"];
    let python = environment("bench-llama", &flags, &packages)?;
    for (model, precision) in [("A", "f32"), ("A", "bf16"), ("B", "f32"), ("B", "bf16")] {
        let file = gguf(models, model, precision);
        if !file.exists() {
            let mut make = Command::new(&python);
            make.arg(script("peer_llama.py")).arg("make").arg(models.join(model));
            run(make.arg(precision).arg(&file))?;
        }
    }
    Ok(python)
}

fn gguf(models: &Path, model: &str, precision: &str) -> PathBuf {
    models.join(format!("{model}-{precision}.gguf"))
}

fn script(name: &str) -> PathBuf {
    root().join("crates/engine/benches").join(name)
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
