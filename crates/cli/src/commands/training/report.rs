//! The result of a run, and how to resume a run that did not finish.

use std::path::Path;

use serde_json::json;
use tinkex_runs::{
    METRICS_FILE, MetricsLine, RunFolder, RunRecord, SAMPLES_FILE, best_checkpoint, metric,
};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::find_folder;

use super::log::RunLog;
use super::progress::{TrainProgress, thousands};
use super::start::TrainingCommand;

/// Metrics that every step has, besides the metrics of its method.
const COMMON: [&str; 5] =
    [metric::EPOCH, metric::LOSS, metric::LEARNING_RATE, metric::TOKENS, metric::TOKENS_PER_SECOND];

/// Number of examples that had too many tokens and were truncated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct TruncatedCounts {
    /// In the training files, also of the examples that are held out.
    pub(crate) train: usize,
    /// In the evaluation file.
    pub(crate) eval: usize,
}

impl TruncatedCounts {
    pub(crate) fn total(self) -> usize {
        self.train + self.eval
    }
}

/// Run that has finished all of its steps.
pub(crate) struct FinishedRun<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) record: &'a RunRecord,
    pub(crate) log: &'a RunLog,
    pub(crate) progress: &'a TrainProgress,
    pub(crate) truncated: TruncatedCounts,
}

impl FinishedRun<'_> {
    /// Prints the result of the run.
    pub(crate) fn report(&self, context: &mut CommandContext<'_>) -> Result<(), CommandError> {
        let record = self.record;
        let progress = &record.progress;
        let log = self.log;
        let file = |name: &str| self.folder.join(name).display().to_string();
        let samples = self.folder.join(SAMPLES_FILE);
        let samples = samples.exists().then(|| samples.display().to_string());
        let events = log.event_file();
        let first_last = |name: &str| {
            let evaluation = name.starts_with(metric::EVAL_PREFIX);
            let first = if evaluation { log.first_evaluation() } else { log.first_step() };
            let last = if evaluation { log.last_evaluation() } else { log.last_step() };
            let value = |line: Option<&MetricsLine>| line.and_then(|line| line.get(name));
            json!({ "first": value(first), "last": value(last) })
        };
        let best = best_checkpoint(&progress.checkpoints);
        let sampler = progress.sampler.as_ref().map(ToString::to_string).unwrap_or_default();
        let json = json!({
            "finished": true,
            "name": record.name,
            "method": record.settings.method.method(),
            "model": record.settings.base_model,
            "run_id": progress.run_id,
            "steps": progress.step(),
            "tokens": log.tokens(),
            "seconds": self.progress.seconds(),
            "tokens_per_second": self.progress.tokens_per_second(),
            "truncated": self.truncated,
            "loss": first_last(metric::LOSS),
            "eval_loss": first_last(metric::EVAL_LOSS),
            "reward": first_last(metric::REWARD),
            "eval_reward": first_last(metric::EVAL_REWARD),
            "metrics_last": log.last_step().map(|line| method_metrics(line, "")),
            "eval_metrics_last":
                log.last_evaluation().map(|line| method_metrics(line, metric::EVAL_PREFIX)),
            "checkpoint": progress.checkpoints.last().map(|saved| &saved.path),
            "sampler": sampler,
            "best": best.map(|best| json!({
                "step": best.step, "reward": best.reward, "checkpoint": best.path,
            })),
            "folder": self.folder,
            "metrics": file(METRICS_FILE),
            "plot": log.plot_file,
            "samples": samples,
            "events": events,
        });
        let curve = log.curve(context).map(|curve| curve + "\n").unwrap_or_default();
        let mut text = format!("{curve}{}", self.summary());
        text += &format!("\n  checkpoint  {sampler}");
        if let Some(best) = best.filter(|best| best.step != progress.step()) {
            let path = &best.path;
            let step = best.step;
            let reward = best.reward.unwrap_or_default();
            text += &format!("\n  best        {path} (step {step}, reward {reward:.3})");
        }
        text += &format!(
            "\n  metrics     {}\n  plot        {}",
            file(METRICS_FILE),
            log.plot_file.display(),
        );
        if let Some(samples) = samples {
            text += &format!("\n  samples     {samples}");
        }
        if let Some(events) = events {
            text += &format!("\n  events      {}", events.display());
        }
        text += &format!("\n\n{}", next_commands(context, record));
        context.text(&text, &json)
    }

    /// Describes steps, speed and results on one line.
    fn summary(&self) -> String {
        let log = self.log;
        let main = log.main;
        let shown = |line: Option<&MetricsLine>| {
            let value = line.and_then(|line| line.get(main.name));
            format::or_na(value.map(|value| format!("{value:.3}")))
        };
        let mut text = format!(
            "Trained {} in {} ({} tokens/s): {} {} → {}",
            format::count(self.record.progress.step(), "step"),
            format::short_duration(self.progress.seconds()),
            thousands(self.progress.tokens_per_second()),
            main.name,
            shown(log.first_step()),
            shown(log.last_step()),
        );
        let evaluated = |line: Option<&MetricsLine>| line?.get(main.eval_name);
        if let (Some(first), Some(last)) =
            (evaluated(log.first_evaluation()), evaluated(log.last_evaluation()))
        {
            text += &format!(", held-out {} {first:.3} → {last:.3}", main.name);
        }
        text += &self.preferences().unwrap_or_default();
        if self.truncated.total() > 0 {
            let count = format::count(self.truncated.total(), "example");
            text += &format!("; {count} truncated");
        }
        text
    }

    /// Describes accuracy and margin of DPO, on the held-out pairs if there are any.
    fn preferences(&self) -> Option<String> {
        let (line, prefix, held_out) = match self.log.last_evaluation() {
            Some(line) => (line, metric::EVAL_PREFIX, "held-out "),
            None => (self.log.last_step()?, "", ""),
        };
        let accuracy = line.get(&format!("{prefix}accuracy"))?;
        let margin = line.get(&format!("{prefix}margin"))?;
        Some(format!(", {held_out}accuracy {accuracy:.2}, margin {margin:.2}"))
    }
}

/// Returns the metrics of a line that only its method has, without the prefix of their names.
fn method_metrics(line: &MetricsLine, prefix: &str) -> serde_json::Map<String, serde_json::Value> {
    let of_method = |(name, value): (&str, f64)| {
        let name = name.strip_prefix(prefix)?;
        (!COMMON.contains(&name)).then(|| (name.to_owned(), json!(value)))
    };
    line.iter().filter_map(of_method).collect()
}

/// Announces the start of a run on `data`, such as `20 examples`.
pub(crate) fn announce(
    context: &mut CommandContext<'_>,
    folder: &Path,
    record: &RunRecord,
    data: &str,
) {
    let from = record.progress.step();
    context.notice(&format!(
        "{} {} on {}: {data}, {}, folder {}",
        if from > 0 { "resuming" } else { "training" },
        record.name,
        record.settings.base_model,
        format::count(record.settings.steps.saturating_sub(from), "step"),
        folder.display()
    ));
}

/// Reports that a run has no steps left.
pub(super) fn report_finished(
    context: &mut CommandContext<'_>,
    record: &RunRecord,
) -> Result<(), CommandError> {
    let steps = record.settings.steps;
    let text = format!(
        "The run is already finished: {steps} steps. Pass --steps to extend it.\n\n{}",
        next_commands(context, record)
    );
    let sampler = &record.progress.sampler;
    context.text(&text, &json!({ "finished": true, "name": record.name, "sampler": sampler }))
}

/// Returns the command lines that chat with the trained model, download its adapter and export it.
fn next_commands(context: &CommandContext<'_>, record: &RunRecord) -> String {
    let flags = context.server_flags();
    let name = format::shell_quote(&record.name);
    // llama.cpp has no pre-tokenizer for the tokenizer of the built-in model.
    let is_built_in = record.settings.base_model == tinkex_server::BUILT_IN;
    let gguf = if is_built_in { "" } else { "; add --format gguf for llama.cpp and ollama" };
    format!(
        "Chat with the model:\n  tinkex chat {name}{flags}\n\
         Download the adapter, for PEFT, vLLM and llama.cpp:\n  \
         tinkex checkpoint download {name}{flags}\n\
         Export the merged model{gguf}:\n  \
         tinkex export {name} --to my-model{flags}"
    )
}

/// Returns the command line that resumes a run: by its name, or by the path of its folder if several
/// runs have the name.
pub(crate) fn resume_command(
    context: &CommandContext<'_>,
    command: TrainingCommand,
    folder: &Path,
    record: &RunRecord,
) -> String {
    let environment = &*context.environment;
    let found = find_folder(&environment.variables, &environment.folder, &record.name, command);
    let run = match found {
        Ok(found) if found == folder => format::shell_quote(&record.name),
        _ => format::shell_quote(&folder.display().to_string()),
    };
    let method = record.settings.method.method();
    format!("{} --resume {run}{}", method.command(), context.server_flags())
}

/// Adds to the error of a failed run how to resume it. A run without a folder was not started.
pub(crate) fn failed(
    context: &CommandContext<'_>,
    command: TrainingCommand,
    folder: &Path,
    error: CommandError,
) -> CommandError {
    let Ok(record) = RunFolder::read(folder) else { return error };
    let resume = resume_command(context, command, folder, &record);
    // After the error's own hint: its cause must be resolved before the run continues.
    error.add_hint(match record.progress.step() {
        0 => format!("Nothing was saved. Start again with: {resume}"),
        step => format!("Resume from step {step} with: {resume}"),
    })
}

/// Returns the error of a run that the user stopped.
pub(crate) fn stopped(
    context: &CommandContext<'_>,
    command: TrainingCommand,
    folder: &Path,
    record: &RunRecord,
) -> CommandError {
    let step = record.progress.step();
    let message = format!("stopped at step {step} and saved a checkpoint");
    let resume = resume_command(context, command, folder, record);
    CommandError::new(Exit::Interrupted, message).hint(format!("Resume with: {resume}"))
}
