//! [`TextDecoder`]: the text of tokens that arrive one at a time.

use crate::error::Result;
use crate::stop_strings::StopStrings;
use crate::tokenizer::{Tokenizer, raw_byte};

/// Decodes tokens one at a time, and ends at stop strings.
///
/// The pieces that [`push`](Self::push) and [`finish`](Self::finish) return, concatenated, are the
/// text of all tokens decoded at once, up to the first stop string. A piece never ends within a
/// character, and never contains text that later tokens change: an incomplete character waits, and
/// so does text that could be the start of a stop string. Bytes that are not UTF-8 become U+FFFD.
///
/// ```
/// use tinkex_text::{TextDecoder, Tokenizer};
///
/// # let json = r#"{"version":"1.0","model":{"type":"BPE","merges":[],
/// #   "vocab":{"h":0,"i":1,"Ġ":2,"Ã":3,"©":4}},"decoder":{"type":"ByteLevel",
/// #   "add_prefix_space":false,"trim_offsets":true,"use_regex":true},
/// #   "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}}"#;
/// let tokenizer = Tokenizer::from_json(json)?;
/// let mut decoder = TextDecoder::new(&tokenizer).stop_strings(["hi"]);
/// let pieces: Vec<String> =
///     tokenizer.encode("é hi")?.iter().map(|token| decoder.push(*token)).collect::<Result<_, _>>()?;
/// assert_eq!(pieces, ["", "é", " ", "", ""]); // é is two tokens, and h could begin the stop string
/// assert_eq!(decoder.matched_stop(), Some("hi"));
/// # Ok::<_, tinkex_text::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextDecoder {
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    /// Special tokens that are not skipped.
    kept: Vec<u32>,
    pending: Pending,
    stops: StopStrings,
}

/// Tokens whose text is not certain yet.
#[derive(Clone, Debug)]
enum Pending {
    /// Bytes of an incomplete character, for byte-level tokenizers: the bytes of all tokens together
    /// are the text.
    Bytes(Vec<u8>),
    /// For other tokenizers: the last token whose text was returned, if any, and the tokens after
    /// it.
    Tokens { context: Option<u32>, after: Vec<u32> },
}

impl TextDecoder {
    /// Creates a decoder that skips special tokens and has no stop strings.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let pending = if tokenizer.is_byte_level() {
            Pending::Bytes(Vec::new())
        } else {
            Pending::Tokens { context: None, after: Vec::new() }
        };
        Self {
            tokenizer: tokenizer.clone(),
            skip_special_tokens: true,
            kept: Vec::new(),
            pending,
            stops: StopStrings::default(),
        }
    }

    /// Sets whether special tokens are left out. Defaults to true.
    #[must_use]
    pub fn skip_special_tokens(mut self, skip: bool) -> Self {
        self.skip_special_tokens = skip;
        self
    }

    /// Sets special tokens that are not skipped, written as in the vocabulary. Tokens that do not
    /// exist are ignored.
    #[must_use]
    pub fn keep_special_tokens<'a>(mut self, tokens: impl IntoIterator<Item = &'a str>) -> Self {
        let ids = tokens.into_iter().filter_map(|token| self.tokenizer.token_id(token));
        self.kept = ids.collect();
        self
    }

    /// Sets the token that precedes the text. Some tokenizers write the first token of a text
    /// differently, for example without the space before it; after another token, they write it as
    /// in the middle of a text. A special token has no effect.
    #[must_use]
    pub fn after(mut self, token: u32) -> Self {
        let written = self.tokenizer.token(token);
        let is_text = written.is_some_and(|written| raw_byte(&written).is_none())
            && !self.tokenizer.is_special(token);
        if let Pending::Tokens { context, .. } = &mut self.pending {
            *context = is_text.then_some(token);
        }
        self
    }

    /// Sets the strings that end the text. The text does not include the string that ended it. Empty
    /// strings are ignored.
    #[must_use]
    pub fn stop_strings(mut self, strings: impl IntoIterator<Item: Into<String>>) -> Self {
        self.stops = StopStrings::new(strings.into_iter().map(Into::into));
        self
    }

    /// Adds a token; returns the text that has become certain, which may be empty.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if the tokenizer cannot decode
    /// the token.
    pub fn push(&mut self, token: u32) -> Result<String> {
        let skipped = self.skip_special_tokens
            && self.tokenizer.is_special(token)
            && !self.kept.contains(&token);
        if skipped || self.stops.found().is_some() {
            return Ok(String::new());
        }
        let piece = match &mut self.pending {
            Pending::Bytes(bytes) => {
                self.tokenizer.append_byte_level(token, bytes);
                complete_characters(bytes)
            }
            Pending::Tokens { context, after } => {
                let Some(written) = self.tokenizer.token(token) else { return Ok(String::new()) };
                after.push(token);
                // Whether a run of byte tokens is valid UTF-8 is known only after its end.
                if raw_byte(&written).is_some() {
                    String::new()
                } else {
                    let piece = text_after(&self.tokenizer, *context, after)?;
                    *context = Some(token);
                    after.clear();
                    piece
                }
            }
        };
        Ok(self.stops.push(piece))
    }

    /// Returns the text that was waiting for more tokens. An incomplete character is U+FFFD.
    ///
    /// # Errors
    /// Fails like [`push`](Self::push).
    pub fn finish(&mut self) -> Result<String> {
        let rest = match &mut self.pending {
            Pending::Bytes(bytes) => String::from_utf8_lossy(&std::mem::take(bytes)).into_owned(),
            Pending::Tokens { context, after } => {
                text_after(&self.tokenizer, *context, &std::mem::take(after))?
            }
        };
        let mut piece = self.stops.push(rest);
        piece.push_str(&self.stops.finish());
        Ok(piece)
    }

    /// Returns the stop string that ended the text, if one did.
    #[must_use]
    pub fn matched_stop(&self) -> Option<&str> {
        self.stops.found()
    }
}

/// Removes all bytes except an incomplete character at the end. Returns the text of the removed
/// bytes.
fn complete_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = bytes.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, invalid) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                rest = invalid;
                let Some(len) = error.error_len() else { break };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &rest[len..];
            }
        }
    }
    bytes.drain(..bytes.len() - rest.len());
    text
}

/// Returns the text of tokens that follow a `context` token. Decoders write the first token of a
/// text differently, for example without the space before it.
fn text_after(tokenizer: &Tokenizer, context: Option<u32>, tokens: &[u32]) -> Result<String> {
    let Some(context) = context else { return tokenizer.decode(tokens) };
    if tokens.is_empty() {
        return Ok(String::new());
    }
    let before = tokenizer.decode(&[context])?;
    let mut both = tokenizer.decode(&[&[context], tokens].concat())?;
    // Some decoders change the text of earlier tokens, which was already returned. Return what
    // follows the common start.
    let kept = both.bytes().zip(before.bytes()).take_while(|(a, b)| a == b).count();
    Ok(both.split_off(both.floor_char_boundary(kept)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::tokenizer::byte_level;

    /// A byte-level tokenizer: one token per byte, whose id is the byte, "hell", and a special and
    /// an added token.
    fn byte_level_tokenizer() -> Tokenizer {
        let mut vocab: serde_json::Map<String, Value> =
            byte_level().into_iter().map(|(c, byte)| (c.to_string(), json!(byte))).collect();
        vocab.insert("hell".into(), json!(256));
        let added = |id: u32, content: &str, special: bool| {
            json!({"id": id, "content": content, "special": special, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false})
        };
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true});
        let json = json!({"version": "1.0", "pre_tokenizer": bytes, "decoder": bytes,
            "added_tokens": [added(257, "<end>", true), added(258, "<think é>", false)],
            "model": {"type": "BPE", "merges": [], "vocab": vocab}});
        Tokenizer::from_json(json.to_string()).unwrap()
    }

    /// A tokenizer like the tokenizer of Llama 2: spaces are `▁`, unknown characters are bytes, and
    /// the first space of a text is not written.
    fn sentence_piece_tokenizer() -> Tokenizer {
        let words = ["<unk>", "▁a", "b", "▁", "é", "▁▁c", "."].map(str::to_owned);
        let tokens = words.into_iter().chain((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        let vocab: serde_json::Map<String, Value> =
            (0..).zip(tokens).map(|(id, token): (u32, _)| (token, json!(id))).collect();
        let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let decoder = json!({"type": "Sequence", "decoders":
            [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]});
        let json = json!({"version": "1.0", "decoder": decoder,
            "model": {"type": "BPE", "merges": [], "vocab": vocab, "byte_fallback": true}});
        Tokenizer::from_json(json.to_string()).unwrap()
    }

    /// A word-level tokenizer, which writes a space between tokens.
    fn word_tokenizer() -> Tokenizer {
        let json = json!({"version": "1.0", "model": {"type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "a": 1, "b": 2}}});
        Tokenizer::from_json(json.to_string()).unwrap()
    }

    fn decode(mut decoder: TextDecoder, tokens: &[u32]) -> Vec<String> {
        let mut pieces: Vec<String> =
            tokens.iter().map(|token| decoder.push(*token).unwrap()).collect();
        pieces.push(decoder.finish().unwrap());
        pieces
    }

    #[test]
    fn an_incomplete_character_waits_and_is_replaced_at_the_end() {
        let decoder = TextDecoder::new(&byte_level_tokenizer());
        let euro = [0xE2, 0x82, 0xAC, 256, 257, 0xE2, 0x82];
        assert_eq!(decode(decoder.clone(), &euro), ["", "", "€", "hell", "", "", "", "\u{FFFD}"]);
        assert_eq!(decode(decoder, &[0xE2, 0x28]), ["", "\u{FFFD}(", ""]);
    }

    #[test]
    fn special_tokens_are_skipped_by_choice() {
        let decoder = TextDecoder::new(&byte_level_tokenizer()).skip_special_tokens(false);
        assert_eq!(decode(decoder, &[256, 257, 258]), ["hell", "<end>", "<think é>", ""]);
        let decoder = TextDecoder::new(&byte_level_tokenizer()).keep_special_tokens(["<end>", "x"]);
        assert_eq!(decode(decoder, &[256, 257]), ["hell", "<end>", ""]);
    }

    #[test]
    fn a_run_of_bytes_waits_for_its_end() {
        let byte = |byte: u32| byte + 7;
        let tokens = [1, byte(0xC3), byte(0xA9), 2, byte(0xFF), byte(0x41)];
        let decoder = TextDecoder::new(&sentence_piece_tokenizer());
        assert_eq!(decode(decoder, &tokens), ["a", "", "", "éb", "", "", "\u{FFFD}\u{FFFD}"]);
    }

    #[test]
    fn the_first_token_keeps_its_space_after_another_token() {
        let decoder = TextDecoder::new(&sentence_piece_tokenizer());
        assert_eq!(decode(decoder.clone(), &[1, 2]), ["a", "b", ""]);
        assert_eq!(decode(decoder.after(2), &[1, 2]), [" a", "b", ""]);
        let decoder = TextDecoder::new(&byte_level_tokenizer());
        assert_eq!(decode(decoder.after(256), &[256]), ["hell", ""]);
    }

    #[test]
    fn nothing_follows_a_stop_string() {
        let mut decoder = TextDecoder::new(&byte_level_tokenizer()).stop_strings(["lx"]);
        let tokens = [256, u32::from(b'x'), u32::from(b'y')];
        assert_eq!(decode(decoder.clone(), &tokens), ["hel", "", "", ""]);
        decoder.push(256).unwrap();
        assert_eq!(decoder.matched_stop(), None);
        decoder.push(u32::from(b'x')).unwrap();
        assert_eq!(decoder.matched_stop(), Some("lx"));
    }

    proptest! {
            /// The pieces are the text of all tokens decoded at once, also of tokens that are no text.
            #[test]
            fn pieces_are_the_text_of_all_tokens(
                tokens in prop::collection::vec(0_u32..300, 0..40),
                words in prop::collection::vec(0_u32..10, 0..20),
                skip in any::<bool>(),
            ) {
                for tokenizer in [byte_level_tokenizer(), sentence_piece_tokenizer(), word_tokenizer()] {
                    for tokens in [&tokens, &words] {
                        let decoder = TextDecoder::new(&tokenizer).skip_special_tokens(skip);
                        let whole = if skip {
    tokenizer.decode_text(tokens).unwrap()
    } else {
    tokenizer.decode(tokens).unwrap()
    };
                        prop_assert_eq!(decode(decoder, tokens).concat(), whole);
                    }
                }
            }
        }
}
