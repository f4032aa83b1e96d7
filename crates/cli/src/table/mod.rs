//! [`Table`]: rows and columns, rendered with borders, as CSV or as tab-separated text.

mod cell;
mod fit;

use unicode_width::UnicodeWidthStr as _;

use crate::format::{escape_controls, escape_controls_in_lines};
use crate::style::{BOLD, BRIGHT_CYAN, ITALIC, Style};

pub(crate) use cell::TableCell;
use fit::{break_cell, center, fit, omit_run_numbers, shorten_ids};

/// Minimum width of a truncated column; below it, each cell gets its own line.
const MIN_COLUMN_WIDTH: usize = 4;

/// Rows and columns. Cells are shown literally, with control characters escaped.
#[derive(Debug, Default)]
pub(crate) struct Table {
    title: Option<String>,
    headers: Vec<String>,
    rows: Vec<Vec<TableCell>>,
    /// Index of a column, besides the first, that is never truncated or shortened.
    untruncated: Option<usize>,
    /// Indices of columns whose cells are broken between words instead of truncated.
    wrapped: Vec<usize>,
    /// Whether ids are shortened before anything is truncated.
    shortens_ids: bool,
    /// Index of a column, and the color of a cell by its text.
    colored: Option<(usize, CellColor)>,
}

/// Returns the color of a cell by its text.
type CellColor = fn(&str) -> Option<&'static str>;

impl Table {
    pub(crate) fn new<H: Into<String>>(headers: impl IntoIterator<Item = H>) -> Self {
        Self { headers: headers.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Creates the two-column table that `info` commands print. Values, such as paths, are never
    /// truncated: if one does not fit, each property gets its own line.
    pub(crate) fn of_properties() -> Self {
        Self::new(["Property", "Value"]).untruncated("Value")
    }

    pub(crate) fn title(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into());
        self
    }

    /// Excludes the column with this header from truncation, and its ids from being shortened.
    pub(crate) fn untruncated(mut self, header: &str) -> Self {
        self.untruncated = self.headers.iter().position(|known| known == header);
        self
    }

    /// Breaks the cells of the columns with these headers between words instead of truncating them.
    pub(crate) fn wrapped(mut self, headers: &[&str]) -> Self {
        let columns = self.headers.iter().enumerate();
        let wrapped = columns.filter(|(_, header)| headers.contains(&header.as_str()));
        self.wrapped = wrapped.map(|(at, _)| at).collect();
        self
    }

    /// Shortens ids before anything else, if the table is too wide.
    pub(crate) fn shorten_ids(mut self) -> Self {
        self.shortens_ids = true;
        self
    }

    /// Colors the cells of the column with this header by their text.
    pub(crate) fn colored(mut self, header: &str, color: CellColor) -> Self {
        self.colored = self.headers.iter().position(|known| known == header).map(|at| (at, color));
        self
    }

    pub(crate) fn row<C: Into<TableCell>>(&mut self, cells: impl IntoIterator<Item = C>) {
        let mut cells: Vec<TableCell> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.headers.len(), TableCell::default());
        self.rows.push(cells);
    }

    pub(crate) fn property(&mut self, name: &str, value: impl Into<TableCell>) {
        self.row([name.into(), value.into()]);
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
        let complete: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| row.iter().map(|cell| escape_controls(&cell.text)).collect())
            .collect();
        let natural = self.natural_widths(&complete);
        let is_too_wide = style.width.is_some_and(|width| total_width(&natural) > width);
        let mut rows = complete.clone();
        if self.shortens_ids && is_too_wide {
            rows = shorten_ids(rows, self.untruncated);
            if style.width.is_some_and(|width| total_width(&self.natural_widths(&rows)) > width) {
                rows = omit_run_numbers(rows, self.untruncated);
            }
        }
        let Some(widths) = self.widths(&rows, style.width) else {
            return self.blocks(&complete, style);
        };
        let border = |left: &str, line: &str, between: &str, right: &str| {
            let parts: Vec<_> = widths.iter().map(|width| line.repeat(width + 2)).collect();
            format!("{left}{}{right}\n", parts.join(between))
        };
        let mut text = String::new();
        if let Some(title) = &self.title {
            let title = center(&escape_controls(title), total_width(&widths));
            text += &style.paint(ITALIC, &title);
            text.push('\n');
        }
        text += &border("┏", "━", "┳", "┓");
        text += &self.lines(&self.headers, &widths, "┃", &|_, cell| style.paint(BOLD, &cell));
        text += &border("┡", "━", "╇", "┩");
        for row in &rows {
            text += &self.lines(row, &widths, "│", &|at, cell| {
                let by_text = self.colored.filter(|(column, _)| *column == at);
                let color = match by_text {
                    Some((_, color)) => color(&row[at]),
                    None => (at == 0).then_some(BRIGHT_CYAN),
                };
                color.map_or(cell.clone(), |color| style.paint(color, &cell))
            });
        }
        text + &border("└", "─", "┴", "┘")
    }

    /// Renders the lines of a row. `paint` gets the index of a column and a padded part of the cell.
    fn lines(
        &self,
        cells: &[String],
        widths: &[usize],
        edge: &str,
        paint: &dyn Fn(usize, String) -> String,
    ) -> String {
        let columns = cells.iter().zip(widths).enumerate();
        let columns: Vec<Vec<String>> = columns
            .map(|(at, (cell, width))| {
                if self.wrapped.contains(&at) {
                    break_cell(cell, *width)
                } else {
                    vec![fit(cell, *width)]
                }
            })
            .collect();
        let height = columns.iter().map(Vec::len).max().unwrap_or(1);
        let mut text = String::new();
        for line in 0..height {
            text += edge;
            for (at, (column, width)) in columns.iter().zip(widths).enumerate() {
                let part = column.get(line).cloned().unwrap_or_else(|| " ".repeat(*width));
                text += &format!(" {} {edge}", paint(at, part));
            }
            text.push('\n');
        }
        text
    }

    /// Renders one line per cell: the header and the complete cell.
    fn blocks(&self, rows: &[Vec<String>], style: Style) -> String {
        let title = self.title.iter().map(|title| style.paint(ITALIC, &escape_controls(title)));
        let mut text: String = title.map(|title| title + "\n").collect();
        for row in rows {
            if let [name, value] = &row[..] {
                text += &format!("{}: {value}\n", style.paint(BOLD, name));
                continue;
            }
            if !text.is_empty() {
                text.push('\n');
            }
            for (header, cell) in self.headers.iter().zip(row) {
                text += &format!("{}: {cell}\n", style.paint(BOLD, header));
            }
        }
        text
    }

    /// Returns the width of the widest cell of each column.
    fn natural_widths(&self, rows: &[Vec<String>]) -> Vec<usize> {
        let widest = |at: usize| {
            let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.width());
            cells.max().unwrap_or(0).max(self.headers[at].width())
        };
        (0..self.headers.len()).map(widest).collect()
    }

    /// Returns the width of each column: the width of its widest cell, reduced until the table fits into
    /// `limit`. The first column identifies the row and is never truncated. Returns `None` if the
    /// table cannot fit.
    fn widths(&self, rows: &[Vec<String>], limit: Option<usize>) -> Option<Vec<usize>> {
        let mut widths = self.natural_widths(rows);
        while limit.is_some_and(|limit| total_width(&widths) > limit) {
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

    /// Renders comma-separated values with a header (RFC 4180). Times and sizes are values, not the
    /// texts of the table. Terminal controls are escaped, and an apostrophe precedes a text that a
    /// spreadsheet would execute as a formula.
    pub(crate) fn csv(&self) -> String {
        let quote = |cell: &str| {
            let is_formula = cell.starts_with(['=', '+', '-', '@']) && cell.parse::<f64>().is_err();
            let start = if is_formula { "'" } else { "" };
            let cell = format!("{start}{}", escape_controls_in_lines(cell));
            if cell.contains(['"', ',', '\n', '\t']) {
                format!("\"{}\"", cell.replace('"', "\"\""))
            } else {
                cell
            }
        };
        let headers = self.headers.iter().map(|header| quote(header)).collect::<Vec<_>>();
        let rows = self.rows.iter();
        let rows = rows.map(|row| row.iter().map(|cell| quote(cell.value())).collect());
        std::iter::once(headers).chain(rows).map(|row| row.join(",") + "\r\n").collect()
    }

    /// Renders tab-separated values without a header, for `cut` and `awk`.
    pub(crate) fn plain(&self) -> String {
        let line = |row: &Vec<TableCell>| {
            let cells = row.iter().map(|cell| escape_controls(&cell.text));
            cells.collect::<Vec<_>>().join("\t") + "\n"
        };
        self.rows.iter().map(line).collect()
    }
}

/// Returns the width of a table with borders.
fn total_width(widths: &[usize]) -> usize {
    widths.iter().map(|width| width + 3).sum::<usize>() + 1
}

#[cfg(test)]
mod tests {
    use tinkex::Timestamp;

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
    fn properties_are_complete() {
        let mut table = Table::of_properties().title("Run");
        table.property("Path", "tinker://run/weights/a");
        let text = table.render(Style { colors: false, width: Some(30) });
        assert_eq!(text, "Run\nPath: tinker://run/weights/a\n");
    }

    #[test]
    fn ids_are_shortened_before_anything_is_truncated() {
        let id = |start: &str| format!("{start}-0a88-52a9-b2b7-bce7cb1e6fef:train:0");
        let mut table = Table::new(["Run ID", "Base Model"]).shorten_ids();
        table.row([id("0034d8c9"), "Qwen/Qwen3-8B".to_owned()]);
        table.row([id("1134d8c9"), "Qwen/Qwen3-8B".to_owned()]);
        let narrow = table.render(Style { colors: false, width: Some(40) });
        assert!(narrow.contains("│ 0034d8c9…:train:0 │ Qwen/Qwen3-8B │"), "{narrow}");
        let narrower = table.render(Style { colors: false, width: Some(36) });
        assert!(narrower.contains("│ 0034d8c9… │ Qwen/Qwen3-8B │"), "{narrower}");
        let wide = table.render(Style { colors: false, width: Some(80) });
        assert!(wide.contains(&id("0034d8c9")), "{wide}");
        let paths = Table { untruncated: Some(0), ..table };
        let narrow = paths.render(Style { colors: false, width: Some(62) });
        assert!(narrow.contains(&id("0034d8c9")), "{narrow}");
        let mut table = Table { untruncated: None, ..paths };
        // Ids with the same start keep as much as distinguishes them.
        table.row([id("0034d8c9").replace("0a88", "0a89"), String::new()]);
        let similar = table.render(Style { colors: false, width: Some(44) });
        assert!(similar.contains("│ 0034d8c9-0a88…:train:0 │"), "{similar}");
    }

    #[test]
    fn wrapped_columns_have_several_lines() {
        let mut table = Table::new(["#", "Answer"]).wrapped(&["Answer"]);
        table.row(["1", "one two three four-and-a-very-long-word"]);
        let text = table.render(Style { colors: false, width: Some(20) });
        let lines: Vec<&str> = text.lines().skip(3).collect();
        assert_eq!(
            lines,
            [
                "│ 1 │ one two      │",
                "│   │ three        │",
                "│   │ four-and-a-v │",
                "│   │ ery-long-wor │",
                "│   │ d            │",
                "└───┴──────────────┘"
            ],
            "{text}"
        );
        table.row(["2", &"word ".repeat(100)]);
        let text = table.render(Style { colors: false, width: Some(20) });
        assert_eq!(text.lines().filter(|line| line.contains('…')).count(), 1, "{text}");
    }

    #[test]
    fn csv_has_values_instead_of_texts() {
        let time: Timestamp = "2026-07-13T12:00:00Z".parse().unwrap();
        let mut table = Table::new(["Size", "Created"]);
        table.row([TableCell::size(2048), TableCell::time(time, time)]);
        assert_eq!(table.csv(), "Size,Created\r\n2048,2026-07-13T12:00:00Z\r\n");
        assert_eq!(table.plain(), "2.0 KB\tjust now\n");
    }

    #[test]
    fn colors_add_only_escapes() {
        let text = table().render(Style { colors: true, width: None });
        assert!(text.contains("\u{1b}[96mfirst\u{1b}[0m"), "{text}");
        assert!(!table().render(Style { colors: false, width: None }).contains('\u{1b}'));
    }

    #[test]
    fn csv_has_neither_terminal_controls_nor_formulas() {
        let mut table = Table::new(["Name", "Value"]);
        table.row(["=HYPERLINK(\"http://example.com\")", "-1.5"]);
        table.row(["@SUM(1)", "+1e-3"]);
        table.row(["-cmd|' /C calc'!A0", "a\u{1b}[2J\u{202e}b"]);
        assert_eq!(
            table.csv(),
            "Name,Value\r\n\"'=HYPERLINK(\"\"http://example.com\"\")\",-1.5\r\n'@SUM(1),+1e-3\r\n\
             '-cmd|' /C calc'!A0,a\\u{1b}[2J\\u{202e}b\r\n"
        );
    }

    #[test]
    fn csv_and_plain_text_have_complete_values() {
        let mut table = Table::new(["a", "b"]);
        table.row(["x,y", "say \"hi\"\nthere"]);
        assert_eq!(table.csv(), "a,b\r\n\"x,y\",\"say \"\"hi\"\"\nthere\"\r\n");
        assert_eq!(table.plain(), "x,y\tsay \"hi\"\\nthere\n");
    }
}
