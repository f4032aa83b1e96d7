//! Samples as the dashboard shows them: the text of every token, and the weights they came from.

use serde_json::{Value, json};
use tinkex_text::Tokenizer;

use super::DocumentResult;
use super::query::QueryParams;
use crate::error::ServerError;
use crate::history::{LoggedCompletion, LoggedSample, SampleFilter, folder_prefix, logged_folder};
use crate::state::ServerState;
use crate::store::{CheckpointRecord, Store};

/// Default and maximum number of samples in one response.
const LIMIT: u32 = 50;
const MAX_LIMIT: u32 = 200;
/// Number of samples that are decoded at a time while searching.
const SEARCH_PAGE: u32 = 200;
/// Maximum number of samples that are searched for one response.
const MAX_SEARCHED: usize = 20_000;

/// Returns the newest samples that match a query: `run`, `model`, `group`, `search`, `before`,
/// `id`, `limit`.
pub(super) fn samples(state: &ServerState, query: &QueryParams) -> DocumentResult {
    let limit = query.number("limit")?.unwrap_or(LIMIT).clamp(1, MAX_LIMIT);
    let mut filter = SampleFilter {
        id: query.number("id")?,
        prompt_hash: query.number("group")?,
        before: query.number("before")?,
        folder_prefix: query.text("run").map(folder_prefix),
        limit,
        ..SampleFilter::default()
    };
    if let Some(model) = query.text("model") {
        let store = state.store();
        match model.parse().ok().and_then(|path| store.checkpoint(&path)) {
            Some(checkpoint) => {
                let CheckpointRecord { path, folder, .. } = &checkpoint.row;
                filter.folder = Some(logged_folder(Some(path.run()), folder));
            }
            None => filter.base_model = Some(model.to_owned()),
        }
    }
    let search = query.text("search").map(str::to_lowercase);
    if search.is_some() {
        filter.limit = SEARCH_PAGE;
    }
    // Counted first, so that the list has every sample that is counted.
    let total = state.history.read(|reader| reader.sample_count()).map_err(read_failed)?;
    let (mut found, mut searched) = (Vec::new(), 0);
    let mut more = false;
    loop {
        let page = state.history.read(|reader| reader.samples(&filter)).map_err(read_failed)?;
        let full = page.len() == filter.limit as usize;
        searched += page.len();
        filter.before = page.last().map(|sample| sample.id);
        for sample in page {
            let document = document(state, &sample);
            let matches = search.as_deref().is_none_or(|text| contains(&document, text));
            if matches {
                if found.len() == limit as usize {
                    more = true;
                    break;
                }
                found.push(document);
            }
        }
        if search.is_none() {
            more = full;
        }
        if search.is_none() || more || !full || searched >= MAX_SEARCHED {
            break;
        }
    }
    Ok(json!({ "samples": found, "more": more, "total": total }))
}

/// Converts a failed read of the history.
#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes the error by value")]
pub(super) fn read_failed(error: rusqlite::Error) -> ServerError {
    ServerError::StorageUnavailable(format!("cannot read the history: {error}"))
}

/// Returns whether the text of a sample contains `text`, which is in lower case.
fn contains(sample: &Value, text: &str) -> bool {
    let joined = |tokens: &Value| -> String {
        let parts = tokens["text"].as_array().into_iter().flatten();
        parts.filter_map(Value::as_str).collect::<String>().to_lowercase()
    };
    let completions = sample["completions"].as_array().into_iter().flatten();
    joined(&sample["prompt"]).contains(text)
        || completions.into_iter().any(|completion| joined(completion).contains(text))
}

fn document(state: &ServerState, sample: &LoggedSample) -> Value {
    let tokenizer = state.models.get(&sample.base_model).and_then(|base| base.tokenizer());
    let (model, run) = origin(&state.store(), sample);
    let prompt = sample.prompt.as_ref().map(|tokens| token_document(tokenizer.as_ref(), tokens));
    let completions = sample.completions.iter();
    let completions: Vec<Value> =
        completions.map(|completion| completion_document(tokenizer.as_ref(), completion)).collect();
    json!({
        "id": sample.id,
        "time": sample.finished_at.div_euclid(1_000),
        "queued_seconds": seconds(sample.queued),
        "compute_seconds": seconds(sample.computed),
        "base_model": sample.base_model,
        "model": model,
        // Identifies the weights, also if they have no name.
        "weights": sample.folder.as_ref().unwrap_or(&sample.base_model),
        "run": run,
        "session": sample.session,
        "source": sample.source,
        "prompt_tokens": sample.prompt_tokens,
        "prompt": prompt,
        // A number of 64 bits would lose digits in JavaScript.
        "group": sample.prompt_hash.map(|hash| hash.to_string()),
        "completions": completions,
        "error": sample.error,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a duration for display")]
pub(super) fn seconds(micros: i64) -> f64 {
    micros as f64 / 1e6
}

fn completion_document(tokenizer: Option<&Tokenizer>, completion: &LoggedCompletion) -> Value {
    let mut document = token_document(tokenizer, &completion.tokens);
    let logprobs = completion.logprobs.iter().map(|logprob| finite(*logprob));
    document["logprobs"] = logprobs.collect();
    if !completion.top.is_empty() {
        let text = |id: u32| token_text(tokenizer, &mut Vec::new(), id);
        let row = |row: &Vec<(u32, f32)>| -> Value {
            let known = row.iter().filter(|(_, logprob)| *logprob > -9_999.0);
            known.map(|(id, logprob)| json!([id, text(*id), finite(*logprob)])).collect()
        };
        document["top"] = completion.top.iter().map(row).collect();
    }
    document["stop"] = completion.stop.as_str().into();
    document["advantage"] = completion.advantage.into();
    document
}

fn finite(value: f32) -> Value {
    if value.is_finite() { value.into() } else { Value::Null }
}

/// Returns ids and texts of tokens, and the positions of special tokens.
fn token_document(tokenizer: Option<&Tokenizer>, tokens: &[u32]) -> Value {
    let mut pending = Vec::new();
    let text: Vec<String> =
        tokens.iter().map(|id| token_text(tokenizer, &mut pending, *id)).collect();
    let is_special = |id: &u32| tokenizer.is_some_and(|tokenizer| tokenizer.is_special(*id));
    let special: Vec<usize> = tokens
        .iter()
        .enumerate()
        .filter(|(_, id)| is_special(id))
        .map(|(index, _)| index)
        .collect();
    json!({ "ids": tokens, "text": text, "special": special })
}

/// Returns the text of a token. The bytes of a character that continues in the next token are kept
/// in `pending`, and the last of its tokens gets the character.
fn token_text(tokenizer: Option<&Tokenizer>, pending: &mut Vec<u8>, id: u32) -> String {
    let Some(tokenizer) = tokenizer else { return format!("⟨{id}⟩") };
    let Some(bytes) = tokenizer.token_bytes(id).filter(|_| !tokenizer.is_special(id)) else {
        pending.clear();
        return tokenizer.token(id).unwrap_or_else(|| format!("⟨{id}⟩"));
    };
    pending.extend(bytes);
    let complete = match std::str::from_utf8(pending) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => pending.len(),
    };
    let rest = pending.split_off(complete);
    let text = String::from_utf8_lossy(pending).into_owned();
    *pending = rest;
    text
}

/// Returns the name of the weights that a sample came from, and their run. Weights that were saved
/// for a short time, or deleted since, have no name.
fn origin(store: &Store, sample: &LoggedSample) -> (Option<String>, Option<String>) {
    let Some(folder) = &sample.folder else { return (Some(sample.base_model.clone()), None) };
    let is_source = |row: &CheckpointRecord| {
        row.folder == *folder || logged_folder(Some(row.path.run()), &row.folder) == *folder
    };
    let checkpoint = store.checkpoints.values().find(|entry| is_source(&entry.row));
    if let Some(checkpoint) = checkpoint {
        let path = &checkpoint.row.path;
        return (Some(path.to_string()), Some(path.run().to_string()));
    }
    let run = store.runs.keys().find(|run| folder.starts_with(&folder_prefix(run.as_str())));
    (None, run.map(ToString::to_string))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_without_a_tokenizer_show_their_ids() {
        let document = token_document(None, &[7, 8]);
        assert_eq!(document["text"], json!(["⟨7⟩", "⟨8⟩"]));
        assert_eq!(document["special"], json!([]));
    }
}
