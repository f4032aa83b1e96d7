//! Breaks long lines between words.

use unicode_width::UnicodeWidthStr as _;

/// Minimum number of columns for a text beside a label; below it, lines are not broken.
const MIN_COLUMNS: usize = 20;

/// Programs whose command lines are not broken, so that they can be copied.
const PROGRAMS: [&str; 3] = ["tinkex ", "python3 ", "iconv "];

/// Breaks a line that is wider than `width` columns. Further lines are indented by two columns
/// after a label (`error: `), and otherwise like the text or the explanation in the first line.
///
/// Commands and quoted code stay on one line, so that they can be copied.
pub(crate) fn wrap(line: &str, width: usize) -> String {
    let indent = text_column(line);
    if line.width() <= width || indent + MIN_COLUMNS > width {
        return line.to_owned();
    }
    let (head, text) = line.split_at(byte_of_column(line, indent));
    let mut wrapped = head.to_owned();
    let mut column = indent;
    let mut is_start = true;
    for unit in units(text) {
        if !is_start && column + 1 + unit.width() > width {
            wrapped += &format!("\n{}", " ".repeat(indent));
            column = indent;
            is_start = true;
        }
        if !is_start {
            wrapped.push(' ');
            column += 1;
        }
        wrapped += unit;
        column += unit.width();
        is_start = false;
    }
    wrapped
}

/// Returns the column to which further lines are indented: the column of the text after two or more
/// spaces (the explanation of an option), two columns for a label, or else the indentation.
fn text_column(line: &str) -> usize {
    let indent = line.len() - line.trim_start_matches(' ').len();
    if let Some(at) = line[indent..].rfind("  ").map(|at| indent + at + 2) {
        return line[..at].width();
    }
    let label = ["error: ", "warning: ", "hint: "];
    let label = label.into_iter().find(|label| line[indent..].starts_with(label));
    match label {
        Some(_) => indent + 2,
        None => indent,
    }
}

/// Returns the index of the first byte at or after a column.
fn byte_of_column(line: &str, column: usize) -> usize {
    let mut width = 0;
    for (at, letter) in line.char_indices() {
        if width >= column {
            return at;
        }
        width += letter.to_string().width();
    }
    line.len()
}

/// Splits a text into parts that must not be broken: words, quoted code, and commands.
fn units(text: &str) -> Vec<&str> {
    let mut units: Vec<&str> = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let is_command = PROGRAMS.iter().any(|program| rest.starts_with(program))
            && units.last().is_none_or(|word| word.ends_with(':'));
        let end = if is_command {
            rest.len()
        } else {
            let word = rest.find(' ').unwrap_or(rest.len());
            let code = rest[..word].starts_with(['`', '(']).then(|| rest.find('`')).flatten();
            let closing = code
                .filter(|open| *open < word)
                .and_then(|open| rest[open + 1..].find('`').map(|at| open + 1 + at));
            match closing {
                Some(close) => rest[close..].find(' ').map_or(rest.len(), |at| close + at),
                None => word,
            }
        };
        units.push(&rest[..end]);
        rest = rest[end..].strip_prefix(' ').unwrap_or(&rest[end..]);
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        let line = "error: cannot read training file data.jsonl: line 7: expected an object";
        assert_eq!(
            wrap(line, 40),
            "error: cannot read training file\n  data.jsonl: line 7: expected an object"
        );
        assert_eq!(wrap(line, 100), line);
        assert_eq!(wrap(line, 10), line, "too narrow");
        let path = format!("no folder {}", "x".repeat(50));
        assert_eq!(wrap(&path, 30), format!("no folder\n{}", "x".repeat(50)));
    }

    #[test]
    fn explanations_stay_in_their_column() {
        let option = "  -q, --quiet    Print only results and errors, nothing else";
        assert_eq!(
            wrap(option, 40),
            "  -q, --quiet    Print only results and\n                 errors, nothing else"
        );
    }

    #[test]
    fn commands_and_code_are_not_broken() {
        let hint = "hint: Resume from step 30 with: tinkex train --resume data-run --local";
        assert_eq!(
            wrap(hint, 40),
            "hint: Resume from step 30 with:\n  tinkex train --resume data-run --local"
        );
        let script = "hint: Convert it: python3 -c 'import pandas, sys; …' a.csv b.jsonl";
        assert_eq!(
            wrap(script, 40),
            "hint: Convert it:\n  python3 -c 'import pandas, sys; …' a.csv b.jsonl"
        );
        let code = "hint: Check the key (TINKER_API_KEY), or run `tinkex auth login`.";
        assert_eq!(
            wrap(code, 52),
            "hint: Check the key (TINKER_API_KEY), or run\n  `tinkex auth login`."
        );
        let example = format!("  tinkex train {}", "a".repeat(60));
        assert_eq!(wrap(&example, 40), example);
    }
}
