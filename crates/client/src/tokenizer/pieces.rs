//! What the tokens of one kind of tokenizer are made of.

use std::collections::HashMap;

use tokenizers::{DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer as Core};

/// How tokens stand for bytes, and whether texts can be encoded piece by piece.
pub(crate) struct Pieces {
    kind: Kind,
    /// The beginning of a text is written differently from its middle.
    marks_start: bool,
}

enum Kind {
    /// Every byte is written as one printable character.
    ByteLevel(HashMap<char, u8>),
    /// Spaces are written as `▁`, and bytes without a token of their own as `<0x0A>`.
    SentencePiece,
    /// Tokens are words or parts of them; the spaces between are lost.
    Words,
}

const SPACE: char = '▁';

impl Pieces {
    pub(crate) fn of(core: &Core) -> Self {
        let kind = match core.get_decoder() {
            Some(decoder) if any(decoder, &|d| matches!(d, DecoderWrapper::ByteLevel(_))) => {
                Kind::ByteLevel(byte_level())
            }
            Some(decoder)
                if any(decoder, &|d| {
                    matches!(d, DecoderWrapper::Metaspace(_) | DecoderWrapper::ByteFallback(_))
                }) =>
            {
                Kind::SentencePiece
            }
            _ => Kind::Words,
        };
        let marks_start = core.get_pre_tokenizer().is_some_and(marks)
            || core.get_normalizer().is_some_and(prepends);
        Self { kind, marks_start }
    }

    /// Whether pieces of a text have the tokens that they have within the whole.
    #[cfg_attr(not(feature = "chat"), expect(dead_code, reason = "only conversations are cut"))]
    pub(crate) fn join(&self) -> bool {
        matches!(self.kind, Kind::ByteLevel(_)) && !self.marks_start
    }

    pub(crate) fn bytes(&self, token: &str) -> Option<Vec<u8>> {
        match &self.kind {
            Kind::ByteLevel(bytes) => token.chars().map(|c| bytes.get(&c).copied()).collect(),
            Kind::SentencePiece => Some(match raw_byte(token) {
                Some(byte) => vec![byte],
                None => token.replace(SPACE, " ").into_bytes(),
            }),
            Kind::Words => None,
        }
    }
}

/// Looks at a decoder and, where it is a row of decoders, at each of them.
fn any(decoder: &DecoderWrapper, is: &dyn Fn(&DecoderWrapper) -> bool) -> bool {
    match decoder {
        DecoderWrapper::Sequence(row) => row.get_decoders().iter().any(|inner| any(inner, is)),
        one => is(one),
    }
}

fn marks(splitter: &PreTokenizerWrapper) -> bool {
    match splitter {
        PreTokenizerWrapper::Sequence(row) => row.as_ref().iter().any(marks),
        PreTokenizerWrapper::ByteLevel(one) => one.add_prefix_space,
        PreTokenizerWrapper::Metaspace(_) => true,
        _ => false,
    }
}

fn prepends(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::Sequence(row) => row.as_ref().iter().any(prepends),
        NormalizerWrapper::Prepend(_) => true,
        _ => false,
    }
}

/// `<0x0A>` is the byte 10.
fn raw_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let two = hex.len() == 2 && hex.bytes().all(|c| c.is_ascii_hexdigit());
    if two { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// The alphabet of byte-level tokenizers: printable Latin-1 stands for itself, the other bytes are
/// the characters from 256 on, in order.
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
    fn the_byte_alphabet_is_the_common_one() {
        let bytes = byte_level();
        assert_eq!(bytes.len(), 256);
        for (c, byte) in [('A', b'A'), ('Ġ', b' '), ('Ċ', b'\n'), ('ĉ', b'\t'), ('Ã', 0xC3)] {
            assert_eq!(bytes.get(&c), Some(&byte), "{c}");
        }
    }

    #[test]
    fn bytes_without_a_token_are_written_in_hex() {
        assert_eq!(raw_byte("<0x0A>"), Some(10));
        for text in ["<0x0>", "<0xAG>", "0x0A", "<0x0AB>", "<0x+A>"] {
            assert_eq!(raw_byte(text), None, "{text}");
        }
    }
}
