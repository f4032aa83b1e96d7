//! `tinkex import`: imports a PEFT adapter as a checkpoint of a `tinkex` server.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::progress::Progress;

/// Arguments of `tinkex import`.
#[derive(Debug, Args)]
#[command(after_help = "\
FOLDER contains adapter_config.json and adapter_model.safetensors, as PEFT saves them. The server checks
rank, alpha, modules and shapes against the base model; only plain LoRA is supported.

Examples:
  tinkex import adapter --local                          an adapter of a model that --local serves
  tinkex import adapter --base Qwen/Qwen3-0.6B --local   name the base model
  tinkex import adapter --name french --base-url http://localhost:8000")]
pub(crate) struct ImportArgs {
    /// Folder of the adapter
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Base model on the server [default: the one that adapter_config.json names]
    #[arg(long, alias = "base-model", value_name = "MODEL")]
    base: Option<String>,
    /// Name of the checkpoints
    #[arg(long, value_name = "NAME", default_value = "imported")]
    name: String,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: ImportArgs,
) -> Result<(), CommandError> {
    let folder = context.environment.path(&args.folder);
    let service = context.client().await?;
    let mut import = service.rest().import_adapter(folder).name(args.name);
    let names_base = args.base.is_some();
    if let Some(base) = args.base {
        import = import.base_model(base);
    }
    let shown = args.folder.display().to_string();
    let imported = {
        let _progress = Progress::waiting(context, format!("importing {shown}"));
        import.await
    };
    let imported = imported.map_err(|error| match error.status() {
        Some(400) if !names_base => CommandError::from(error).hint(
            "Pass --base MODEL if the adapter belongs to another base model of the server; `tinkex \
             model list` lists them.",
        ),
        _ => error.into(),
    })?;
    let flags = context.server_flags();
    let weights = &imported.weights_path;
    let sampler = &imported.sampler_weights_path;
    let text = format!(
        "Imported {shown}: adapter of {}, rank {}, {}\n  sampling    {sampler}\n  \
         training    {weights}\n\nChat with the model:\n  tinkex chat {sampler}{flags}\n\
         Continue training:\n  tinkex train FILE --from {weights}{flags}",
        imported.base_model,
        imported.lora_rank,
        format::bytes(imported.size_bytes),
    );
    let json = json!({
        "folder": args.folder,
        "run_id": imported.training_run_id,
        "base_model": imported.base_model,
        "rank": imported.lora_rank,
        "size_bytes": imported.size_bytes,
        "sampler": sampler,
        "checkpoint": weights,
    });
    context.text(&text, &json)
}
