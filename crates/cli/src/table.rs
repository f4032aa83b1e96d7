//! [`Table`]: rows under headers, for people and for other programs.

use unicode_width::UnicodeWidthStr as _;

use crate::format::visible;

/// Narrower than this says nothing.
const NARROWEST: usize = 4;

/// Rows under headers. Cells are shown as they are, except for control characters.
#[derive(Debug, Default)]
pub(crate) struct Table {
    title: Option<String>,
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
    /// The column besides the first that is never cut.
    whole: Option<usize>,
}

/// Where a table is shown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub(crate) colours: bool,
    /// How wide a table may be, if anything limits it.
    pub(crate) width: Option<usize>,
}

impl Table {
    pub(crate) fn new<H: Into<String>>(headers: impl IntoIterator<Item = H>) -> Self {
        Self { headers: headers.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// The two columns of everything that shows one thing.
    pub(crate) fn of_properties() -> Self {
        Self::new(["Property", "Value"])
    }

    pub(crate) fn title(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into());
        self
    }

    /// The column of this header is never cut, if it is there: half an address is none.
    pub(crate) fn whole(mut self, header: &str) -> Self {
        self.whole = self.headers.iter().position(|known| known == header);
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

    /// What a user remembered, below a line of its own.
    pub(crate) fn metadata(&mut self, metadata: Option<&tinkex::Metadata>) {
        if let Some(metadata) = metadata.filter(|metadata| !metadata.is_empty()) {
            self.property("Metadata", "");
            for (name, text) in metadata.iter() {
                self.property(&format!("  - {name}"), text);
            }
        }
    }

    /// With borders; where that does not fit, one line for each cell.
    pub(crate) fn render(&self, style: Style) -> String {
        let rows: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(|cell| visible(cell)).collect()).collect();
        let paint = |code: &str, text: String| match style.colours {
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
            let whole = widths.iter().map(|width| width + 3).sum::<usize>() + 1;
            text += &paint("3", centre(&visible(title), whole));
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

    /// One line for each cell: its header, and all of it.
    fn blocks(&self, rows: &[Vec<String>], paint: &dyn Fn(&str, String) -> String) -> String {
        let title = self.title.iter().map(|title| paint("3", visible(title)) + "\n");
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

    /// How wide each column is: as its widest cell, unless that does not fit. The first column is
    /// never cut, since it says what a row is about. `None` if nothing fits.
    fn widths(&self, rows: &[Vec<String>], limit: Option<usize>) -> Option<Vec<usize>> {
        let widest = |at: usize| {
            let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.width());
            cells.max().unwrap_or(0).max(self.headers[at].width())
        };
        let mut widths: Vec<usize> = (0..self.headers.len()).map(widest).collect();
        let whole = |widths: &[usize]| widths.iter().map(|width| width + 3).sum::<usize>() + 1;
        while limit.is_some_and(|limit| whole(&widths) > limit) {
            let others = widths.iter_mut().enumerate().skip(1);
            let others = others.filter(|(at, _)| self.whole != Some(*at)).map(|(_, width)| width);
            let widest = others.max_by_key(|width| **width)?;
            if *widest <= NARROWEST {
                return None;
            }
            *widest -= 1;
        }
        Some(widths)
    }

    /// Values with commas, quoted where they need it.
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

    /// Values with tabs, for `cut` and `awk`.
    pub(crate) fn plain(&self) -> String {
        let line = |row: &Vec<String>| {
            row.iter().map(|cell| visible(cell)).collect::<Vec<_>>().join("\t") + "\n"
        };
        self.rows.iter().map(line).collect()
    }
}

/// Text at exactly this width: filled up, or cut with an ellipsis.
fn fit(text: &str, width: usize) -> String {
    let has = text.width();
    if has <= width {
        return format!("{text}{}", " ".repeat(width - has));
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

fn centre(text: &str, width: usize) -> String {
    let spare = width.saturating_sub(text.width());
    format!("{}{text}{}", " ".repeat(spare / 2), " ".repeat(spare - spare / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(["Name", "What it says"]).title("two");
        table.row(["first", "a word and another word"]);
        table.row(["日本", "[red]x[/red]\u{1b}[2J"]);
        table
    }

    #[test]
    fn a_table_has_borders_and_literal_cells() {
        let text = table().render(Style { colours: false, width: None });
        let expected = "\
               two               \n\
┏━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━┓\n\
┃ Name  ┃ What it says            ┃\n\
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
    fn a_narrow_terminal_cuts_all_but_the_first_column() {
        let text = table().render(Style { colours: false, width: Some(24) });
        assert!(text.lines().all(|line| line.width() == 24), "{text}");
        assert!(text.contains("│ first │ a word and …"), "{text}");
    }

    #[test]
    fn where_no_table_fits_each_cell_has_a_line() {
        let text = table().render(Style { colours: false, width: Some(12) });
        assert!(text.starts_with("two\nfirst: a word and another word\n"), "{text}");
        let mut table = Table::new(["ID", "Size", "Path"]).whole("Path");
        table.row(["a", "1.0 KB and more", "tinker://run/weights/a"]);
        let at = |width| table.render(Style { colours: false, width: Some(width) });
        assert!(
            at(40).contains("│ tinker://run/weights/a │") && at(40).contains('…'),
            "{}",
            at(40)
        );
        let block = "ID: a\nSize: 1.0 KB and more\nPath: tinker://run/weights/a\n";
        assert_eq!(at(35), block);
        table.row(["b", "2.0 KB", "tinker://run/weights/b"]);
        let text = table.render(Style { colours: false, width: Some(35) });
        assert!(text.starts_with(&format!("{block}\nID: b\n")), "{text}");
    }

    #[test]
    fn colours_are_escapes_and_nothing_else() {
        let text = table().render(Style { colours: true, width: None });
        assert!(text.contains("\u{1b}[96mfirst\u{1b}[0m"), "{text}");
        assert!(!table().render(Style { colours: false, width: None }).contains('\u{1b}'));
    }

    #[test]
    fn other_programs_get_every_value_whole() {
        let mut table = Table::new(["a", "b"]);
        table.row(["x,y", "say \"hi\"\nthere"]);
        assert_eq!(table.csv(), "a,b\r\n\"x,y\",\"say \"\"hi\"\"\nthere\"\r\n");
        assert_eq!(table.plain(), "x,y\tsay \"hi\"\\nthere\n");
    }
}
