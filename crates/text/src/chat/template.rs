//! Runs chat templates: Jinja programs that render a conversation as text.
//!
//! Templates come with models and are written for Python's Jinja as `transformers` configures it;
//! see [`super::python`] for the Python functions that they use. Templates are untrusted: they can
//! read only their context, and the steps that they run and the bytes that they write are limited.

use std::fmt;
use std::io;
use std::ops::Range;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Output, State, Value};

use crate::error::{Error, ErrorKind, Result};

use super::python;

/// Maximum number of steps of one rendering. A message takes a few hundred steps.
const FUEL: u64 = 20_000_000;
const NAME: &str = "chat_template";
/// Maximum number of bytes of all values that one rendering prints. The output of a rendering has
/// its own limit; this limit bounds the text that a template captures, as `{% set %}` blocks do.
const MAX_PRINTED: usize = 64 << 20;

/// A compiled template.
pub(crate) struct Template {
    environment: Environment<'static>,
    source: String,
    /// Strings inserted before and after generated text, if the template marks it.
    marks: Option<(String, String)>,
}

/// A rendered conversation.
#[derive(Debug, PartialEq)]
pub(crate) struct Rendered {
    pub(crate) text: String,
    /// Byte ranges of the text that the model generates, if the template marks it.
    pub(crate) generated: Vec<Range<usize>>,
}

impl Template {
    pub(crate) fn compile(source: &str) -> Result<Self> {
        Self::with_fuel(source, FUEL)
    }

    fn with_fuel(source: &str, fuel: u64) -> Result<Self> {
        let (converted, marked) = with_generation_as_filter(source);
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| malformed(&error))?);
        environment.set_fuel(Some(fuel));
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(print);
        environment.add_filter("tojson", python::tojson);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<Value, minijinja::Error> {
                let error = minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, "raised");
                Err(error.with_source(RaisedException(message)))
            },
        );
        // The marks are random, so that no message can contain them.
        let nonce = fastrand::u64(..);
        let marks = marked.then(|| (format!("\u{fdd0}{nonce:x}["), format!("]{nonce:x}\u{fdd1}")));
        if let Some((before, after)) = marks.clone() {
            environment
                .add_filter("generation", move |text: String| format!("{before}{text}{after}"));
        }
        environment.add_template_owned(NAME, converted).map_err(|error| malformed(&error))?;
        Ok(Self { environment, source: source.to_owned(), marks })
    }

    /// Returns whether the source contains a text.
    pub(crate) fn source_contains(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// Returns whether the template marks generated text.
    pub(crate) fn marks_generation(&self) -> bool {
        self.marks.is_some()
    }

    /// Renders a text of at most `limit` bytes.
    pub(crate) fn render(&self, context: Value, limit: usize) -> Result<Rendered> {
        let template = self.environment.get_template(NAME).map_err(|error| malformed(&error))?;
        let mut out = LimitedText { bytes: Vec::new(), limit };
        let rendered = template.render_captured_to(context, &mut out);
        rendered.map_err(|error| failed(&error))?;
        let text = String::from_utf8(out.bytes).map_err(|error| {
            let message = format!("the chat template wrote text that is not UTF-8: {error}");
            Error::new(ErrorKind::InvalidInput, message)
        })?;
        match &self.marks {
            None => Ok(Rendered { text, generated: Vec::new() }),
            Some((before, after)) => unmark(&text, before, after),
        }
    }
}

/// Returns the function with which templates print the date.
pub(crate) fn strftime_now(now: Option<SystemTime>) -> Value {
    Value::from_function(move |format: String| {
        python::strftime(&format, now.unwrap_or_else(SystemTime::now))
    })
}

/// Replaces `{% generation %}`, a tag that only `transformers` has, with a filter block, whose
/// white space is trimmed in the same way. Returns whether the tag was found.
fn with_generation_as_filter(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(start) = rest.find("{%") {
        let (before, tag_and_rest) = rest.split_at(start + 2);
        let Some(end) = tag_and_rest.find("%}") else { break };
        let (tag, after) = tag_and_rest.split_at(end);
        out.push_str(before);
        let name = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match name {
            "generation" | "endgeneration" => {
                found = true;
                let filter = if name == "generation" { "filter generation" } else { "endfilter" };
                out.push_str(&tag.replacen(name, filter, 1));
            }
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    (out, found)
}

/// Removes the marks from a text and returns the byte ranges that they enclosed.
fn unmark(text: &str, before: &str, after: &str) -> Result<Rendered> {
    let mut out = String::with_capacity(text.len());
    let mut generated = vec![];
    let mut rest = text;
    while let Some((plain, marked)) = rest.split_once(before) {
        let Some((inner, remaining)) = marked.split_once(after) else {
            let message = "the chat template truncates text that it marks as generated";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        };
        out.push_str(plain);
        let start = out.len();
        out.push_str(inner);
        generated.push(start..out.len());
        rest = remaining;
    }
    out.push_str(rest);
    Ok(Rendered { text: out, generated })
}

/// Text of a rendering, up to a limit.
struct LimitedText {
    bytes: Vec<u8>,
    /// Maximum number of bytes.
    limit: usize,
}

impl io::Write for LimitedText {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if text.len() > self.limit - self.bytes.len() {
            return Err(io::Error::other(TooMuchText(self.limit)));
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes of the values that a rendering has printed.
#[derive(Default)]
struct PrintedBytes(usize);

/// Prints a value as Python does, within [`MAX_PRINTED`].
fn print(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> std::result::Result<(), minijinja::Error> {
    let PrintedBytes(printed) = state.get_or_insert_extension_with(PrintedBytes::default);
    *printed = printed.saturating_add(value.as_str().map_or(0, str::len));
    if *printed > MAX_PRINTED {
        let error = minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, "too much text");
        return Err(error.with_source(TooMuchText(MAX_PRINTED)));
    }
    python::print(out, state, value)
}

/// Error of a template that writes more than this number of bytes.
#[derive(Debug)]
struct TooMuchText(usize);

impl fmt::Display for TooMuchText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the chat template writes more than {} bytes for this conversation", self.0)
    }
}

impl std::error::Error for TooMuchText {}

/// Error of `raise_exception`, with which templates reject a conversation: its message.
#[derive(Debug)]
struct RaisedException(String);

impl fmt::Display for RaisedException {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RaisedException {}

fn malformed(error: &minijinja::Error) -> Error {
    Error::new(ErrorKind::Malformed, format!("cannot parse the chat template: {error}"))
}

fn failed(error: &minijinja::Error) -> Error {
    if error.kind() == minijinja::ErrorKind::OutOfFuel {
        let message =
            format!("the chat template runs more than {FUEL} steps for this conversation");
        return Error::new(ErrorKind::InvalidInput, message);
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(RaisedException(message)) = error.downcast_ref() {
            let message = format!("the chat template rejected the conversation: {message}");
            return Error::new(ErrorKind::InvalidInput, message);
        }
        // An I/O error does not return the error that it wraps as its source.
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let limit = error.downcast_ref::<TooMuchText>();
        if let Some(limit) = limit.or_else(|| wrapped?.downcast_ref()) {
            return Error::new(ErrorKind::TooLong, limit.to_string());
        }
        cause = error.source();
    }
    let message = format!("the chat template failed on this conversation: {error}");
    Error::new(ErrorKind::InvalidInput, message)
}

#[cfg(test)]
mod tests {
    use minijinja::context;

    use super::*;

    fn render(source: &str, context: Value) -> Result<String> {
        Template::compile(source)?.render(context, 1 << 20).map(|rendered| rendered.text)
    }

    #[test]
    fn templates_are_parsed_as_transformers_configures_jinja() {
        // A line with only a tag renders nothing, and the final line break is dropped.
        let source = "{% for i in [1, 2, 3] %}\n    {% if i == 2 %}\n        {% continue %}\n    \
                      {% endif %}\n{{ i }}\n{% endfor %}\nend\n";
        assert_eq!(render(source, context!()).unwrap(), "1\n3\nend");
    }

    #[test]
    fn python_functions_of_templates_are_supported() {
        for (source, expected) in [
            ("{{ ' a '.strip() }}|{{ 'a</t>b'.split('</t>')[-1] }}", "a|b"),
            (
                "{{ {'b': 1, 'a': [True, None, 'é<']} | tojson }}",
                r#"{"b": 1, "a": [true, null, "é<"]}"#,
            ),
            (
                "{{ {'b': [], 'a': [1]} | tojson(indent=2) }}",
                "{\n  \"b\": [],\n  \"a\": [\n    1\n  ]\n}",
            ),
            ("{{ 'é' | tojson(ensure_ascii=true) }}", "\"\\u00e9\""),
            (
                "{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
                "3",
            ),
            (
                "{{ [1, 2, 3][::-1] | list }}{% set l = [1, 2, 3][1:] %}{{ l[0] }}{{ l | length }}",
                "[3, 2, 1]22",
            ),
            ("{{ {'a': 1}.get('b') is none }}{{ {'a': 1}.items() | list }}", "True[('a', 1)]"),
            (
                "{{ 'a-b-c'.rsplit('-', 1)[1] }}{{ 'ab'.removeprefix('a') }}{{ 'a=b'.partition('=')[2] }}",
                "cbb",
            ),
            ("{{ 'x' if missing is not defined else 'y' }}{{ missing }}", "x"),
            ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}", "<1>"),
            ("{{ 1e-7 }} {{ 2.0 }} {{ 3 }} {{ none }} {{ true }}", "1e-07 2.0 3 None True"),
            ("{{ 'ab'.startswith('a') and 'b' in 'ab' }}", "True"),
        ] {
            assert_eq!(render(source, context!()).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn the_message_of_raise_exception_is_reported() {
        let error =
            render("{{ raise_exception('roles must alternate') }}", context!()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().ends_with("conversation: roles must alternate"), "{error}");
        let error = render("{{ missing.field }}", context!()).unwrap_err();
        assert!(error.to_string().contains("failed on this conversation"), "{error}");
        let error = render("{% if %}", context!()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
    }

    #[test]
    fn a_tag_that_ends_where_it_starts_is_refused() {
        for source in ["{%}", "{%}{%", "a{%}b{% generation %}"] {
            assert!(Template::compile(source).is_err(), "{source}");
        }
    }

    #[test]
    fn the_number_of_steps_is_limited() {
        let source = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}\
                      {% set x = c %}{% endfor %}{% endfor %}{% endfor %}";
        let error =
            Template::with_fuel(source, 10_000).unwrap().render(context!(), 1 << 20).unwrap_err();
        assert!(error.to_string().contains("steps for this conversation"), "{error}");
    }

    #[test]
    fn the_size_of_the_text_is_limited() {
        let template = Template::compile("{{ text }}{{ text }}").unwrap();
        let render = |limit| template.render(context! { text => "four" }, limit);
        assert_eq!(render(8).unwrap().text, "fourfour");
        let error = render(7).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLong);
        assert!(error.to_string().contains("writes more than 7 bytes"), "{error}");
        let raw = "{% for a in range(9999) %}raw text{% endfor %}";
        assert!(Template::compile(raw).unwrap().render(context!(), 70_000).is_err());
    }

    #[test]
    fn the_size_of_captured_text_is_limited() {
        let source = "{% set all %}{% for a in range(9999) %}{{ text }}{% endfor %}{% endset %}";
        let text = "x".repeat(MAX_PRINTED / 9_999 + 1);
        let template = Template::compile(source).unwrap();
        let error = template.render(context! { text => text }, 1 << 20).unwrap_err();
        assert!(error.to_string().contains("writes more than"), "{error}");
    }

    #[test]
    fn generated_text_is_located_where_the_template_marks_it() {
        let source = "a\n{%- generation -%}\n  bé\n{%- endgeneration %}\nc{% generation %}d{% endgeneration %}";
        let template = Template::compile(source).unwrap();
        let rendered = template.render(context!(), 1 << 20).unwrap();
        assert_eq!(rendered.text, "abécd");
        let marked: Vec<_> = rendered.generated.iter().map(|r| &rendered.text[r.clone()]).collect();
        assert_eq!(marked, ["bé", "d"]);
        assert!(!Template::compile("{{ generation }}").unwrap().marks_generation());
    }
}
