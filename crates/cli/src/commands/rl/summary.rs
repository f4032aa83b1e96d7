//! The result of a finished run, as text and as JSON.

use std::path::Path;

use serde_json::json;
use tinkex::recipes::rl::{RlOutcome, RlReport};

use crate::commands::train::progress::thousands;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;

use super::state::RlRunState;

/// Run that ended without an error.
pub(super) struct EndedRun {
    pub(super) outcome: RlOutcome,
    pub(super) run_id: String,
    pub(super) first: Option<RlReport>,
    pub(super) last: Option<RlReport>,
    pub(super) evals: Vec<f64>,
    pub(super) tokens: usize,
    pub(super) seconds: f64,
}

/// Prints the result of a finished run.
pub(super) fn report(
    context: &mut CommandContext<'_>,
    state: &RlRunState,
    folder: &Path,
    done: &EndedRun,
) -> Result<(), CommandError> {
    let reward = |report: &Option<RlReport>| report.as_ref().map(|report| report.reward);
    let (first, last) = (reward(&done.first), reward(&done.last));
    let sampler = done.outcome.sampler.as_ref().map(ToString::to_string).unwrap_or_default();
    let best = done.outcome.best.as_ref();
    let file = |name: &str| folder.join(name).display().to_string();
    #[expect(clippy::cast_precision_loss, reason = "a speed")]
    let speed = done.tokens as f64 / done.seconds.max(1e-9);
    let json = json!({
        "finished": true,
        "name": state.name,
        "model": state.model,
        "run_id": done.run_id,
        "steps": done.outcome.step,
        "tokens": done.tokens,
        "seconds": done.seconds,
        "tokens_per_second": speed,
        "reward": { "first": first, "last": last },
        "eval_reward": { "first": done.evals.first(), "last": done.evals.last() },
        "checkpoint": done.outcome.checkpoint,
        "sampler": done.outcome.sampler,
        "best": best.map(|best| json!({
            "step": best.step, "reward": best.reward, "checkpoint": best.path,
        })),
        "folder": folder,
        "metrics": file("metrics.jsonl"),
        "rollouts": file("rollouts.jsonl"),
    });
    let shown = |reward: Option<f64>| format::or_na(reward.map(|reward| format!("{reward:.3}")));
    let mut text = format!(
        "Trained {} in {} ({} tokens/s): reward {} → {}",
        format::count(done.outcome.step, "step"),
        format::short_duration(done.seconds),
        thousands(speed),
        shown(first),
        shown(last),
    );
    if let [first, .., last] = done.evals[..] {
        text += &format!(", held-out reward {first:.3} → {last:.3}");
    }
    let flags = context.server_flags();
    text += &format!("\n  checkpoint  {sampler}");
    if let Some(best) = best.filter(|best| best.step != done.outcome.step) {
        let (path, step, reward) = (&best.path, best.step, best.reward);
        text += &format!("\n  best        {path} (step {step}, reward {reward:.3})");
    }
    let adapter = done.outcome.checkpoint.as_ref().map(ToString::to_string);
    // A run of an older version has no name.
    let name = state.name.as_deref().map(format::shell_quote);
    let model = name.as_deref().unwrap_or(&sampler);
    text += &format!(
        "\n  metrics     {}\n  rollouts    {}\n\n\
         Chat with the model:\n  tinkex chat {model}{flags}\n\
         Download the adapter, for PEFT, vLLM and llama.cpp:\n  \
         tinkex checkpoint download {}{flags}",
        file("metrics.jsonl"),
        file("rollouts.jsonl"),
        name.as_deref().or(adapter.as_deref()).unwrap_or(&sampler),
    );
    context.text(&text, &json)
}
