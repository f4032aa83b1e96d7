//! `tinkex checkpoint save`: saves a new, untrained adapter.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tinkex::{LoraConfig, LoraOptions, SaveOptions, Timestamp};

use crate::args::{positive, whole_number};
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::table::Table;

/// Arguments of `tinkex checkpoint save`.
#[derive(Debug, Args)]
pub(crate) struct SaveArgs {
    /// Base model
    #[arg(long, value_name = "MODEL")]
    base_model: String,
    /// Also write the result as JSON to this file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// LoRA rank
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = positive::<u32>)]
    rank: u32,
    /// Seed of the initial weights
    #[arg(long, value_name = "N", value_parser = whole_number::<u64>)]
    seed: Option<u64>,
    /// Adapt the MLP layers
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    train_mlp: bool,
    /// Adapt the attention layers
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    train_attn: bool,
    /// Adapt the unembedding layer
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    train_unembed: bool,
    /// Name of the checkpoint [default: checkpoint-MODEL]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

pub(crate) async fn run(
    context: &mut CommandContext<'_>,
    args: SaveArgs,
) -> Result<(), CommandError> {
    let service = context.client().await?;
    let lora = LoraConfig::with_rank(args.rank)
        .seed(args.seed)
        .train_mlp(args.train_mlp)
        .train_attn(args.train_attn)
        .train_unembed(args.train_unembed);
    let model =
        service.create_lora_training_client(LoraOptions::new(&*args.base_model).lora(lora)).await?;
    let name = args.name.unwrap_or_else(|| format!("checkpoint-{}", slug(&args.base_model)));
    let path = model.save_weights_for_sampler(SaveOptions::new(name)).await?;
    let document = json!({
        "base_model": args.base_model,
        "model_id": model.model_id().as_str(),
        "weights_path": path.to_string(),
        "saved_at": Timestamp::now().to_string(),
    });
    if let Some(file) = &args.output {
        let text = serde_json::to_string_pretty(&document).unwrap_or_default() + "\n";
        tinkex_files::write(context.environment.path(file), text)
            .map_err(|error| CommandError::file("write", file.display(), &error))?;
    }
    let mut table = Table::of_properties().title(format!("Checkpoint saved: {path}"));
    table.property("Base Model", args.base_model);
    table.property("Run ID", model.model_id().as_str());
    table.property("Path", path.to_string());
    context.table(&table, &document)
}

/// Converts a model name to lower case with dashes.
fn slug(model: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    model.chars().map(plain).collect()
}
