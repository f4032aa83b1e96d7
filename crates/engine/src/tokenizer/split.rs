//! Pre-tokenizer: splits text into pieces that no token crosses.

/// The rule of [`pieces`] as a regular expression of the `tokenizers` library.
pub(crate) const PATTERN: &str =
    r" ?[A-Za-z[^\x00-\x7F]]+|[0-9]| ?[^ \t\r\nA-Za-z0-9[^\x00-\x7F]]+|[ \t\r\n]+";

/// Class of a byte.
#[derive(Clone, Copy, PartialEq)]
enum Class {
    /// ASCII letters and all non-ASCII characters.
    Letter,
    /// Digits, which form pieces of their own: arithmetic is easier to learn this way.
    Digit,
    Space,
    /// All other ASCII characters.
    Mark,
}

fn class(byte: u8) -> Class {
    match byte {
        b'0'..=b'9' => Class::Digit,
        b' ' | b'\t' | b'\r' | b'\n' => Class::Space,
        b'A'..=b'Z' | b'a'..=b'z' | 0x80.. => Class::Letter,
        _ => Class::Mark,
    }
}

/// Splits text into words and runs of marks, each with one preceding space; single digits; and runs
/// of white space.
pub(crate) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let bytes = text.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at;
        // A space belongs to the word or mark that follows it.
        let joined = *bytes.get(start)? == b' '
            && bytes
                .get(start + 1)
                .is_some_and(|&next| matches!(class(next), Class::Letter | Class::Mark));
        let from = if joined { start + 1 } else { start };
        let kind = class(bytes[from]);
        at = match kind {
            Class::Digit => from + 1,
            kind => {
                let run = bytes[from..].iter().take_while(|&&byte| class(byte) == kind).count();
                from + run
            }
        };
        // All non-ASCII bytes have the same class, so a character is never split.
        text.get(start..at)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_include_the_preceding_space() {
        let all: Vec<&str> = pieces("One  two, 42 + é☃\n\n x=3").collect();
        assert_eq!(
            all,
            ["One", "  ", "two", ",", " ", "4", "2", " +", " é☃", "\n\n ", "x", "=", "3"]
        );
    }

    proptest! {
        #[test]
        fn pieces_concatenate_to_the_text(text in ".*") {
            prop_assert_eq!(pieces(&text).collect::<String>(), text);
        }
    }
}
