//! [`Program`]: `tinkex` as a user runs it against the server.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::step::{Step, XtaskError, target, tool};

/// Number of steps of a run.
const STEPS: usize = 12;
/// Number of steps after which a checkpoint is saved.
const SAVE_EVERY: usize = 3;
/// Steps after which the run is killed: a checkpoint exists, and steps follow it.
const STEPS_BEFORE_KILL: usize = 5;
/// Time for the run to reach [`STEPS_BEFORE_KILL`].
const KILL_TIMEOUT: Duration = Duration::from_secs(300);

/// Trains and samples with the `tinkex` binary of the debug build.
pub(super) struct Program {
    folder: PathBuf,
    base_url: String,
    /// Name of the base model on the server, which is also the folder of its tokenizer.
    model: String,
}

impl Program {
    /// Creates an empty folder with the training data.
    pub(super) fn new(folder: PathBuf, base_url: &str, model: &str) -> Result<Self, XtaskError> {
        let failed = |error: std::io::Error| {
            XtaskError::new(format!("cannot prepare {}: {error}", folder.display()))
        };
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).map_err(failed)?;
        let examples: String = (1..=8)
            .map(|n| {
                let prompt = format!("{n} plus 1 is");
                let completion = format!(" {}.", n + 1);
                format!("{}\n", json!({"prompt": prompt, "completion": completion}))
            })
            .collect();
        std::fs::write(folder.join("examples.jsonl"), examples).map_err(failed)?;
        Ok(Self { folder, base_url: base_url.to_owned(), model: model.to_owned() })
    }

    /// Trains a model from start to end.
    pub(super) fn train(&self) -> Result<String, XtaskError> {
        self.training("run", STEPS, SAVE_EVERY).run()?;
        let losses = self.losses("run")?;
        let (Some((_, first)), Some((_, last))) = (losses.first(), losses.last()) else {
            return Err(XtaskError::new("the run has no metrics"));
        };
        if losses.len() != STEPS || last >= first {
            return Err(XtaskError::new(format!("unexpected losses: {losses:?}")));
        }
        Ok(format!("{STEPS} steps, loss {first:.2} to {last:.2}"))
    }

    /// Samples from the weights that [`train`](Self::train) saved.
    pub(super) fn sample(&self) -> Result<String, XtaskError> {
        let checkpoint = self.saved_weights("run")?;
        let output = self
            .tinkex(&["sample", &checkpoint, "--prompt", "2 plus 1 is", "--max-tokens", "8"])
            .arguments(&["--seed", "1", "--num-samples", "2", "--json", "--tokenizer"])
            .argument(&self.model)
            .output()?;
        match output.matches("\"tokens\"").count() {
            2 => Ok("2 samples from the saved weights".to_owned()),
            _ => Err(XtaskError::new(format!("unexpected output of tinkex sample: {output}"))),
        }
    }

    /// Kills a run once it has saved a checkpoint, and resumes it.
    pub(super) fn resume(&self) -> Result<String, XtaskError> {
        let mut process = self.training("killed", STEPS, SAVE_EVERY).spawn()?;
        let start = Instant::now();
        while self.losses("killed").is_ok_and(|losses| losses.len() < STEPS_BEFORE_KILL) {
            let ended = process.try_wait().ok().flatten();
            if ended.is_some() || start.elapsed() > KILL_TIMEOUT {
                let _ = process.kill();
                let seconds = KILL_TIMEOUT.as_secs();
                return Err(XtaskError::new(format!(
                    "cannot kill the run after {STEPS_BEFORE_KILL} steps: it ended earlier, or \
                     took longer than {seconds} s"
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = process.kill();
        let _ = process.wait();
        let before = self.losses("killed")?.len();
        let folder = self.folder.join("killed");
        self.tinkex(&["train", "--no-progress", "--resume"]).argument(folder).run()?;
        let steps: BTreeSet<usize> =
            self.losses("killed")?.into_iter().map(|(step, _)| step).collect();
        if steps.len() != STEPS {
            return Err(XtaskError::new(format!("the resumed run has the steps {steps:?}")));
        }
        self.saved_weights("killed")?;
        Ok(format!("killed after {before} of {STEPS} steps, finished"))
    }

    /// Returns the command that trains into the folder `run`.
    pub(super) fn training(&self, run: &str, steps: usize, save_every: usize) -> Step {
        let steps = steps.to_string();
        let save_every = save_every.to_string();
        self.tinkex(&["train", "--no-progress", "--rank", "8", "--steps", &steps])
            .arguments(&["--batch-size", "4", "--save-every", &save_every, "--dir"])
            .argument(self.folder.join(run))
            .arguments(&["--model", &self.model, "--tokenizer", &self.model])
            .argument(self.folder.join("examples.jsonl"))
    }

    fn tinkex(&self, arguments: &[&str]) -> Step {
        tool("tinkex", target().join("debug/tinkex"), arguments)
            .variable("TINKER_BASE_URL", &self.base_url)
            // The server accepts any key.
            .variable("TINKER_API_KEY", "tml-any")
    }

    /// Returns the step and the loss of each complete line of the metrics of a run; empty before
    /// the first.
    pub(super) fn losses(&self, run: &str) -> Result<Vec<(usize, f64)>, XtaskError> {
        let path = self.folder.join(run).join("metrics.jsonl");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let complete = text.lines().take(text.matches('\n').count());
        complete
            .map(|line| {
                let metrics: Value = serde_json::from_str(line).ok()?;
                let step = usize::try_from(metrics["step"].as_u64()?).ok()?;
                Some((step, metrics["loss"].as_f64()?))
            })
            .collect::<Option<_>>()
            .ok_or_else(|| XtaskError::new(format!("unexpected metrics: {text}")))
    }

    /// Returns the path of the weights that a finished run saved for sampling.
    fn saved_weights(&self, run: &str) -> Result<String, XtaskError> {
        let path = self.folder.join(run).join("run.json");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let run: Value = serde_json::from_str(&text).unwrap_or_default();
        run["progress"]["sampler"].as_str().map(str::to_owned).ok_or_else(|| {
            XtaskError::new(format!("{} names no weights for sampling", path.display()))
        })
    }
}
