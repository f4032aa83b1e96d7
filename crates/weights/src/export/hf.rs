//! Files of a Hugging Face model folder with merged weights.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::ExportDType;
use super::card::CardDetails;
use super::output::OutputFile;
use super::plan::MergePlan;
use crate::json_fields::read_small;
use crate::{Error, Result};

/// Files of the base model that are copied unchanged, if they exist.
const COPIED: [&str; 10] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];
/// Prefixes of the names of licence files, which are copied too.
const LICENCES: [&str; 3] = ["LICENSE", "NOTICE", "USE_POLICY"];

/// Returns the files of the folder. Small files precede the weights, so that their errors appear
/// early.
pub(super) fn files(
    plan: &MergePlan,
    card: &CardDetails,
    shard_bytes: u64,
) -> Result<Vec<OutputFile>> {
    let mut files = vec![
        OutputFile::text("README.md", card.merged()),
        OutputFile::text("config.json", config(plan)?),
    ];
    for name in COPIED.map(str::to_owned).into_iter().chain(licences(plan.folder())?) {
        let path = plan.folder().join(&name);
        if path.is_file() {
            files.push(OutputFile::copy(name, path)?);
        }
    }
    let shards = shards(plan, shard_bytes);
    if let [only] = &shards[..] {
        files.push(OutputFile::merged("model.safetensors", plan, only.clone())?);
        return Ok(files);
    }
    let total = shards.len();
    let mut weight_map = BTreeMap::new();
    for (i, shard) in shards.into_iter().enumerate() {
        let name = format!("model-{:05}-of-{total:05}.safetensors", i + 1);
        let tensors = shard.iter().map(|&i| &plan.tensors()[i].name);
        weight_map.extend(tensors.map(|tensor| (tensor.clone(), name.clone())));
        files.push(OutputFile::merged(name, plan, shard)?);
    }
    let index = json!({ "metadata": { "total_size": plan.bytes() }, "weight_map": weight_map });
    files.push(OutputFile::text("model.safetensors.index.json", pretty(&index)));
    Ok(files)
}

/// Splits the tensors into files of at most `limit` bytes of data, in order. A larger tensor has a
/// file of its own.
fn shards(plan: &MergePlan, limit: u64) -> Vec<Vec<usize>> {
    let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
    let mut size = 0;
    for (i, tensor) in plan.tensors().iter().enumerate() {
        if size > 0 && size + tensor.bytes() > limit {
            shards.push(Vec::new());
            size = 0;
        }
        size += tensor.bytes();
        if let Some(shard) = shards.last_mut() {
            shard.push(i);
        }
    }
    shards
}

/// Returns the text of `config.json`: the text of the base model, unless the element type or the
/// tying of the embeddings changes.
fn config(plan: &MergePlan) -> Result<Vec<u8>> {
    let path = plan.folder().join("config.json");
    let text = read_small(&path)?;
    let mut config: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|e| Error::bad_file(&path, format!("not a model configuration: {e}")))?;
    let mut changed = false;
    // `ModelFolder::open` treats a base model whose unembedding differs from its embedding as
    // untied, even if its configuration says that it is tied.
    let is_tied = plan.config().tied && !plan.unties();
    let says_tied = config.get("tie_word_embeddings") == Some(&Value::Bool(true));
    let mut set = |name: &str, value: Value| {
        if config.get(name) != Some(&value) {
            config.insert(name.to_owned(), value);
            changed = true;
        }
    };
    if says_tied && !is_tied {
        set("tie_word_embeddings", false.into());
    }
    if let Some(dtype) = plan.dtype().and_then(ExportDType::torch_name) {
        // `transformers` 5 writes `dtype`; version 4 and other programs read `torch_dtype`.
        for name in ["dtype", "torch_dtype"] {
            set(name, dtype.into());
        }
    }
    Ok(if changed { pretty(&Value::Object(config)) } else { text })
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("a JSON value serializes");
    text.push(b'\n');
    text
}

/// Returns the names of the licence files of a folder, sorted.
fn licences(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).map_err(Error::io("read", folder))?;
    let name =
        |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let mut names: Vec<String> = entries
        .filter_map(name)
        .filter(|name| LICENCES.iter().any(|start| name.starts_with(start)))
        .collect();
    names.sort();
    Ok(names)
}
