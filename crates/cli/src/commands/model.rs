//! Base models.

use clap::Subcommand;
use serde::Serialize;
use tinkex::{ServiceClient, SupportedModel};

use crate::error::{CommandError, Exit};
use crate::format;
use crate::list::{ListColumn, SortKey, ViewArgs};
use crate::output::Shell;
use crate::table::Table;

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// List the models that can be trained or sampled from
    #[command(after_help = "Examples:
  tinkex model list
  tinkex model list qwen                names with this in them, in any case
  tinkex model list --sort -context

Columns: name, context, trainable, sampleable.")]
    List {
        /// Only names with this in them, in any case
        substring: Option<String>,
        #[command(flatten)]
        view: ViewArgs,
    },
    /// Show one model
    #[command(after_help = "Example:
  tinkex model info Qwen/Qwen3-8B")]
    Info {
        /// Its name
        name: String,
    },
}

const COLUMNS: [ListColumn<SupportedModel>; 4] = [
    ListColumn {
        name: "name",
        header: "ModelCommand",
        usual: true,
        cell: |model, _| format::or_missing(model.model_name.as_ref()),
        key: |model| model.model_name.as_ref().map_or(SortKey::Missing, SortKey::text),
    },
    ListColumn {
        name: "context",
        header: "Max Context",
        usual: true,
        cell: |model, _| format::or_missing(model.max_context_length),
        key: |model| SortKey::size(model.max_context_length),
    },
    ListColumn {
        name: "trainable",
        header: "Trainable",
        usual: true,
        cell: |model, _| format::or_missing(model.trainable.map(format::yes)),
        key: |model| model.trainable.map_or(SortKey::Missing, |yes| SortKey::Number(yes.into())),
    },
    ListColumn {
        name: "sampleable",
        header: "Sampleable",
        usual: true,
        cell: |model, _| format::or_missing(model.sampleable.map(format::yes)),
        key: |model| model.sampleable.map_or(SortKey::Missing, |yes| SortKey::Number(yes.into())),
    },
];

pub(super) async fn run(shell: &mut Shell<'_>, command: ModelCommand) -> Result<(), CommandError> {
    match command {
        ModelCommand::List { substring, view } => list(shell, substring, &view).await,
        ModelCommand::Info { name } => info(shell, &name).await,
    }
}

fn contains(model: &SupportedModel, part: &str) -> bool {
    let name = model.model_name.as_deref().unwrap_or_default();
    name.to_lowercase().contains(&part.to_lowercase())
}

async fn list(
    shell: &mut Shell<'_>,
    substring: Option<String>,
    view: &ViewArgs,
) -> Result<(), CommandError> {
    #[derive(Serialize)]
    struct Listed {
        models: Vec<SupportedModel>,
        total: usize,
        shown: usize,
    }

    let shown = view.of(shell, &COLUMNS)?;
    let client = shell.client().await?;
    let mut models = client.server_capabilities().await?.supported_models;
    let total = models.len();
    if let Some(part) = substring {
        models.retain(|model| contains(model, &part));
        if models.is_empty() {
            return Err(nothing(&client, &part).await);
        }
    }
    shown.sort(&mut models);
    let table = shown.table(&models, tinkex::Timestamp::now());
    shell.table(&table, &Listed { total, shown: models.len(), models })
}

async fn nothing(client: &ServiceClient, part: &str) -> CommandError {
    // A plain key does not tell whose it is; then the name is left out.
    let whose = match client.whoami().await {
        Ok(who) => format!(" for organization {}", who.org_urn),
        Err(_) => String::new(),
    };
    CommandError::new(Exit::NotFound, format!("no model name contains {part:?}{whose}"))
        .hint("`tinkex model list` shows every model that can be used")
}

async fn info(shell: &mut Shell<'_>, name: &str) -> Result<(), CommandError> {
    let client = shell.client().await?;
    let models = client.server_capabilities().await?.supported_models;
    let is = |model: &&SupportedModel| {
        model.model_name.as_deref().is_some_and(|known| known.eq_ignore_ascii_case(name))
    };
    let Some(model) = models.iter().find(is) else {
        let short = name.rsplit('/').next().unwrap_or(name);
        let near: Vec<_> = models.iter().filter(|model| contains(model, short)).collect();
        let near: Vec<_> = near.iter().filter_map(|model| model.model_name.as_deref()).collect();
        let hint = match near[..] {
            [] => "`tinkex model list` shows every model that can be used".to_owned(),
            _ => format!("there is {}", near.join(", ")),
        };
        return Err(
            CommandError::new(Exit::NotFound, format!("there is no model {name:?}")).hint(hint)
        );
    };
    let now = tinkex::Timestamp::now();
    let mut table = Table::of_properties().title(format!("ModelCommand: {name}"));
    for column in &COLUMNS {
        table.property(column.header, (column.cell)(model, now));
    }
    shell.table(&table, model)
}
