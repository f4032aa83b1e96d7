//! [`TokenBytes`]: the bytes behind the tokens of a vocabulary.

use std::collections::HashMap;

use tokenizers::{DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer as Core};

/// Mapping from the tokens of a vocabulary to bytes, for the kinds of vocabulary in use.
pub(crate) struct TokenBytes {
    alphabet: TokenAlphabet,
    /// Whether the beginning of a text is encoded differently from its middle.
    marks_start: bool,
}

enum TokenAlphabet {
    /// Each byte is one printable character.
    ByteLevel(HashMap<char, u8>),
    /// Spaces are `▁`, and bytes without a token of their own are written as `<0x0A>`.
    SentencePiece,
    /// Tokens are words or parts of words, without the spaces between them.
    Words,
}

const SPACE: char = '▁';

impl TokenBytes {
    pub(crate) fn new(core: &Core) -> Self {
        let alphabet = match core.get_decoder() {
            Some(decoder)
                if any_decoder(decoder, &|d| matches!(d, DecoderWrapper::ByteLevel(_))) =>
            {
                TokenAlphabet::ByteLevel(byte_level())
            }
            Some(decoder)
                if any_decoder(decoder, &|d| {
                    matches!(d, DecoderWrapper::Metaspace(_) | DecoderWrapper::ByteFallback(_))
                }) =>
            {
                TokenAlphabet::SentencePiece
            }
            _ => TokenAlphabet::Words,
        };
        let marks_start = core.get_pre_tokenizer().is_some_and(marks_start)
            || core.get_normalizer().is_some_and(prepends);
        Self { alphabet, marks_start }
    }

    /// Returns whether a piece is encoded in the same way at the beginning of a text and in its
    /// middle.
    #[cfg_attr(not(feature = "chat"), expect(dead_code, reason = "only used by the chat feature"))]
    pub(crate) fn encodes_piecewise(&self) -> bool {
        self.is_byte_level() && !self.marks_start
    }

    /// Returns whether each character of a token is one byte.
    pub(crate) fn is_byte_level(&self) -> bool {
        matches!(self.alphabet, TokenAlphabet::ByteLevel(_))
    }

    /// Returns the bytes of a token; `None` if it has no bytes of its own.
    pub(crate) fn get(&self, token: &str) -> Option<Vec<u8>> {
        match &self.alphabet {
            TokenAlphabet::ByteLevel(bytes) => {
                token.chars().map(|c| bytes.get(&c).copied()).collect()
            }
            TokenAlphabet::SentencePiece => Some(match raw_byte(token) {
                Some(byte) => vec![byte],
                None => token.replace(SPACE, " ").into_bytes(),
            }),
            TokenAlphabet::Words => None,
        }
    }

    /// Returns the number of bytes of the text that a token stands for, or more; `None` if it is
    /// not limited.
    pub(crate) fn len(&self, token: &str) -> Option<usize> {
        match &self.alphabet {
            TokenAlphabet::ByteLevel(_) => Some(token.chars().count()),
            TokenAlphabet::SentencePiece => Some(token.len()),
            TokenAlphabet::Words => None,
        }
    }
}

/// Returns whether a decoder, or any decoder of a sequence, matches.
fn any_decoder(decoder: &DecoderWrapper, matches: &dyn Fn(&DecoderWrapper) -> bool) -> bool {
    match decoder {
        DecoderWrapper::Sequence(all) => {
            all.get_decoders().iter().any(|one| any_decoder(one, matches))
        }
        one => matches(one),
    }
}

/// Returns whether a pre-tokenizer encodes the beginning of a text differently, by adding a space.
fn marks_start(splitter: &PreTokenizerWrapper) -> bool {
    match splitter {
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().any(marks_start),
        PreTokenizerWrapper::ByteLevel(one) => one.add_prefix_space,
        PreTokenizerWrapper::Metaspace(_) => true,
        _ => false,
    }
}

/// Returns whether a normalizer prepends text.
fn prepends(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().any(prepends),
        NormalizerWrapper::Prepend(_) => true,
        _ => false,
    }
}

/// Parses a byte written as `<0x0A>`.
pub(crate) fn raw_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let two = hex.len() == 2 && hex.bytes().all(|c| c.is_ascii_hexdigit());
    if two { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// Returns the alphabet of byte-level tokenizers: printable Latin-1 characters stand for
/// themselves, and the other bytes, in order, for the characters from U+0100 on.
pub(crate) fn byte_level() -> HashMap<char, u8> {
    let mut others = (256_u32..).filter_map(char::from_u32);
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    (0..=u8::MAX)
        .filter_map(|byte| {
            let c = if printable(byte) { Some(char::from(byte)) } else { others.next() };
            Some((c?, byte))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_that_of_gpt_2() {
        let bytes = byte_level();
        assert_eq!(bytes.len(), 256);
        for (c, byte) in [('A', b'A'), ('Ġ', b' '), ('Ċ', b'\n'), ('ĉ', b'\t'), ('Ã', 0xC3)] {
            assert_eq!(bytes.get(&c), Some(&byte), "{c}");
        }
    }

    #[test]
    fn bytes_in_hex_are_parsed() {
        assert_eq!(raw_byte("<0x0A>"), Some(10));
        for text in ["<0x0>", "<0xAG>", "0x0A", "<0x0AB>", "<0x+A>"] {
            assert_eq!(raw_byte(text), None, "{text}");
        }
    }
}
