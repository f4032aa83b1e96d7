//! Samples as the dashboard shows them: the text of every token, and the name of the sampled
//! weights.

use tinkex_store::history::{folder_prefix, logged_folder};
use tinkex_text::Tokenizer;

use crate::document::{
    AlternativeRow, CompletionDocument, SampleDocument, SampleListDocument, TokensDocument,
};
use crate::error::ServerError;
use crate::history::{LoggedCompletion, LoggedSample, SampleFilter};
use crate::live::LiveSource;
use crate::query::QueryParams;
use crate::source::DocumentResult;
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
pub(super) fn samples(
    source: &LiveSource,
    query: &QueryParams,
) -> DocumentResult<SampleListDocument> {
    let limit = query.number("limit")?.unwrap_or(LIMIT).clamp(1, MAX_LIMIT);
    let mut filter = SampleFilter {
        id: query.number("id")?,
        prompt_hash: query.number("group")?,
        before: query.number("before")?,
        folder_prefix: query.text("run").map(folder_prefix),
        owner: source.sampled_by().map(str::to_owned),
        limit,
        ..SampleFilter::default()
    };
    if let Some(model) = query.text("model") {
        let store = source.user_store();
        match model.parse().ok().and_then(|path| store.checkpoint(&path).ok()) {
            Some(checkpoint) => {
                let CheckpointRecord { path, weights, .. } = checkpoint;
                filter.folder = Some(logged_folder(Some(path.run()), weights));
            }
            None => filter.base_model = Some(model.to_owned()),
        }
    }
    let search = query.text("search").map(str::to_lowercase);
    if search.is_some() {
        filter.limit = SEARCH_PAGE;
    }
    // Count before reading: otherwise a sample that is logged in between would be counted but
    // missing from the list.
    let total = source.history.read(|reader| reader.sample_count(source.sampled_by()));
    let total = total.map_err(read_failed)?;
    let mut found = Vec::new();
    let mut searched = 0;
    let mut more = false;
    loop {
        let page = source.history.read(|reader| reader.samples(&filter)).map_err(read_failed)?;
        let full = page.len() == filter.limit as usize;
        searched += page.len();
        filter.before = page.last().map(|sample| sample.id);
        for sample in page {
            let document = document(source, &sample);
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
    Ok(SampleListDocument { samples: found, more, total })
}

/// Converts an error of reading the history.
#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes the error by value")]
pub(super) fn read_failed(error: rusqlite::Error) -> ServerError {
    ServerError::StorageUnavailable(format!("cannot read the history: {error}"))
}

/// Returns whether the text of a sample contains `text`, which is in lower case.
fn contains(sample: &SampleDocument, text: &str) -> bool {
    let completions = sample.completions.iter().map(|completion| &completion.base);
    let mut all = sample.prompt.iter().chain(completions);
    all.any(|tokens| tokens.text.concat().to_lowercase().contains(text))
}

fn document(source: &LiveSource, sample: &LoggedSample) -> SampleDocument {
    let tokenizer = source.view.tokenizer(&sample.base_model);
    let (model, run) = origin(&source.store.lock(), sample);
    let prompt = sample.prompt.as_ref().map(|tokens| token_document(tokenizer.as_ref(), tokens));
    let completions = sample.completions.iter();
    let completions =
        completions.map(|completion| completion_document(tokenizer.as_ref(), completion)).collect();
    SampleDocument {
        id: sample.id,
        time: sample.finished_at.div_euclid(1_000),
        queued_seconds: seconds(sample.queued),
        compute_seconds: seconds(sample.computed),
        base_model: sample.base_model.clone(),
        model,
        weights: sample.folder.as_ref().unwrap_or(&sample.base_model).clone(),
        run,
        session: sample.session.clone(),
        source: sample.source.clone(),
        prompt_tokens: sample.prompt_tokens,
        prompt,
        group: sample.prompt_hash.map(|hash| hash.to_string()),
        completions,
        error: sample.error.clone(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a duration for display")]
pub(super) fn seconds(micros: i64) -> f64 {
    micros as f64 / 1e6
}

fn completion_document(
    tokenizer: Option<&Tokenizer>,
    completion: &LoggedCompletion,
) -> CompletionDocument {
    let text = |id: u32| token_text(tokenizer, &mut Vec::new(), id);
    let alternatives = |row: &Vec<(u32, f32)>| -> Vec<AlternativeRow> {
        let known = row.iter().filter(|(_, logprob)| *logprob > -9_999.0);
        known.map(|(id, logprob)| (*id, text(*id), finite(*logprob))).collect()
    };
    CompletionDocument {
        base: token_document(tokenizer, &completion.tokens),
        logprobs: completion.logprobs.iter().map(|logprob| finite(*logprob)).collect(),
        top: completion.top.iter().map(alternatives).collect(),
        stop: completion.stop.clone(),
        advantage: completion.advantage.filter(|advantage| advantage.is_finite()),
    }
}

fn finite(value: f32) -> Option<f32> {
    Some(value).filter(|value| value.is_finite())
}

/// Returns ids and texts of tokens, and the positions of special tokens.
fn token_document(tokenizer: Option<&Tokenizer>, tokens: &[u32]) -> TokensDocument {
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
    TokensDocument { ids: tokens.to_vec(), text, special }
}

/// Returns the text of a token. The bytes of a character that continues in the next token are kept
/// in `pending`; the last token of a character gets the whole character.
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

/// Returns the name of the weights of a sample, and the run of the weights. Weights of a sampling
/// session, and weights that were deleted, have no name.
fn origin(store: &Store, sample: &LoggedSample) -> (Option<String>, Option<String>) {
    let Some(folder) = &sample.folder else { return (Some(sample.base_model.clone()), None) };
    let is_source = |row: &CheckpointRecord| {
        row.weights.local() == Some(folder)
            || logged_folder(Some(row.path.run()), &row.weights) == *folder
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
        assert_eq!(document.text, ["⟨7⟩", "⟨8⟩"]);
        assert!(document.special.is_empty());
    }
}
