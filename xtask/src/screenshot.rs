//! `cargo xtask screenshot`: renders the output of `tinkex quickstart` as the SVG of the README.

use crate::step::{XtaskError, cargo, root, target, tool};

const SVG: &str = "docs/images/quickstart.svg";
/// Width of a character in pixels.
const CHARACTER_WIDTH: f64 = 8.0;
/// Height of a line in pixels.
const LINE_HEIGHT: f64 = 18.0;
/// Margin on all sides in pixels.
const MARGIN: f64 = 16.0;

pub(crate) fn run() -> Result<(), XtaskError> {
    cargo("command line", &["build", "--locked", "--release", "--package", "tinkex-cli"]).run()?;
    let data = target().join("screenshot");
    // Remove the data of an earlier run, if any.
    let _ = std::fs::remove_dir_all(&data);
    let output = tool("quickstart", target().join("release/tinkex"), &["quickstart"])
        .variable("TINKEX_DATA_DIR", &data)
        .output()?;
    // Show the default folder.
    let output = output.replace(&data.display().to_string(), "~/.local/share/tinkex/server");
    let path = root().join(SVG);
    let failed = |error| XtaskError::new(format!("cannot write {}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    std::fs::write(&path, svg("$ tinkex quickstart", &output)).map_err(failed)?;
    println!("    {SVG}");
    Ok(())
}

/// Renders a command line and its output as a terminal window.
fn svg(command: &str, output: &str) -> String {
    let lines: Vec<&str> = std::iter::once(command).chain(output.trim_end().lines()).collect();
    let columns = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    #[expect(clippy::cast_precision_loss, reason = "a terminal has few rows")]
    let height = lines.len() as f64 * LINE_HEIGHT + 2.0 * MARGIN;
    let width = offset(columns) + 2.0 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"Output of tinkex quickstart\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#1b1f27\"/>\n\
         <g font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" \
         font-size=\"13\" fill=\"#d7dce4\" xml:space=\"preserve\">\n"
    );
    let mut y = MARGIN + 13.0;
    for line in lines {
        let color = match line.trim_start() {
            text if text.starts_with("$ ") => " fill=\"#8fd18a\"",
            text if text.starts_with("before ") => " fill=\"#8d95a3\"",
            text if text.starts_with("after ") => " fill=\"#f0c674\"",
            _ => "",
        };
        // Fonts draw Braille patterns, which the loss curve consists of, in different widths.
        svg.push_str(&braille_dots(line, y));
        let text: String = line.chars().map(|c| if is_braille(c) { ' ' } else { c }).collect();
        let text = text.trim_end();
        if !text.is_empty() {
            // A fixed length keeps the columns aligned in every font.
            let length = offset(text.chars().count());
            svg.push_str(&format!(
                "<text x=\"{MARGIN}\" y=\"{y}\" textLength=\"{length}\"{color}>{}</text>\n",
                escape(text)
            ));
        }
        y += LINE_HEIGHT;
    }
    svg.push_str("</g>\n</svg>\n");
    svg
}

fn is_braille(c: char) -> bool {
    ('\u{2800}'..='\u{28ff}').contains(&c)
}

/// Draws the dots of the Braille patterns in a line whose baseline is at `y`.
fn braille_dots(line: &str, y: f64) -> String {
    // Column and row of each bit's dot: the left column from the top, then the right column; the last
    // two bits are the bottom row.
    const DOTS: [(u8, u8); 8] = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)];
    let mut circles = String::new();
    for (index, c) in line.chars().enumerate().filter(|(_, c)| is_braille(*c)) {
        for (bit, (column, row)) in DOTS.into_iter().enumerate() {
            if (u32::from(c) - 0x2800) & (1 << bit) != 0 {
                let x = MARGIN + offset(index) + 2.0 + 4.0 * f64::from(column);
                let center = y - 11.0 + 4.5 * f64::from(row);
                circles.push_str(&format!("<circle cx=\"{x}\" cy=\"{center}\" r=\"1.3\"/>\n"));
            }
        }
    }
    circles
}

/// Returns the distance of a column from the left margin, in pixels.
#[expect(clippy::cast_precision_loss, reason = "a line has few characters")]
fn offset(column: usize) -> f64 {
    column as f64 * CHARACTER_WIDTH
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::svg;

    #[test]
    fn special_characters_are_escaped_and_empty_lines_keep_their_height() {
        let svg = svg("$ x", "a < b & c\n\nend");
        assert!(svg.contains("a &lt; b &amp; c"));
        assert!(svg.contains("height=\"104\""), "four lines of 18 pixels and two margins of 16");
    }

    #[test]
    fn braille_patterns_become_dots() {
        assert_eq!(svg("$", "\u{2809}").matches("<circle").count(), 2);
    }
}
