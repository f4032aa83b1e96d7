//! Putting a checkpoint into a repository of a hub.

use std::io;
use std::path::Path;

use clap::Args;
use serde_json::{Map, Value, json};
use tinkex::wire::{CheckpointKind, WeightsInfo};
use tinkex::{Commit, Hub, HubRepo, TinkerPath};

use crate::error::{CommandError, Exit};
use crate::format;
use crate::output::Shell;
use crate::table::Table;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];
const CARD: &str = "README.md";
/// A mark of the service's that means nothing to a hub.
const MARK: &str = "checkpoint_complete";
const BASE: &str = "base_model_name_or_path";

/// What goes where.
#[derive(Debug, Args)]
pub(crate) struct PushArgs {
    /// Its address: tinker://run/weights/name
    path: TinkerPath,
    /// The repository; without it one named after the model and the run
    #[arg(short, long, value_name = "OWNER/NAME")]
    repo: Option<String>,
    /// Let everyone see a repository that is made
    #[arg(long)]
    public: bool,
    /// The branch; made if it is not there
    #[arg(long, value_name = "BRANCH")]
    revision: Option<String>,
    /// What the change is about
    #[arg(long, value_name = "TEXT")]
    commit_message: Option<String>,
    /// Ask for the change in place of making it
    #[arg(long)]
    create_pr: bool,
    /// Only files like this (*.json); may be repeated
    #[arg(long, value_name = "PATTERN")]
    allow_pattern: Vec<String>,
    /// No files like this; may be repeated
    #[arg(long, value_name = "PATTERN")]
    ignore_pattern: Vec<String>,
    /// Do not write a model card
    #[arg(long)]
    no_model_card: bool,
    /// A file with the hub's token; without it HF_TOKEN, or what the hub's own tool stored
    #[arg(long, value_name = "FILE")]
    hf_token_file: Option<std::path::PathBuf>,
}

pub(super) async fn push(shell: &mut Shell<'_>, what: PushArgs) -> Result<(), CommandError> {
    let path = &what.path;
    if path.kind() == CheckpointKind::Sampler {
        return Err(CommandError::usage(format!(
            "{path} was saved to sample from, and has no files"
        ))
        .hint("push a training checkpoint (weights) or external weights"));
    }
    let service = shell.client().await?;
    let hub = hub(shell, &what, service.hub()?)?;
    hub.whoami().await?;

    let folder = tempfile::tempdir().map_err(|why| CommandError::file("made", "a folder", &why))?;
    let files = folder.path().join("checkpoint");
    let mut download = service.rest().download(path.clone(), &files);
    for pattern in &what.allow_pattern {
        download = download.include(pattern);
    }
    for pattern in &what.ignore_pattern {
        download = download.exclude(pattern);
    }
    shell.notice(&format!("downloading {path}"));
    let downloaded = download.await?;
    if what.allow_pattern.is_empty() && what.ignore_pattern.is_empty() {
        check(&files)?;
    }

    let info = service.rest().get_weights_info(path).await?;
    complete(&files, &info)?;
    let wanted = what.repo.clone().unwrap_or_else(|| derived(path, &info.base_model));
    let repo = hub.create_repo(&wanted, what.public).await?;
    let revision = match (&what.revision, &what.repo) {
        (Some(revision), _) => revision.clone(),
        (None, Some(_)) => "main".to_owned(),
        (None, None) => format!("{}-{}", path.kind().segment(), path.name()),
    };
    refuse_another(&repo, &revision, path).await?;
    if revision != "main" {
        repo.create_branch(&revision).await?;
    }
    let mut names = downloaded.files;
    names.retain(|name| name != MARK || !what.allow_pattern.is_empty());
    if !what.no_model_card && !names.iter().any(|name| name == CARD) {
        let card = card(path, repo.id(), &info);
        repo.check_card(&card).await?;
        write(&files.join(CARD), card.as_bytes())?;
        names.push(CARD.to_owned());
    }
    names.sort();

    let message = what.commit_message.unwrap_or_else(|| format!("Upload {path}"));
    let mut commit = Commit::new(message).pull_request(what.create_pr);
    for name in names {
        let file = files.join(&name);
        commit = commit.file(name, file);
    }
    shell.notice(&format!("uploading to {}", repo.id()));
    let done = repo.commit(&revision, &commit).await?;

    let mut table = Table::of_properties().title(format!("Checkpoint Hub Upload: {path}"));
    table.property("Checkpoint Path", path.to_string());
    table.property("Repo ID", repo.id());
    table.property("Revision", &revision);
    table.property("Public", format::yes(what.public));
    if let Some(url) = &done.pull_request_url {
        table.property("Pull Request", url);
    }
    let json = json!({
        "checkpoint_path": path, "repo_id": repo.id(), "revision": revision,
        "public": what.public, "commit_url": done.commit_url,
        "pull_request_url": done.pull_request_url,
    });
    shell.table(&table, &json)
}

fn hub(shell: &Shell<'_>, what: &PushArgs, hub: Hub) -> Result<Hub, CommandError> {
    let Some(file) = &what.hf_token_file else { return Ok(hub) };
    let shown = file.display().to_string();
    let text = std::fs::read_to_string(shell.environment.path(file))
        .map_err(|why| CommandError::file("read", &shown, &why))?;
    match text.trim() {
        "" => Err(CommandError::usage(format!("{shown} is empty; it should hold the hub's token"))),
        token => Ok(hub.token(token.to_owned())),
    }
}

/// A repository that is named after what it holds.
fn derived(path: &TinkerPath, base_model: &str) -> String {
    let short = base_model.rsplit('/').next().unwrap_or(base_model);
    format!("tinker-{short}-{}", path.run())
}

/// Refuses what no other tool could load.
fn check(folder: &Path) -> Result<(), CommandError> {
    let has = |name: &str| folder.join(name).is_file();
    if has(CONFIG) && WEIGHTS.into_iter().any(has) {
        return Ok(());
    }
    let why = format!("the checkpoint is no adapter: {CONFIG} or {} is missing", WEIGHTS[0]);
    Err(CommandError::new(Exit::Failed, why)
        .hint("files that were encrypted when they were saved (.age) cannot be pushed"))
}

/// Names the base model in the adapter's settings, if they do not.
fn complete(folder: &Path, info: &WeightsInfo) -> Result<(), CommandError> {
    let file = folder.join(CONFIG);
    let text = match std::fs::read(&file) {
        Ok(text) => text,
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(why) => return Err(CommandError::file("read", CONFIG, &why)),
    };
    let mut config: Map<String, Value> = serde_json::from_slice(&text).map_err(|why| {
        CommandError::new(Exit::Failed, format!("the checkpoint's {CONFIG} makes no sense: {why}"))
    })?;
    if config.get(BASE).and_then(Value::as_str).is_some_and(|name| !name.is_empty()) {
        return Ok(());
    }
    config.insert(BASE.to_owned(), Value::from(info.base_model.as_str()));
    let text = serde_json::to_string_pretty(&config).unwrap_or_default() + "\n";
    write(&file, text.as_bytes())
}

/// Refuses a repository whose card says that it holds another checkpoint.
async fn refuse_another(
    repo: &HubRepo,
    revision: &str,
    path: &TinkerPath,
) -> Result<(), CommandError> {
    let Some(card) = repo.text(revision, CARD).await? else { return Ok(()) };
    let said = card.lines().find_map(|line| line.strip_prefix("tinker_path:"));
    match said.map(str::trim) {
        Some(other) if other != path.to_string() => {
            let why = format!("{} at {revision} holds {other} already", repo.id());
            Err(CommandError::new(Exit::Failed, why).hint("choose another --repo or --revision"))
        }
        _ => Ok(()),
    }
}

/// What people read about it on the hub.
fn card(path: &TinkerPath, repo: &str, info: &WeightsInfo) -> String {
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

# A LoRA adapter of {base}

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
        .map_err(|why| CommandError::file("written", &file.display().to_string(), &why))
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
    fn a_card_says_what_and_where_from() {
        let path = "tinker://run-1/weights/0001".parse().unwrap();
        let card = card(&path, "me/x", &info());
        assert!(card.contains("tinker_path: tinker://run-1/weights/0001\n"), "{card}");
        assert!(card.contains("base_model:adapter:Qwen/Qwen3-8B"), "{card}");
        assert!(card.contains("| trained layers | attention, MLP |"), "{card}");
        assert_eq!(derived(&path, "Qwen/Qwen3-8B"), "tinker-Qwen3-8B-run-1");
    }

    #[test]
    fn settings_that_name_no_base_model_get_one_and_nothing_else_changes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(CONFIG);
        std::fs::write(&file, r#"{"r": 32}"#).unwrap();
        complete(folder.path(), &info()).unwrap();
        let config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(config, json!({ "r": 32, BASE: "Qwen/Qwen3-8B" }));
        std::fs::write(&file, r#"{"base_model_name_or_path": "mine"}"#).unwrap();
        complete(folder.path(), &info()).unwrap();
        assert!(std::fs::read_to_string(&file).unwrap().contains("mine"));
        assert!(check(folder.path()).is_err(), "there are no weights");
    }
}
