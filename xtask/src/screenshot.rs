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
        .variable("TINKEX_DATA_DIR", &data.to_string_lossy())
        .variable("COLUMNS", "100")
        .output()?;
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
    #[expect(clippy::cast_precision_loss, reason = "a terminal has few rows and columns")]
    let (width, height) = (
        columns as f64 * CHARACTER_WIDTH + 2.0 * MARGIN,
        lines.len() as f64 * LINE_HEIGHT + 2.0 * MARGIN,
    );
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
        if !line.is_empty() {
            // A fixed length keeps the columns aligned when a fallback font draws some characters.
            #[expect(clippy::cast_precision_loss, reason = "a line has few characters")]
            let length = line.chars().count() as f64 * CHARACTER_WIDTH;
            svg.push_str(&format!(
                "<text x=\"{MARGIN}\" y=\"{y}\" textLength=\"{length}\"{color}>{}</text>\n",
                escape(line)
            ));
        }
        y += LINE_HEIGHT;
    }
    svg.push_str("</g>\n</svg>\n");
    svg
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
}
