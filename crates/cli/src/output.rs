//! Encodes results as JSON documents and hyperlinks, and prints help text.

use std::io::Write as _;

use serde::Serialize;

use crate::environment::Environment;
use crate::error::{CommandError, Exit};
use crate::format::escape_controls_in_json;

/// Returns a URL, with OSC 8 escapes if `clickable`.
pub(crate) fn hyperlink(url: &str, clickable: bool) -> String {
    if clickable {
        format!("\u{1b}]8;;{url}\u{1b}\\{url}\u{1b}]8;;\u{1b}\\")
    } else {
        url.to_owned()
    }
}

/// Returns an indented JSON document with a final newline.
pub(crate) fn to_json(value: &impl Serialize) -> Result<String, CommandError> {
    let text = serde_json::to_string_pretty(value);
    text.map(|text| escape_controls_in_json(&text) + "\n").map_err(not_encodable)
}

/// Returns a JSON document on one line, with a final newline.
pub(crate) fn to_json_line(value: &impl Serialize) -> Result<String, CommandError> {
    let text = serde_json::to_string(value);
    text.map(|text| escape_controls_in_json(&text) + "\n").map_err(not_encodable)
}

#[expect(clippy::needless_pass_by_value, reason = "the argument of `map_err`")]
fn not_encodable(error: serde_json::Error) -> CommandError {
    CommandError::new(Exit::Failed, format!("cannot encode the result as JSON: {error}"))
}

/// Prints help text on standard output.
pub(crate) fn print_help(environment: &mut Environment, text: &str) -> Exit {
    match environment.out.write_all(text.as_bytes()).map_err(CommandError::from) {
        Ok(()) => Exit::Success,
        Err(error) => error.exit(),
    }
}
