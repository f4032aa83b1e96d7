//! [`RunEstimate`]: time and cost of a run, for `--dry-run`.

use serde::Serialize;
use tinkex::{LossFn, ServiceClient, TrainingClient};
use tinkex_recipes::{TrainExample, dpo};
use tinkex_runs::{MethodSettings, RunSettings};
use tokio::time::Instant;

use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::settings::is_loopback;
use crate::table::Table;

use super::examples::Examples;
use super::run;

/// A first step of at most this many seconds is repeated, because it also allocates memory.
const REPEAT_BELOW: f64 = 10.0;

/// Time and cost of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct RunEstimate {
    /// Seconds of all remaining steps, without evaluations and checkpoints.
    seconds: Option<f64>,
    measured_step: Option<MeasuredStep>,
    /// US dollars of all remaining steps.
    cost_usd: Option<f64>,
    /// Price in US dollars per million tokens, of `--price`.
    price_per_million_tokens: Option<f64>,
}

/// Step that was executed to estimate the time.
#[derive(Clone, Copy, Debug, Serialize)]
struct MeasuredStep {
    examples: usize,
    tokens: usize,
    seconds: f64,
}

impl RunEstimate {
    /// Estimates the steps of a run from step `from` on. `price` is in USD per million tokens.
    ///
    /// On a server on this machine, trains a new model for one step, measures its time, ends the
    /// session and deletes the run. Other servers are not used, because steps cost money there.
    pub(super) async fn new(
        context: &mut CommandContext<'_>,
        service: &ServiceClient,
        settings: &RunSettings,
        examples: &Examples,
        price: Option<f64>,
        from: u64,
    ) -> Result<Self, CommandError> {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let remaining = examples.remaining_tokens(settings, from) as f64;
        let cost_usd = price.map(|price| remaining / 1e6 * price);
        let mut estimate = Self { cost_usd, price_per_million_tokens: price, ..Self::default() };
        if !is_loopback(service.base_url().as_str()) || from >= settings.steps {
            return Ok(estimate);
        }
        let step = measure(context, service, settings, examples, from).await?;
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let seconds = step.seconds / step.tokens.max(1) as f64 * remaining;
        estimate.seconds = Some(seconds);
        estimate.measured_step = Some(step);
        Ok(estimate)
    }

    /// Adds the estimate to the table of the plan.
    pub(super) fn describe(&self, table: &mut Table) {
        match (self.seconds, self.measured_step) {
            (Some(seconds), Some(step)) => {
                let time = if seconds < 1.0 {
                    "less than 1s".to_owned()
                } else {
                    format::short_duration(seconds)
                };
                let examples = format::count(step.examples, "example");
                let tokens = step.tokens;
                let seconds = step.seconds;
                table.property(
                    "Estimated time",
                    format!("{time}, without evaluations and checkpoints"),
                );
                table.property(
                    "Measured step",
                    format!("{seconds:.2} s for {examples}, {tokens} tokens"),
                );
            }
            _ => table.property(
                "Estimated time",
                "unknown: a step is measured on this machine only".to_owned(),
            ),
        }
        table.property(
            "Estimated cost",
            match (self.cost_usd, self.price_per_million_tokens) {
                (Some(cost), Some(price)) => {
                    let cost = if cost > 0.0 && cost < 0.01 {
                        "less than 0.01".to_owned()
                    } else {
                        format!("{cost:.2}")
                    };
                    format!("{cost} USD, at {price} USD per million tokens (--price)")
                }
                _ if self.measured_step.is_some() => "none on this machine".to_owned(),
                _ => "unknown: pass --price USD, per million tokens".to_owned(),
            },
        );
    }
}

/// Trains a new model for one step, and deletes it.
async fn measure(
    context: &mut CommandContext<'_>,
    service: &ServiceClient,
    settings: &RunSettings,
    examples: &Examples,
    from: u64,
) -> Result<MeasuredStep, CommandError> {
    let batch = examples.settings.plan(settings, examples.train.len()).batch(from);
    let batch: Vec<_> = batch.into_iter().map(|index| &examples.train[index]).collect();
    let tokens = batch.iter().map(|example| example.tokens).sum();
    let model = run::create_model(context, service, settings, None, None).await?;
    let seconds = time_step(&model, settings, &batch).await;
    // The server does not delete the run of an open session. Ending the session closes `service`,
    // so the deletion needs another client. Servers that cannot delete runs keep an empty one.
    service.finish().await;
    if let Ok(client) = context.client().await {
        let _ = client.rest().delete_training_run(model.model_id().clone()).await;
    }
    Ok(MeasuredStep { examples: batch.len(), tokens, seconds: seconds? })
}

/// Returns the seconds of a training step on `batch`.
async fn time_step(
    model: &TrainingClient,
    settings: &RunSettings,
    batch: &[&TrainExample],
) -> Result<f64, CommandError> {
    let step = || {
        let data = batch.iter().flat_map(|example| example.data.clone()).collect();
        let loss = match &settings.method {
            MethodSettings::Dpo(settings) => dpo::loss(settings.beta),
            _ => LossFn::CrossEntropy.into(),
        };
        model.step(data, loss, settings.optimizer)
    };
    let mut seconds = f64::INFINITY;
    for _ in 0..2 {
        let started = Instant::now();
        step().await?;
        seconds = started.elapsed().as_secs_f64().min(seconds);
        if seconds > REPEAT_BELOW {
            break;
        }
    }
    Ok(seconds)
}
