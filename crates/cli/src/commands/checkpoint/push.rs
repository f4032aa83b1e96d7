//! `tinkex checkpoint push-hf`: uploads a checkpoint to the Hugging Face hub.

use std::io;
use std::path::Path;

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde_json::{Map, Value, json};
use tinkex::CheckpointKind;
use tinkex::rest::WeightsInfo;
use tinkex::{Hub, TinkerPath};
use tinkex_files::NameFilter;
use tinkex_hub::{Commit, HubRepo};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::{self, CheckpointReference, CheckpointUse};
use crate::table::Table;

/// Configuration file of a PEFT adapter.
const CONFIG: &str = "adapter_config.json";
/// Names that the weights of a PEFT adapter may have.
const WEIGHTS: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];
/// Model card of a repository.
const CARD: &str = "README.md";
/// Marker file of the Tinker service, which is not uploaded.
const MARKER: &str = "checkpoint_complete";
/// Field of [`CONFIG`] with the name of the base model.
const BASE: &str = "base_model_name_or_path";

/// Arguments of `tinkex checkpoint push-hf`.
#[derive(Debug, Args)]
pub(crate) struct PushArgs {
    /// Checkpoint: tinker://RUN/weights/NAME, RUN/NAME, or RUN for its latest checkpoint
    #[arg(value_name = "CHECKPOINT", add = ArgValueCandidates::new(reference::checkpoint_candidates))]
    path: CheckpointReference,
    /// Repository [default: named after the model and the run]
    #[arg(short, long, value_name = "OWNER/NAME")]
    repo: Option<String>,
    /// Create the repository as public
    #[arg(long)]
    public: bool,
    /// Branch, created if it does not exist
    #[arg(long, value_name = "BRANCH")]
    revision: Option<String>,
    /// Commit message
    #[arg(long, value_name = "TEXT")]
    commit_message: Option<String>,
    /// Open a pull request instead of committing
    #[arg(long)]
    create_pr: bool,
    /// Upload only files that match, such as `*.json`; repeatable
    #[arg(long, value_name = "PATTERN")]
    allow_pattern: Vec<String>,
    /// Skip files that match; repeatable
    #[arg(long, value_name = "PATTERN")]
    ignore_pattern: Vec<String>,
    /// Do not create a model card
    #[arg(long)]
    no_model_card: bool,
    /// File with the hub token [default: HF_TOKEN, or the token that the hub's CLI stored]
    #[arg(long, value_name = "FILE")]
    hf_token_file: Option<std::path::PathBuf>,
}

pub(super) async fn push(
    context: &mut CommandContext<'_>,
    args: PushArgs,
) -> Result<(), CommandError> {
    let service = context.client().await?;
    let hub = with_token(context, &args, service.hub()?)?;
    hub.whoami().await?;
    let path = &args.path.resolve(context, CheckpointUse::Download).await?;
    let filter =
        NameFilter { include: args.allow_pattern.clone(), exclude: args.ignore_pattern.clone() };
    if !filter.is_empty() && path.kind() != CheckpointKind::Training {
        // Find wrong patterns before the download. A training checkpoint has no list of files
        // before the download exports it.
        let listed = service.rest().get_external_weights_urls(path).await?;
        select(&filter, listed.urls.into_keys().collect(), path)?;
    }

    let folder = tempfile::tempdir()
        .map_err(|error| CommandError::file("create", "a temporary folder", &error))?;
    let files = folder.path().join("checkpoint");
    context.notice(&format!("downloading {path}"));
    // The adapter is converted as a whole, so the patterns select only what is uploaded.
    let downloaded = service.rest().download(path.clone(), &files).peft(true).await?;
    let mut names = select(&filter, downloaded.files, path)?;
    if filter.is_empty() {
        check_adapter(&files)?;
    }

    let info = service.rest().get_weights_info(path).await?;
    add_base_model(&files, &info)?;
    let name = args.repo.clone().unwrap_or_else(|| default_repo(path, &info.base_model));
    let repo = hub.create_repo(&name).public(args.public).await?;
    let revision = match (&args.revision, &args.repo) {
        (Some(revision), _) => revision.clone(),
        (None, Some(_)) => "main".to_owned(),
        (None, None) => format!("{}-{}", path.kind().segment(), path.name()),
    };
    check_repo(&repo, &revision, path).await?;
    if revision != "main" {
        repo.create_branch(&revision).await?;
    }
    if !args.no_model_card && !names.iter().any(|name| name == CARD) {
        let card = model_card(path, repo.id(), &info);
        repo.validate_model_card(&card).await?;
        write(&files.join(CARD), card.as_bytes())?;
        names.push(CARD.to_owned());
    }
    names.sort();

    let message = args.commit_message.unwrap_or_else(|| format!("Upload {path}"));
    let mut commit = Commit::new(message).pull_request(args.create_pr);
    for name in names {
        let file = files.join(&name);
        commit = commit.file(name, file);
    }
    context.notice(&format!("uploading to {}", repo.id()));
    let committed = repo.commit(&revision, &commit).await?;

    let mut table = Table::of_properties().title(format!("Checkpoint Hub Upload: {path}"));
    table.property("Checkpoint Path", path.to_string());
    table.property("Repo ID", repo.id());
    table.property("Revision", &revision);
    table.property("Public", format::yes_no(args.public));
    if let Some(url) = &committed.pull_request_url {
        table.property("Pull Request", url);
    }
    let json = json!({
        "checkpoint_path": path, "repo_id": repo.id(), "revision": revision,
        "public": args.public, "commit_url": committed.commit_url,
        "pull_request_url": committed.pull_request_url,
    });
    context.table(&table, &json)
}

/// Returns the names of the files to upload. The marker file is uploaded only if a pattern asks for
/// it.
fn select(
    filter: &NameFilter,
    files: Vec<String>,
    path: &TinkerPath,
) -> Result<Vec<String>, CommandError> {
    let count = files.len();
    let is_selected =
        |name: &String| filter.selects(name) && (name != MARKER || !filter.include.is_empty());
    let names: Vec<String> = files.into_iter().filter(is_selected).collect();
    if names.is_empty() && !filter.is_empty() {
        let message =
            format!("no file of {path} is left to upload: the patterns exclude all {count} files");
        return Err(CommandError::new(Exit::NotFound, message)
            .hint("Check --allow-pattern and --ignore-pattern."));
    }
    Ok(names)
}

/// Replaces the token of the hub client by the one in `--hf-token-file`, if it is given.
fn with_token(
    context: &CommandContext<'_>,
    args: &PushArgs,
    hub: Hub,
) -> Result<Hub, CommandError> {
    let Some(file) = &args.hf_token_file else { return Ok(hub) };
    let shown = file.display();
    let text = std::fs::read_to_string(context.environment.path(file))
        .map_err(|error| CommandError::file("read", format!("hub token file {shown}"), &error))?;
    match text.trim() {
        "" => Err(CommandError::usage(format!("hub token file {shown} is empty"))
            .hint("Write the token into the file, or set HF_TOKEN.")),
        token => Ok(hub.token(token.to_owned())),
    }
}

/// Returns the default name of the repository.
fn default_repo(path: &TinkerPath, base_model: &str) -> String {
    let short = base_model.rsplit('/').next().unwrap_or(base_model);
    format!("tinker-{short}-{}", path.run())
}

/// Checks that the folder contains a PEFT adapter.
fn check_adapter(folder: &Path) -> Result<(), CommandError> {
    let has = |name: &str| folder.join(name).is_file();
    if has(CONFIG) && WEIGHTS.into_iter().any(has) {
        return Ok(());
    }
    let message =
        format!("the checkpoint is not an adapter: {CONFIG} or {} is missing", WEIGHTS[0]);
    Err(CommandError::new(Exit::Failed, message)
        .hint("Encrypted checkpoints (.age files) cannot be uploaded."))
}

/// Adds the name of the base model to the adapter's configuration, if it is missing.
fn add_base_model(folder: &Path, info: &WeightsInfo) -> Result<(), CommandError> {
    let file = folder.join(CONFIG);
    let text = match std::fs::read(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(CommandError::file("read", CONFIG, &error)),
    };
    let mut config: Map<String, Value> = serde_json::from_slice(&text).map_err(|error| {
        CommandError::new(Exit::Failed, format!("cannot parse the checkpoint's {CONFIG}: {error}"))
    })?;
    if config.get(BASE).and_then(Value::as_str).is_some_and(|name| !name.is_empty()) {
        return Ok(());
    }
    config.insert(BASE.to_owned(), Value::from(info.base_model.as_str()));
    let text = serde_json::to_string_pretty(&config).unwrap_or_default() + "\n";
    write(&file, text.as_bytes())
}

/// Rejects a repository whose model card names another checkpoint.
async fn check_repo(repo: &HubRepo, revision: &str, path: &TinkerPath) -> Result<(), CommandError> {
    let Some(card) = repo.read_text(revision, CARD).await? else { return Ok(()) };
    let existing = card.lines().find_map(|line| line.strip_prefix("tinker_path:"));
    match existing.map(str::trim) {
        Some(other) if other != path.to_string() => {
            let message = format!("{} at {revision} already contains {other}", repo.id());
            Err(CommandError::new(Exit::Failed, message).hint("Pass another --repo or --revision."))
        }
        _ => Ok(()),
    }
}

/// Returns the model card.
fn model_card(path: &TinkerPath, repo: &str, info: &WeightsInfo) -> String {
    let base = &info.base_model;
    let rank = info.lora_rank.map_or_else(|| "unknown".to_owned(), |rank| rank.to_string());
    let layers = [
        ("attention", info.train_attn),
        ("MLP", info.train_mlp),
        ("unembedding", info.train_unembed),
    ];
    let layers: Vec<_> =
        layers.iter().filter(|(_, on)| on.unwrap_or(true)).map(|(name, _)| *name).collect();
    format!(
        "---
base_model: {base}
library_name: peft
tags:
- tinker
- tinkex
- peft
- lora
- base_model:adapter:{base}
tinker_path: {path}
---

# LoRA adapter of {base}

Trained through the Tinker API and saved as `{path}`.

| | |
|---|---|
| base model | `{base}` |
| rank | {rank} |
| trained layers | {} |

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained(\"{repo}\")
```
",
        layers.join(", ")
    )
}

fn write(file: &Path, bytes: &[u8]) -> Result<(), CommandError> {
    tinkex_files::write(file, bytes)
        .map_err(|error| CommandError::file("write", file.display(), &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> WeightsInfo {
        let info = json!({
            "base_model": "Qwen/Qwen3-8B", "is_lora": true, "lora_rank": 32,
            "train_unembed": false,
        });
        serde_json::from_value(info).unwrap()
    }

    #[test]
    fn a_model_card_names_the_checkpoint_and_its_base_model() {
        let path = "tinker://run-1/weights/0001".parse().unwrap();
        let card = model_card(&path, "me/x", &info());
        assert!(card.contains("tinker_path: tinker://run-1/weights/0001\n"), "{card}");
        assert!(card.contains("base_model:adapter:Qwen/Qwen3-8B"), "{card}");
        assert!(card.contains("| trained layers | attention, MLP |"), "{card}");
        assert_eq!(default_repo(&path, "Qwen/Qwen3-8B"), "tinker-Qwen3-8B-run-1");
    }

    #[test]
    fn a_missing_base_model_is_added_and_nothing_else_changes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(CONFIG);
        std::fs::write(&file, r#"{"r": 32}"#).unwrap();
        add_base_model(folder.path(), &info()).unwrap();
        let config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(config, json!({ "r": 32, BASE: "Qwen/Qwen3-8B" }));
        std::fs::write(&file, r#"{"base_model_name_or_path": "mine"}"#).unwrap();
        add_base_model(folder.path(), &info()).unwrap();
        assert!(std::fs::read_to_string(&file).unwrap().contains("mine"));
        assert!(check_adapter(folder.path()).is_err(), "the weights are missing");
    }
}
