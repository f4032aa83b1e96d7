//! `tinkex export`: writes a checkpoint as a model that other programs load.

use std::future::pending;
use std::path::{Path, PathBuf};
use std::pin::pin;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap_complete::ArgValueCandidates;
use futures_util::future::{Either, select};
use serde_json::json;
use tinkex::{
    CheckpointExport, ExportDType, ExportFormat, ExportProgress, ExportStage, ExportedModel,
};
use tinkex_runs::RunFolder;
use tinkex_server::MemorySize;
use tokio::sync::watch;

use crate::args::{FormatOption, export_or_output_format};
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::progress::{Progress, ProgressUnit};
use crate::reference::{self, CheckpointReference, CheckpointUse};
use crate::table::{Table, TableCell};

use super::training_details::training_details;

/// Arguments of `tinkex export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Checkpoint (tinker://RUN/weights/NAME, RUN/NAME or RUN), or a folder with a PEFT adapter
    #[arg(add = ArgValueCandidates::new(reference::checkpoint_candidates))]
    checkpoint: String,
    /// Folder to create
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
    /// Format of the files [default: hf]
    #[arg(short, long, value_name = "FORMAT", value_parser = export_or_output_format())]
    format: Option<FormatOption>,
    /// Element type of the weights [default: as in the base model; for gguf f16]
    #[arg(long, value_name = "TYPE", value_parser = export_dtype())]
    dtype: Option<ExportDType>,
    /// Split the weights of format hf into files of at most this size, such as 2GB; a larger tensor
    /// has a file of its own [default: 5GB]
    #[arg(long, value_name = "SIZE", value_parser = shard_size)]
    max_shard_size: Option<MemorySize>,
    /// Folder of the base model [default: found by its name]
    #[arg(long, value_name = "FOLDER")]
    base: Option<PathBuf>,
    /// Replace an existing folder once the export is complete
    #[arg(long)]
    force: bool,
    /// Print JSON
    // clap passes the value to the global --json, which this option replaces: the global one
    // conflicts with --format.
    #[arg(long)]
    json: bool,
}

impl ExportArgs {
    fn export_format(&self) -> ExportFormat {
        match self.format {
            Some(FormatOption::Export(format)) => format,
            // `--format json` and the like select only the output format.
            _ => ExportFormat::default(),
        }
    }
}

fn export_dtype() -> impl TypedValueParser<Value = ExportDType> {
    PossibleValuesParser::new(ExportDType::ALL.map(ExportDType::as_str))
        .try_map(|name| name.parse::<ExportDType>())
}

/// Parses the maximum size of a file.
fn shard_size(text: &str) -> Result<MemorySize, String> {
    match MemorySize::parse_without_minimum(text)? {
        size if size.bytes() == 0 => Err("expected at least 1B".to_owned()),
        size => Ok(size),
    }
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: ExportArgs,
) -> Result<(), CommandError> {
    let target = context.environment.path(&args.to);
    if target.exists() && !args.force {
        let message = format!("{} already exists", args.to.display());
        return Err(CommandError::new(Exit::Failed, message)
            .hint("Pass --force to replace it, or choose another folder with --to FOLDER."));
    }
    // Holds the files of the built-in model, if it is the base model.
    let built_in = tempfile::tempdir()
        .map_err(|error| CommandError::file("create", "a temporary folder", &error))?;
    let interrupt = context.environment.interrupt.clone();
    let folder = context.environment.path(Path::new(&args.checkpoint));
    let export = if folder.is_dir() && !RunFolder::contains_run(&folder) {
        CheckpointExport::from_adapter(folder, &target, &context.environment.variables)
    } else {
        let reference: CheckpointReference =
            args.checkpoint.parse().map_err(CommandError::usage)?;
        let find = reference.resolve(context, CheckpointUse::Download);
        let path = interrupt.run_until(1, find).await?;
        let client = interrupt.run_until(1, context.client()).await?;
        let rest = client.rest();
        let details = training_details(context.environment, &rest, &path);
        let details = interrupt.run_until(1, details).await?;
        let export = rest.export(path, &target);
        details.into_iter().fold(export, |export, (name, value)| export.detail(name, value))
    };
    let mut export = export.format(args.export_format()).replace(args.force);
    if let Some(dtype) = args.dtype {
        export = export.dtype(dtype);
    }
    if let Some(size) = args.max_shard_size {
        export = export.shard_bytes(size.bytes() as u64);
    }
    if let Some(base) = &args.base {
        export = export.base(context.environment.path(base));
    }
    let folder = built_in.path().to_owned();
    let export = export.find_base(move |name| {
        if name != tinkex_server::BUILT_IN {
            return Ok(None);
        }
        tinkex_server::write_built_in_model(&folder).map_err(std::io::Error::other)?;
        Ok(Some(folder))
    });
    let exported = show_export(context, &args.to, export).await?;
    print(context, &args, &exported)
}

/// Runs an export with a progress bar until it ends. The first Ctrl-C stops it.
async fn show_export(
    context: &mut CommandContext<'_>,
    to: &Path,
    export: CheckpointExport,
) -> Result<ExportedModel, CommandError> {
    let (report, mut reports) = watch::channel(ExportProgress::default());
    let interrupt = context.environment.interrupt.clone();
    let interrupted = interrupt.clone();
    let export = export
        .on_progress(move |now| {
            report.send_replace(*now);
        })
        .cancel_on(async move { interrupted.pressed(1).await });
    let mut export = pin!(export.into_future());
    let label = |stage: ExportStage| match stage {
        ExportStage::Downloading => "Downloading the checkpoint".to_owned(),
        _ => format!("Writing {}", to.display()),
    };
    let mut shown: Option<(ExportStage, Progress)> = None;
    loop {
        {
            let reported = pin!(async {
                if reports.changed().await.is_err() {
                    // The callback was dropped, so the export itself is about to end.
                    pending::<()>().await;
                }
            });
            // Reports first, so that a short export shows its progress too.
            if let Either::Right((result, _)) = select(reported, export.as_mut()).await {
                return match result {
                    Err(_) if interrupt.count() > 0 => Err(CommandError::interrupted()),
                    result => Ok(result?),
                };
            }
        }
        let now = *reports.borrow();
        let progress = match shown.take() {
            Some((stage, progress)) if stage == now.stage => progress,
            other => {
                drop(other);
                Progress::new(context, label(now.stage), ProgressUnit::Bytes, None)
            }
        };
        progress.set_bytes(now.bytes, now.bytes_total);
        shown = Some((now.stage, progress));
    }
}

fn print(
    context: &mut CommandContext<'_>,
    args: &ExportArgs,
    exported: &ExportedModel,
) -> Result<(), CommandError> {
    let format = args.export_format();
    if format != ExportFormat::Peft && !exported.has_tokenizer {
        context.notice(
            "The base model has no tokenizer.json: add tokenizer files to the folder before you \
             load the model.",
        );
    }
    let mut table = Table::of_properties().title(format!("Export: {}", args.checkpoint));
    table.property("Checkpoint", &args.checkpoint);
    table.property("Format", format.as_str());
    // Without --dtype, the tensors keep their types, which may differ.
    let dtype = exported.dtype.map_or("mixed", ExportDType::as_str);
    table.property("Element Type", dtype);
    table.property("Total Size", TableCell::size(exported.bytes));
    table.property("Written to", args.to.display().to_string());
    let json = json!({
        "checkpoint": args.checkpoint, "format": format.as_str(),
        "dtype": dtype,
        "destination": args.to.display().to_string(), "files": exported.files,
        "file_size_bytes": exported.bytes, "has_tokenizer": exported.has_tokenizer,
        "is_untied": exported.is_untied,
    });
    context.table(&table, &json)
}
