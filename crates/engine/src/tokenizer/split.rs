//! Cutting text into pieces that no token spans.

/// The rule of [`pieces`] as the `tokenizers` library writes it.
pub(super) const PATTERN: &str =
    r" ?[A-Za-z[^\x00-\x7F]]+|[0-9]| ?[^ \t\r\nA-Za-z0-9[^\x00-\x7F]]+|[ \t\r\n]+";

#[derive(Clone, Copy, PartialEq)]
enum Class {
    /// Letters; everything beyond ASCII is taken for one.
    Letter,
    /// Digits stand alone: sums are easier to learn that way.
    Digit,
    Space,
    /// The rest of ASCII.
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

/// Words and runs of marks, each with one space before it; single digits; runs of spaces.
pub(super) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let bytes = text.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at;
        let first = class(*bytes.get(start)?);
        // A space belongs to the word or mark right after it.
        let joined = bytes[start] == b' '
            && bytes
                .get(start + 1)
                .is_some_and(|&next| matches!(class(next), Class::Letter | Class::Mark));
        let (kind, from) =
            if joined { (class(bytes[start + 1]), start + 1) } else { (first, start) };
        at = match kind {
            Class::Digit => from + 1,
            kind => {
                let run = bytes[from..].iter().take_while(|&&byte| class(byte) == kind).count();
                from + run
            }
        };
        // Bytes beyond ASCII are all of one class, so this never cuts a character.
        text.get(start..at)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_take_the_space_before_them() {
        let all: Vec<&str> = pieces("One  two, 42 + é☃\n\n x=3").collect();
        assert_eq!(
            all,
            ["One", "  ", "two", ",", " ", "4", "2", " +", " é☃", "\n\n ", "x", "=", "3"]
        );
    }

    proptest! {
        #[test]
        fn pieces_are_the_text(text in ".*") {
            prop_assert_eq!(pieces(&text).collect::<String>(), text);
        }
    }
}
