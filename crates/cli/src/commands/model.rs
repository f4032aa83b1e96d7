//! `tinkex model`: base models.

use clap::Subcommand;
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use tinkex::{ServiceClient, SupportedModel};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::id_cache;
use crate::list::{ListColumn, SortKey, ViewArgs};
use crate::table::Table;

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// List the base models of the server
    #[command(after_help = "Examples:
  tinkex model list
  tinkex model list qwen                only models whose name contains \"qwen\"
  tinkex model list --sort -context

Columns: name, context, trainable, sampleable.")]
    List {
        /// Only models whose name contains this text, ignoring case
        substring: Option<String>,
        #[command(flatten)]
        view: ViewArgs,
    },
    /// Show a base model
    #[command(after_help = "Example:
  tinkex model info Qwen/Qwen3-8B")]
    Info {
        /// Name of the model
        #[arg(add = ArgValueCandidates::new(id_cache::models))]
        name: String,
    },
}

/// Hint for a model that does not exist.
const LIST_MODELS: &str = "List the available models with `tinkex model list`.";

const COLUMNS: [ListColumn<SupportedModel>; 4] = [
    ListColumn {
        name: "name",
        header: "Model",
        by_default: true,
        cell: |model, _| format::or_na(model.model_name.as_ref()),
        key: |model| model.model_name.as_ref().map_or(SortKey::Missing, SortKey::text),
    },
    ListColumn {
        name: "context",
        header: "Max Context",
        by_default: true,
        cell: |model, _| format::or_na(model.max_context_length),
        key: |model| SortKey::size(model.max_context_length),
    },
    ListColumn {
        name: "trainable",
        header: "Trainable",
        by_default: true,
        cell: |model, _| format::or_na(model.trainable.map(format::yes_no)),
        key: |model| model.trainable.map_or(SortKey::Missing, SortKey::Flag),
    },
    ListColumn {
        name: "sampleable",
        header: "Sampleable",
        by_default: true,
        cell: |model, _| format::or_na(model.sampleable.map(format::yes_no)),
        key: |model| model.sampleable.map_or(SortKey::Missing, SortKey::Flag),
    },
];

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: ModelCommand,
) -> Result<(), CommandError> {
    match command {
        ModelCommand::List { substring, view } => list(context, substring, &view).await,
        ModelCommand::Info { name } => info(context, &name).await,
    }
}

fn name_contains(model: &SupportedModel, part: &str) -> bool {
    let name = model.model_name.as_deref().unwrap_or_default();
    name.to_lowercase().contains(&part.to_lowercase())
}

async fn list(
    context: &mut CommandContext<'_>,
    substring: Option<String>,
    view: &ViewArgs,
) -> Result<(), CommandError> {
    #[derive(Serialize)]
    struct ModelList {
        models: Vec<SupportedModel>,
        total: usize,
        shown: usize,
    }

    let view = view.resolve(context, &COLUMNS)?;
    let client = context.client().await?;
    let mut models = client.server_capabilities().await?.supported_models;
    let total = models.len();
    let names = models.iter().filter_map(|model| model.model_name.clone());
    id_cache::store(&context.environment.variables, id_cache::IdKind::Model, names);
    if let Some(part) = substring {
        models.retain(|model| name_contains(model, &part));
        if models.is_empty() {
            return Err(no_match(&client, &part).await);
        }
    }
    let shown = models.len();
    view.print(context, None, models, |models| ModelList { models, total, shown })
}

async fn no_match(client: &ServiceClient, part: &str) -> CommandError {
    // The server may not report the organization of a key.
    let organization = match client.whoami().await {
        Ok(who) => format!(" for organization {}", who.org_urn),
        Err(_) => String::new(),
    };
    CommandError::new(Exit::NotFound, format!("no model name contains {part:?}{organization}"))
        .hint(LIST_MODELS)
}

async fn info(context: &mut CommandContext<'_>, name: &str) -> Result<(), CommandError> {
    let client = context.client().await?;
    let models = client.server_capabilities().await?.supported_models;
    let has_name = |model: &&SupportedModel| {
        model.model_name.as_deref().is_some_and(|known| known.eq_ignore_ascii_case(name))
    };
    let Some(model) = models.iter().find(has_name) else {
        let short = name.rsplit('/').next().unwrap_or(name);
        let near: Vec<_> = models.iter().filter(|model| name_contains(model, short)).collect();
        let near: Vec<_> = near.iter().filter_map(|model| model.model_name.as_deref()).collect();
        let hint = match near[..] {
            [] => LIST_MODELS.to_owned(),
            _ => format!("Did you mean {}?", near.join(" or ")),
        };
        return Err(CommandError::new(Exit::NotFound, format!("unknown model {name:?}")).hint(hint));
    };
    let now = tinkex::Timestamp::now();
    let mut table = Table::of_properties().title(format!("Model: {name}"));
    for column in &COLUMNS {
        table.property(column.header, (column.cell)(model, now));
    }
    context.table(&table, model)
}
