//! Reads a `tiktoken.model`, a list of tokens and ranks: the vocabulary format of the Kimi models.
//!
//! The rules for splitting text are in Python code beside the file. That code is not run: its rules
//! are repeated here, and a `tiktoken.model` with other code is rejected.

use std::collections::{BTreeMap, HashMap};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer as Core};

use super::token_bytes::byte_level;

/// The Python module whose rules are implemented here.
const SUPPORTED_MODULE: &str = "tokenization_kimi";
/// Minimum number of ids after the vocabulary that are special tokens, named or not.
const RESERVED: u32 = 256;
/// Maximum number of these ids. Every id needs a token in memory, and a file can name any id.
const MAX_RESERVED: u32 = 1 << 16;

/// Pattern of the pieces that are merged separately: runs of Han characters, words with their
/// contractions, up to three digits, punctuation, white space.
const SPLIT: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

#[derive(Deserialize)]
struct TiktokenConfig {
    #[serde(default)]
    added_tokens_decoder: BTreeMap<u32, AddedTokenEntry>,
}

#[derive(Deserialize)]
struct AddedTokenEntry {
    content: String,
    #[serde(default)]
    special: bool,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Creates a tokenizer from a `tiktoken.model` and the `tokenizer_config.json` beside it.
pub(crate) fn read(model: &[u8], config: &[u8]) -> Result<Core, BoxError> {
    if !String::from_utf8_lossy(config).contains(SUPPORTED_MODULE) {
        return Err(
            format!("unsupported tokenizer code; only {SUPPORTED_MODULE} is supported").into()
        );
    }
    let config: TiktokenConfig = serde_json::from_slice(config)?;
    let tokens = tokens(model)?;
    let base = u32::try_from(tokens.len())?;
    let (vocab, merges) = merges(&tokens);
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(true).build()?;
    let mut core = Core::new(model);
    let pattern = SplitPattern::Regex(SPLIT.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?;
    let bytes = ByteLevel::new(false, true, false);
    core.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])));
    core.with_decoder(Some(bytes));

    // The library assigns ids in order, so ids without a name need a placeholder.
    let named = config.added_tokens_decoder;
    let last_named = named.keys().next_back().copied().unwrap_or(0);
    if last_named.saturating_sub(base) >= MAX_RESERVED {
        return Err(format!(
            "special token {last_named} is too far beyond the vocabulary of {base} tokens; the \
             limit is {MAX_RESERVED} special tokens"
        )
        .into());
    }
    let end = (last_named + 1).max(base + RESERVED);
    let added = (base..end).map(|id| match named.get(&id) {
        Some(AddedTokenEntry { content, special }) => {
            AddedToken::from(content, *special).normalized(false)
        }
        None => AddedToken::from(format!("<|reserved_token_{id}|>"), true).normalized(false),
    });
    core.add_tokens(added)?;
    for (id, AddedTokenEntry { content, .. }) in &named {
        if core.token_to_id(content) != Some(*id) {
            return Err(format!(
                "special token {content:?} cannot have the id {id}: another token has the id or \
                 the text"
            )
            .into());
        }
    }
    Ok(core)
}

/// Returns the bytes of every token, by rank.
fn tokens(model: &[u8]) -> Result<Vec<Vec<u8>>, BoxError> {
    let mut tokens = BTreeMap::new();
    for (n, line) in model.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let parse = || {
            let space = line.iter().position(|byte| *byte == b' ')?;
            let rank: u32 = std::str::from_utf8(&line[space + 1..]).ok()?.parse().ok()?;
            Some((rank, BASE64.decode(&line[..space]).ok().filter(|token| !token.is_empty())?))
        };
        let (rank, token) =
            parse().ok_or_else(|| format!("line {} is not a token and its rank", n + 1))?;
        tokens.insert(rank, token);
    }
    let consecutive = tokens.keys().zip(0..).all(|(rank, n)| *rank == n) && !tokens.is_empty();
    if !consecutive {
        return Err("the ranks are not consecutive from 0".into());
    }
    Ok(tokens.into_values().collect())
}

/// Returns the tokens as byte-level text, and every merge of two tokens into a third in order of
/// rank.
fn merges(tokens: &[Vec<u8>]) -> (Vocab, Vec<(String, String)>) {
    let mut alphabet = ['\0'; 256];
    for (character, byte) in byte_level() {
        alphabet[usize::from(byte)] = character;
    }
    let text = |bytes: &[u8]| bytes.iter().map(|b| alphabet[usize::from(*b)]).collect::<String>();
    let ranks: HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank)).collect();
    let mut merges = Vec::new();
    for token in tokens {
        let mut splits: Vec<_> = (1..token.len())
            .filter_map(|at| {
                let (left, right) = token.split_at(at);
                Some((*ranks.get(left)?, *ranks.get(right)?, at))
            })
            .collect();
        splits.sort_unstable();
        let pair = |(_, _, at): &(usize, usize, usize)| (text(&token[..*at]), text(&token[*at..]));
        merges.extend(splits.iter().map(pair));
    }
    let vocab = (0..).zip(tokens).map(|(rank, token)| (text(token), rank)).collect();
    (vocab, merges)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"auto_map": {"AutoTokenizer": ["tokenization_kimi.X", null]},
        "added_tokens_decoder": {"263": {"content": "[BOS]", "special": true},
            "265": {"content": "<tool>", "special": false}}}"#;

    /// One token per byte, and seven longer ones.
    fn model() -> String {
        let single = (0..=u8::MAX).map(|byte| vec![byte]);
        let longer = ["he", "ll", "hell", " a"].map(|text| text.as_bytes().to_vec());
        let han = [vec![0xE4, 0xB8], vec![0xE4, 0xB8, 0xAD], "a中".as_bytes().to_vec()];
        let tokens = single.chain(longer).chain(han).enumerate();
        tokens.map(|(rank, token)| format!("{} {rank}\n", BASE64.encode(token))).collect()
    }

    #[test]
    fn tokens_are_merged_by_rank_within_the_pieces_of_the_pattern() {
        let core = read(model().as_bytes(), CONFIG.as_bytes()).unwrap();
        let ids = |text: &str| core.encode_fast(text, false).unwrap().get_ids().to_vec();
        assert_eq!(ids("hello a"), [258, 111, 259]);
        assert_eq!(ids("中"), [261], "merged from its first two bytes and the third");
        assert_eq!(ids("a中"), [97, 261], "Han characters are separate pieces");
        assert_eq!(ids("[BOS]x<tool>"), [263, 120, 265]);
        assert_eq!(ids("<|reserved_token_264|>"), [264]);
        assert_eq!(core.decode(&ids("hello a中[BOS]"), false).unwrap(), "hello a中[BOS]");
        assert_eq!(core.get_vocab_size(true), 263 + 256);
    }

    #[test]
    fn unsupported_code_and_malformed_ranks_are_rejected() {
        let error = |model: &str, config: &str| {
            read(model.as_bytes(), config.as_bytes()).expect_err("rejected").to_string()
        };
        assert!(error(&model(), "{}").contains("tokenization_kimi"));
        assert!(error("YQ== x\n", CONFIG).contains("line 1"));
        assert!(error("YQ== 1\n", CONFIG).contains("ranks"));
        assert!(error("", CONFIG).contains("ranks"));
        let taken =
            r#"{"added_tokens_decoder": {"3": {"content": "[BOS]"}}, "x": "tokenization_kimi"}"#;
        assert!(error(&model(), taken).contains("cannot have the id 3"));
    }

    #[test]
    fn a_large_id_of_a_special_token_is_refused() {
        for id in [263 + MAX_RESERVED, u32::MAX] {
            let config = format!(
                r#"{{"added_tokens_decoder": {{"{id}": {{"content": "x"}}}}, "x": "tokenization_kimi"}}"#
            );
            let error = read(model().as_bytes(), config.as_bytes()).expect_err("rejected");
            assert!(error.to_string().contains("the limit is"), "{error}");
        }
    }
}
