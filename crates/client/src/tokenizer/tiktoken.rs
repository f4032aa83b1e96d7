//! Tokenizers that come as a `tiktoken.model`: a list of tokens and ranks, with the rest in Python.
//!
//! The Kimi models do. That Python is not run; what it says about splitting is written down here, and
//! a `tiktoken.model` with other Python beside it is refused.

use std::collections::{BTreeMap, HashMap};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer as Core};

use super::pieces::byte_level;

/// The code whose behaviour this is.
const KNOWN: &str = "tokenization_kimi";
/// There are at least this many special tokens, named or not.
const RESERVED: u32 = 256;

/// Runs of Han characters stand by themselves; words keep their capitals and endings, digits come in
/// threes.
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
struct Config {
    #[serde(default)]
    added_tokens_decoder: BTreeMap<u32, Added>,
}

#[derive(Deserialize)]
struct Added {
    content: String,
    #[serde(default)]
    special: bool,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The tokenizer of a `tiktoken.model` and the `tokenizer_config.json` beside it.
pub(crate) fn read(model: &[u8], config: &[u8]) -> Result<Core, Failure> {
    if !String::from_utf8_lossy(config).contains(KNOWN) {
        return Err(format!("its code is not {KNOWN}, the one that is known here").into());
    }
    let config: Config = serde_json::from_slice(config)?;
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

    // Ids are given out in order, so those without a name get one.
    let named = config.added_tokens_decoder;
    let last = named.keys().next_back().map_or(0, |last| last + 1).max(base + RESERVED);
    let added = (base..last).map(|id| match named.get(&id) {
        Some(Added { content, special }) => AddedToken::from(content, *special).normalized(false),
        None => AddedToken::from(format!("<|reserved_token_{id}|>"), true).normalized(false),
    });
    core.add_tokens(added)?;
    for (id, Added { content, .. }) in &named {
        if core.token_to_id(content) != Some(*id) {
            return Err(format!("the special token {content:?} cannot have the id {id}").into());
        }
    }
    Ok(core)
}

/// The bytes of every token, by rank.
fn tokens(model: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
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
        let (rank, token) = parse().ok_or_else(|| format!("line {} is no token", n + 1))?;
        tokens.insert(rank, token);
    }
    let whole = tokens.keys().zip(0..).all(|(rank, n)| *rank == n) && !tokens.is_empty();
    if !whole {
        return Err("its ranks are not 0, 1, 2, …".into());
    }
    Ok(tokens.into_values().collect())
}

/// Tokens as byte-level text, and every way to join two of them to a third, in order of rank.
fn merges(tokens: &[Vec<u8>]) -> (Vocab, Vec<(String, String)>) {
    let mut letters = ['\0'; 256];
    for (letter, byte) in byte_level() {
        letters[usize::from(byte)] = letter;
    }
    let text = |bytes: &[u8]| bytes.iter().map(|b| letters[usize::from(*b)]).collect::<String>();
    let ranks: HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank)).collect();
    let mut merges = Vec::new();
    for token in tokens {
        let mut ways: Vec<_> = (1..token.len())
            .filter_map(|at| {
                let (left, right) = token.split_at(at);
                Some((*ranks.get(left)?, *ranks.get(right)?, at))
            })
            .collect();
        ways.sort_unstable();
        let pair = |(_, _, at): &(usize, usize, usize)| (text(&token[..*at]), text(&token[*at..]));
        merges.extend(ways.iter().map(pair));
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

    /// A token for every byte, then a few longer ones.
    fn model() -> String {
        let single = (0..=u8::MAX).map(|byte| vec![byte]);
        let longer = ["he", "ll", "hell", " a"].map(|text| text.as_bytes().to_vec());
        let han = [vec![0xE4, 0xB8], vec![0xE4, 0xB8, 0xAD], "a中".as_bytes().to_vec()];
        let tokens = single.chain(longer).chain(han).enumerate();
        tokens.map(|(rank, token)| format!("{} {rank}\n", BASE64.encode(token))).collect()
    }

    #[test]
    fn tokens_are_joined_by_rank_within_what_the_pattern_splits() {
        let core = read(model().as_bytes(), CONFIG.as_bytes()).unwrap();
        let ids = |text: &str| core.encode_fast(text, false).unwrap().get_ids().to_vec();
        assert_eq!(ids("hello a"), [258, 111, 259]);
        assert_eq!(ids("中"), [261], "through its first two bytes");
        assert_eq!(ids("a中"), [97, 261], "Han characters stand by themselves");
        assert_eq!(ids("[BOS]x<tool>"), [263, 120, 265]);
        assert_eq!(ids("<|reserved_token_264|>"), [264]);
        assert_eq!(core.decode(&ids("hello a中[BOS]"), false).unwrap(), "hello a中[BOS]");
        assert_eq!(core.get_vocab_size(true), 263 + 256);
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let why = |model: &str, config: &str| {
            read(model.as_bytes(), config.as_bytes()).expect_err("refused").to_string()
        };
        assert!(why(&model(), "{}").contains("tokenization_kimi"));
        assert!(why("YQ== x\n", CONFIG).contains("line 1"));
        assert!(why("YQ== 1\n", CONFIG).contains("ranks"));
        assert!(why("", CONFIG).contains("ranks"));
        let taken =
            r#"{"added_tokens_decoder": {"3": {"content": "[BOS]"}}, "x": "tokenization_kimi"}"#;
        assert!(why(&model(), taken).contains("cannot have the id 3"));
    }
}
