//! The bytes that tokens stand for, from a `tokenizer.json`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tinkex_engine::sample::Vocabulary;

/// The bytes of every token.
#[derive(Debug)]
pub(super) struct Table {
    bytes: Vec<Vec<u8>>,
    special: HashMap<String, u32>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: Model,
    #[serde(default)]
    decoder: Value,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    vocab: Vocab,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    Map(BTreeMap<String, u32>),
    /// Unigram models list their pieces with scores.
    List(Vec<(String, f64)>),
}

/// No vocabulary has more tokens.
const MOST: usize = 1 << 22;

impl Table {
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let wrong = |why: String| format!("the tokenizer {} cannot be read: {why}", path.display());
        let text = std::fs::read(path).map_err(|why| wrong(why.to_string()))?;
        let file: File = serde_json::from_slice(&text).map_err(|why| wrong(why.to_string()))?;
        let pieces: Vec<(String, u32)> = match file.model.vocab {
            Vocab::Map(map) => map.into_iter().collect(),
            Vocab::List(list) => {
                list.into_iter().zip(0..).map(|((piece, _), id)| (piece, id)).collect()
            }
        };
        let byte_level = file.decoder.to_string().contains("\"ByteLevel\"");
        let alphabet = alphabet();
        let mut table = Self { bytes: Vec::new(), special: HashMap::new() };
        for (piece, id) in pieces {
            let bytes = if byte_level { letters(&piece, &alphabet) } else { piece_bytes(&piece) };
            table.set(id, bytes).map_err(wrong)?;
        }
        for added in file.added_tokens {
            table.set(added.id, added.content.clone().into_bytes()).map_err(wrong)?;
            if added.special {
                table.special.insert(added.content, added.id);
            }
        }
        Ok(table)
    }

    fn set(&mut self, id: u32, bytes: Vec<u8>) -> Result<(), String> {
        let at = id as usize;
        if at >= MOST {
            return Err(format!("token {id} is beyond {MOST}"));
        }
        if at >= self.bytes.len() {
            self.bytes.resize(at + 1, Vec::new());
        }
        self.bytes[at] = bytes;
        Ok(())
    }

    pub(super) fn special(&self, text: &str) -> Option<u32> {
        self.special.get(text).copied()
    }
}

impl Vocabulary for Table {
    fn bytes(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }
}

/// The letters that byte-level tokenizers write bytes with.
fn alphabet() -> HashMap<char, u8> {
    let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut other = 0x100..;
    let letter = |byte: u8| {
        let code = if plain(byte) { u32::from(byte) } else { other.next()? };
        Some((char::from_u32(code)?, byte))
    };
    (0..=255).filter_map(letter).collect()
}

fn letters(piece: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(piece.len());
    for letter in piece.chars() {
        match alphabet.get(&letter) {
            Some(byte) => bytes.push(*byte),
            None => bytes.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

/// The pieces of other tokenizers: `▁` is a space, `<0x0A>` a byte.
fn piece_bytes(piece: &str) -> Vec<u8> {
    let hex = piece.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => piece.replace('▁', " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(json: &str) -> Table {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        Table::read(&path).unwrap()
    }

    #[test]
    fn byte_level_letters_become_bytes() {
        let table = table(
            r#"{"added_tokens":[{"id":3,"content":"<|end|>","special":true}],
                "decoder":{"type":"ByteLevel"},
                "model":{"type":"BPE","vocab":{"Ġhi":0,"Ċ":1,"Ã©":2}}}"#,
        );
        assert_eq!(table.bytes(0), b" hi");
        assert_eq!(table.bytes(1), b"\n");
        assert_eq!(table.bytes(2), "é".as_bytes());
        assert_eq!(table.bytes(3), b"<|end|>");
        assert_eq!(table.bytes(99), b"");
        assert_eq!((table.special("<|end|>"), table.special("hi")), (Some(3), None));
    }

    #[test]
    fn pieces_become_bytes() {
        let table = table(r#"{"model":{"type":"Unigram","vocab":[["▁a",-1.0],["<0x0A>",0.0]]}}"#);
        assert_eq!((table.bytes(0), table.bytes(1)), (&b" a"[..], &b"\n"[..]));
    }
}
