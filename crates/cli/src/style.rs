//! [`Style`]: colors and width of text for a terminal.

use crate::wrap::wrap;

/// Colors and width of text for a terminal. The default changes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Style {
    pub(crate) colors: bool,
    /// Maximum width in columns; `None` is unlimited.
    pub(crate) width: Option<usize>,
}

/// Colors and attributes, as parameters of the escape sequence.
pub(crate) const BOLD: &str = "1";
pub(crate) const ITALIC: &str = "3";
pub(crate) const RED: &str = "31";
pub(crate) const GREEN: &str = "32";
pub(crate) const BRIGHT_CYAN: &str = "96";

/// Labels at the start of a message, and their colors.
const LABELS: [(&str, &str); 4] =
    [("error:", "1;31"), ("warning:", "1;33"), ("hint:", "1;36"), ("tip:", "1;36")];

impl Style {
    /// Returns text in a color or with an attribute, if colors are on.
    pub(crate) fn paint(self, code: &str, text: &str) -> String {
        if self.colors { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }

    /// Formats a message: breaks long lines between words and colors the labels of lines.
    pub(crate) fn message(self, text: &str) -> String {
        self.lines(text, |line| {
            let start = line.len() - line.trim_start().len();
            let known = LABELS.iter().find(|(label, _)| line[start..].starts_with(label));
            match known {
                Some((label, color)) => {
                    let rest = &line[start + label.len()..];
                    format!("{}{}{rest}", &line[..start], self.paint(color, label))
                }
                None => self.heading(line),
            }
        })
    }

    /// Formats help: breaks long lines between words and emphasizes headings.
    pub(crate) fn help(self, text: &str) -> String {
        self.lines(text, |line| self.heading(line))
    }

    /// Emphasizes a heading: a line such as `Options:`, and the start of `Usage: tinkex …`.
    fn heading(self, line: &str) -> String {
        let is_heading =
            line.ends_with(':') && line.starts_with(char::is_uppercase) && line.len() < 60;
        match line.strip_prefix("Usage:") {
            Some(rest) => self.paint(BOLD, "Usage:") + rest,
            None if is_heading => self.paint(BOLD, line),
            None => line.to_owned(),
        }
    }

    /// Breaks lines and formats each of the results. Keeps a final line break.
    fn lines(self, text: &str, format: impl Fn(&str) -> String) -> String {
        let line = |line: &str| match self.width {
            Some(width) => {
                wrap(line, width).split('\n').map(&format).collect::<Vec<_>>().join("\n")
            }
            None => format(line),
        };
        text.split('\n').map(line).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_and_headings_are_colored_on_request() {
        let colors = Style { colors: true, width: None };
        let text = "error: no such file\n  tip: look elsewhere\n\nUsage: tinkex run\n";
        assert_eq!(
            colors.message(text),
            "\u{1b}[1;31merror:\u{1b}[0m no such file\n  \u{1b}[1;36mtip:\u{1b}[0m look \
             elsewhere\n\n\u{1b}[1mUsage:\u{1b}[0m tinkex run\n"
        );
        assert_eq!(Style::default().message(text), text);
        assert_eq!(
            colors.help("Options:\n  -q  Quiet\n"),
            "\u{1b}[1mOptions:\u{1b}[0m\n  -q  Quiet\n"
        );
    }

    #[test]
    fn a_width_breaks_lines() {
        let narrow = Style { colors: false, width: Some(30) };
        assert_eq!(
            narrow.message("warning: one two three four five six\n"),
            "warning: one two three four\n  five six\n"
        );
    }
}
