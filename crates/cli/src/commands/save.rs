//! A fresh adapter, saved to sample from.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tinkex::{LoraConfig, SaveOptions, Timestamp};

use crate::error::CommandError;
use crate::output::Shell;
use crate::table::Table;

/// What can be typed after `checkpoint save`.
#[derive(Debug, Args)]
pub(crate) struct SaveArgs {
    /// The base model
    #[arg(long, value_name = "MODEL")]
    base_model: String,
    /// Write what was saved to a file, as JSON
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The adapter's rank
    #[arg(long, value_name = "N", default_value_t = 32)]
    rank: u32,
    /// Makes the start repeatable
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Whether the MLP layers are trained
    #[arg(long, value_name = "YES", default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    train_mlp: bool,
    /// Whether the attention layers are trained
    #[arg(long, value_name = "YES", default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    train_attn: bool,
    /// Whether the unembedding is trained
    #[arg(long, value_name = "YES", default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    train_unembed: bool,
    /// The checkpoint's name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

/// Makes an adapter and saves it.
pub(crate) async fn run(shell: &mut Shell<'_>, save: SaveArgs) -> Result<(), CommandError> {
    let service = shell.client().await?;
    let lora = LoraConfig {
        rank: save.rank,
        seed: save.seed,
        train_mlp: save.train_mlp,
        train_attn: save.train_attn,
        train_unembed: save.train_unembed,
    };
    let model = service.create_lora_training_client(&*save.base_model).lora(lora).create().await?;
    let name = save.name.unwrap_or_else(|| format!("checkpoint-{}", slug(&save.base_model)));
    let path = model.save_weights_for_sampler(SaveOptions::new(name)).await?;
    let document = json!({
        "base_model": save.base_model,
        "model_id": model.model_id().as_str(),
        "weights_path": path.to_string(),
        "saved_at": Timestamp::now().to_string(),
    });
    if let Some(file) = &save.output {
        let text = serde_json::to_string_pretty(&document).unwrap_or_default() + "\n";
        tinkex_files::write(shell.environment.path(file), text)
            .map_err(|why| CommandError::file("written", &file.display().to_string(), &why))?;
    }
    let mut table = Table::of_properties().title(format!("Checkpoint saved: {path}"));
    table.property("Base Model", save.base_model);
    table.property("Run ID", model.model_id().as_str());
    table.property("Path", path.to_string());
    shell.table(&table, &document)
}

/// A model's name as part of another name.
fn slug(model: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    model.chars().map(plain).collect()
}
