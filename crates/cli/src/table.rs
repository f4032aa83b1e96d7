//! [`Table`]: rows and columns, rendered with borders, as CSV or as tab-separated text.

use unicode_width::UnicodeWidthStr as _;

use crate::format::escape_controls;

/// Minimum width of a truncated column; below it, each cell gets its own line.
const MIN_COLUMN_WIDTH: usize = 4;

/// Rows and columns. Cells are shown literally, with control characters escaped.
#[derive(Debug, Default)]
pub(crate) struct Table {
    title: Option<String>,
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Index of a column, besides the first, that is never truncated.
    untruncated: Option<usize>,
}

/// Options for rendering a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub(crate) colors: bool,
    /// Maximum width in columns; `None` is unlimited.
    pub(crate) width: Option<usize>,
}

impl Table {
    pub(crate) fn new<H: Into<String>>(headers: impl IntoIterator<Item = H>) -> Self {
        Self { headers: headers.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Creates the two-column table that `info` commands print.
    pub(crate) fn of_properties() -> Self {
        Self::new(["Property", "Value"])
    }

    pub(crate) fn title(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into());
        self
    }

    /// Excludes the column with this header from truncation.
    pub(crate) fn untruncated(mut self, header: &str) -> Self {
        self.untruncated = self.headers.iter().position(|known| known == header);
        self
    }

    pub(crate) fn row<C: Into<String>>(&mut self, cells: impl IntoIterator<Item = C>) {
        let mut cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.headers.len(), String::new());
        self.rows.push(cells);
    }

    pub(crate) fn property(&mut self, name: &str, value: impl Into<String>) {
        self.row([name.to_owned(), value.into()]);
    }

    /// Adds the user's metadata as properties below a heading, if there is any.
    pub(crate) fn metadata(&mut self, metadata: Option<&tinkex::Metadata>) {
        if let Some(metadata) = metadata.filter(|metadata| !metadata.is_empty()) {
            self.property("Metadata", "");
            for (name, text) in metadata.iter() {
                self.property(&format!("  - {name}"), text);
            }
        }
    }

    /// Renders the table with borders, or one line per cell if it does not fit into the width.
    pub(crate) fn render(&self, style: Style) -> String {
        let rows: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| row.iter().map(|cell| escape_controls(cell)).collect())
            .collect();
        let paint = |code: &str, text: String| match style.colors {
            true => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
            false => text,
        };
        let Some(widths) = self.widths(&rows, style.width) else {
            return self.blocks(&rows, &paint);
        };
        let border = |left: &str, line: &str, between: &str, right: &str| {
            let parts: Vec<_> = widths.iter().map(|width| line.repeat(width + 2)).collect();
            format!("{left}{}{right}\n", parts.join(between))
        };
        let line = |cells: &[String], edge: &str, code: &dyn Fn(usize) -> Option<&'static str>| {
            let mut text = String::from(edge);
            for (at, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                let cell = fit(cell, *width);
                let cell = code(at).map_or(cell.clone(), |code| paint(code, cell));
                text += &format!(" {cell} {edge}");
            }
            text + "\n"
        };

        let mut text = String::new();
        if let Some(title) = &self.title {
            let width = widths.iter().map(|width| width + 3).sum::<usize>() + 1;
            text += &paint("3", center(&escape_controls(title), width));
            text.push('\n');
        }
        text += &border("┏", "━", "┳", "┓");
        text += &line(&self.headers, "┃", &|_| Some("1"));
        text += &border("┡", "━", "╇", "┩");
        for row in &rows {
            text += &line(row, "│", &|at| (at == 0).then_some("96"));
        }
        text + &border("└", "─", "┴", "┘")
    }

    /// Renders one line per cell: the header and the complete cell.
    fn blocks(&self, rows: &[Vec<String>], paint: &dyn Fn(&str, String) -> String) -> String {
        let title = self.title.iter().map(|title| paint("3", escape_controls(title)) + "\n");
        let mut text: String = title.collect();
        for row in rows {
            if let [name, value] = &row[..] {
                text += &format!("{}: {value}\n", paint("1", name.clone()));
                continue;
            }
            if !text.is_empty() {
                text.push('\n');
            }
            for (header, cell) in self.headers.iter().zip(row) {
                text += &format!("{}: {cell}\n", paint("1", header.clone()));
            }
        }
        text
    }

    /// Returns the width of each column: that of its widest cell, reduced until the table fits into
    /// `limit`. The first column identifies the row and is never truncated. Returns `None` if the
    /// table cannot fit.
    fn widths(&self, rows: &[Vec<String>], limit: Option<usize>) -> Option<Vec<usize>> {
        let widest = |at: usize| {
            let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.width());
            cells.max().unwrap_or(0).max(self.headers[at].width())
        };
        let mut widths: Vec<usize> = (0..self.headers.len()).map(widest).collect();
        let total = |widths: &[usize]| widths.iter().map(|width| width + 3).sum::<usize>() + 1;
        while limit.is_some_and(|limit| total(&widths) > limit) {
            let others = widths.iter_mut().enumerate().skip(1);
            let others =
                others.filter(|(at, _)| self.untruncated != Some(*at)).map(|(_, width)| width);
            let widest = others.max_by_key(|width| **width)?;
            if *widest <= MIN_COLUMN_WIDTH {
                return None;
            }
            *widest -= 1;
        }
        Some(widths)
    }

    /// Renders comma-separated values with a header (RFC 4180).
    pub(crate) fn csv(&self) -> String {
        let quote = |cell: &String| {
            if cell.contains(['"', ',', '\r', '\n']) {
                format!("\"{}\"", cell.replace('"', "\"\""))
            } else {
                cell.clone()
            }
        };
        let lines = std::iter::once(&self.headers).chain(&self.rows);
        lines.map(|row| row.iter().map(quote).collect::<Vec<_>>().join(",") + "\r\n").collect()
    }

    /// Renders tab-separated values without a header, for `cut` and `awk`.
    pub(crate) fn plain(&self) -> String {
        let line = |row: &Vec<String>| {
            row.iter().map(|cell| escape_controls(cell)).collect::<Vec<_>>().join("\t") + "\n"
        };
        self.rows.iter().map(line).collect()
    }
}

/// Pads text to `width` columns, or truncates it with an ellipsis.
fn fit(text: &str, width: usize) -> String {
    let current = text.width();
    if current <= width {
        return format!("{text}{}", " ".repeat(width - current));
    }
    let mut cut = String::new();
    for letter in text.chars() {
        let next = format!("{cut}{letter}");
        if next.width() + 1 > width {
            break;
        }
        cut = next;
    }
    let rest = width.saturating_sub(cut.width() + 1);
    format!("{cut}…{}", " ".repeat(rest))
}

fn center(text: &str, width: usize) -> String {
    let spare = width.saturating_sub(text.width());
    format!("{}{text}{}", " ".repeat(spare / 2), " ".repeat(spare - spare / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(["Name", "Description"]).title("two");
        table.row(["first", "a word and another word"]);
        table.row(["日本", "[red]x[/red]\u{1b}[2J"]);
        table
    }

    #[test]
    fn a_table_has_borders_and_literal_cells() {
        let text = table().render(Style { colors: false, width: None });
        let expected = "\
               two               \n\
┏━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━┓\n\
┃ Name  ┃ Description             ┃\n\
┡━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━┩\n\
│ first │ a word and another word │\n\
│ 日本  │ [red]x[/red]\\u{1b}[2J   │\n\
└───────┴─────────────────────────┘\n";
        assert_eq!(
            text.lines().skip(1).collect::<Vec<_>>(),
            expected.lines().skip(1).collect::<Vec<_>>()
        );
        assert_eq!(text.lines().next().unwrap().trim(), "two");
    }

    #[test]
    fn a_narrow_terminal_truncates_all_but_the_first_column() {
        let text = table().render(Style { colors: false, width: Some(24) });
        assert!(text.lines().all(|line| line.width() == 24), "{text}");
        assert!(text.contains("│ first │ a word and …"), "{text}");
    }

    #[test]
    fn a_table_that_does_not_fit_has_a_line_per_cell() {
        let text = table().render(Style { colors: false, width: Some(12) });
        assert!(text.starts_with("two\nfirst: a word and another word\n"), "{text}");
        let mut table = Table::new(["ID", "Size", "Path"]).untruncated("Path");
        table.row(["a", "1.0 KB and more", "tinker://run/weights/a"]);
        let at = |width| table.render(Style { colors: false, width: Some(width) });
        assert!(
            at(40).contains("│ tinker://run/weights/a │") && at(40).contains('…'),
            "{}",
            at(40)
        );
        let block = "ID: a\nSize: 1.0 KB and more\nPath: tinker://run/weights/a\n";
        assert_eq!(at(35), block);
        table.row(["b", "2.0 KB", "tinker://run/weights/b"]);
        let text = table.render(Style { colors: false, width: Some(35) });
        assert!(text.starts_with(&format!("{block}\nID: b\n")), "{text}");
    }

    #[test]
    fn colors_add_only_escapes() {
        let text = table().render(Style { colors: true, width: None });
        assert!(text.contains("\u{1b}[96mfirst\u{1b}[0m"), "{text}");
        assert!(!table().render(Style { colors: false, width: None }).contains('\u{1b}'));
    }

    #[test]
    fn csv_and_plain_text_have_complete_values() {
        let mut table = Table::new(["a", "b"]);
        table.row(["x,y", "say \"hi\"\nthere"]);
        assert_eq!(table.csv(), "a,b\r\n\"x,y\",\"say \"\"hi\"\"\nthere\"\r\n");
        assert_eq!(table.plain(), "x,y\tsay \"hi\"\\nthere\n");
    }
}
