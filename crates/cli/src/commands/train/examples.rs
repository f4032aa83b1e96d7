//! What a run is trained and evaluated on, and what that makes of what was typed.

use std::path::PathBuf;

use serde_json::{Value, json};
use tinkex::{Chat, ServiceClient, Tokenizer};

use crate::commands::weights;
use crate::error::CommandError;
use crate::output::Shell;
use crate::table::Table;

use super::args::RunArgs;
use super::data::{self, TrainExample};
use super::state::RunConfig;

/// Checkpoints and evaluations of a run, if nothing else is said.
const OFTEN: u64 = 10;

/// The model that was named, or the built-in one.
pub(super) fn base_model(shell: &Shell<'_>, named: Option<&str>) -> Result<String, CommandError> {
    match named {
        Some(name) => Ok(name.to_owned()),
        None if shell.settings.local => Ok(tinkex_server::BUILT_IN.to_owned()),
        None => Err(CommandError::usage("which model? none is named")
            .hint("say --model NAME (see tinkex model list), or --local for the built-in one")),
    }
}

/// The tokenizer of a base model that nobody trains yet. A server on this machine knows best.
pub(super) async fn find_tokenizer(
    shell: &Shell<'_>,
    service: &ServiceClient,
    model: &str,
    named: Option<&str>,
) -> Result<Tokenizer, CommandError> {
    let env = &shell.environment.variables;
    let url = service.base_url().as_str();
    let here = ["http://127.0.0.1", "http://localhost", "http://[::1]"];
    match named {
        Some(name) => weights::tokenizer(env, name, false).await,
        None if model == tinkex_server::BUILT_IN => weights::tokenizer(env, model, false).await,
        None if here.iter().any(|here| url.starts_with(here)) => {
            Ok(service.create_sampling_client(model).await?.tokenizer().await?)
        }
        None => weights::tokenizer(env, model, false).await,
    }
}

/// What was typed, with what was left open filled in. Steps follow once the examples are known.
pub(super) async fn settle(
    shell: &Shell<'_>,
    wanted: &RunArgs,
    service: &ServiceClient,
    model: String,
) -> Result<RunConfig, CommandError> {
    let models = service.server_capabilities().await?.supported_models;
    let about = models.iter().find(|about| about.model_name.as_deref() == Some(&*model));
    let longest = about.and_then(|about| about.max_context_length);
    let longest = longest.and_then(|most| usize::try_from(most).ok());
    let absolute = |path: &PathBuf| {
        let path = shell.environment.path(path);
        std::path::absolute(&path).unwrap_or(path)
    };
    Ok(RunConfig {
        file: wanted.file.as_ref().map(absolute).unwrap_or_default(),
        eval_file: wanted.eval_file.as_ref().map(absolute),
        eval_split: wanted.eval_split,
        tokenizer: wanted.tokenizer.clone(),
        rank: wanted.rank,
        learning_rate: wanted.learning_rate.unwrap_or_else(|| usual_rate(&model)),
        schedule: wanted.schedule,
        warmup: wanted.warmup,
        batch_size: wanted.batch_size,
        steps: 0,
        seed: wanted.seed,
        max_tokens: wanted.max_tokens.or(longest),
        refuse_long: wanted.refuse_long,
        learn: wanted.learn,
        eval_every: 0,
        save_every: 0,
        keep: wanted.keep,
        model,
    })
}

/// A learning rate that suits a model: small ones need large steps.
fn usual_rate(model: &str) -> f64 {
    if model == tinkex_server::BUILT_IN { 3e-3 } else { 2e-4 }
}

/// What is trained and evaluated on.
pub(super) struct Examples {
    pub(super) train: Vec<TrainExample>,
    pub(super) eval: Vec<TrainExample>,
}

impl Examples {
    /// Reads everything, and counts the steps of a new run.
    pub(super) fn read(
        chat: &Chat,
        mut settings: RunConfig,
        wanted: &RunArgs,
        is_new: bool,
    ) -> Result<(Self, RunConfig), CommandError> {
        let (learn, most) = (settings.learn.into(), settings.most());
        let pieces = data::read(chat, &settings.file, learn, most)?;
        let (train, eval) = match &settings.eval_file {
            Some(file) => (pieces, data::read(chat, file, learn, most)?),
            None => data::split(pieces, settings.eval_split, settings.seed)?,
        };
        if is_new {
            let per_epoch = settings.plan(train.len()).steps_per_epoch();
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a count of steps"
            )]
            let of_epochs = (per_epoch as f64 * wanted.epochs).ceil() as u64;
            settings.steps = wanted.steps.unwrap_or(of_epochs).max(1);
            let often = settings.steps.div_ceil(OFTEN);
            settings.eval_every = wanted.eval_every.unwrap_or(often);
            settings.save_every = wanted.save_every.unwrap_or(often);
        }
        Ok((Self { train, eval }, settings))
    }

    /// What a run would do.
    pub(super) fn plan(&self, settings: &RunConfig, from: u64) -> (Table, Value) {
        let plan = settings.plan(self.train.len());
        let tokens: usize = self.train.iter().map(|piece| piece.tokens).sum();
        let learned: f64 = self.train.iter().map(|piece| piece.weight).sum();
        let longest = self.train.iter().map(|piece| piece.tokens).max().unwrap_or(0);
        let of_step = |step| plan.batch(step).into_iter().map(|at| self.train[at].tokens);
        let whole: usize = (from..settings.steps).flat_map(of_step).sum();
        let mut table = Table::of_properties().title(format!("Plan: {}", settings.file.display()));
        table.property("Base model", &settings.model);
        table.property("Examples", self.train.len().to_string());
        table.property("Held out", self.eval.len().to_string());
        table.property("Tokens", format!("{tokens} ({learned:.0} of them learned)"));
        table.property("Longest example", format!("{longest} tokens"));
        let epochs = plan.epochs(settings.steps);
        table.property("Steps", format!("{} of {} examples", settings.steps, settings.batch_size));
        table.property("Epochs", format!("{epochs:.2}"));
        table.property("Tokens to train on", whole.to_string());
        table.property("Rank", settings.rank.to_string());
        let rate = format!("{:e}, {:?}", settings.learning_rate, settings.schedule);
        table.property("Learning rate", rate.to_lowercase());
        let every = |every: u64| match every {
            0 => "never".to_owned(),
            every => format!("every {every} steps"),
        };
        table.property(
            "Evaluated",
            if self.eval.is_empty() { every(0) } else { every(settings.eval_every) },
        );
        table.property(
            "Saved",
            format!("{}, the last {} kept", every(settings.save_every), settings.keep),
        );
        let json = json!({
            "settings": settings,
            "examples": self.train.len(),
            "held_out": self.eval.len(),
            "tokens": tokens,
            "tokens_learned": learned,
            "longest_example": longest,
            "steps": settings.steps,
            "steps_done": from,
            "epochs": epochs,
            "tokens_to_train_on": whole,
        });
        (table, json)
    }
}
