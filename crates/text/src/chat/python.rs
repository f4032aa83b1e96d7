//! Python behaviour that chat templates rely on: string methods, `json.dumps`, `strftime`, floats.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat;
use tinkex_wire::Timestamp;

/// Calls a method of a Python value.
pub(crate) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match pycompat::unknown_method_callback(state, value, name, arguments) {
        Err(error) if error.kind() == ErrorKind::UnknownMethod => match value.as_str() {
            Some(text) => text_method(text, name, arguments),
            None => Err(error),
        },
        other => other,
    }
}

/// Calls a string method that `pycompat` does not have.
fn text_method(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    fn argument(arguments: &[Value]) -> Result<&str, Error> {
        from_args::<(&str,)>(arguments).map(|(argument,)| argument)
    }
    let list = |parts: &[&str]| parts.iter().map(|part| Value::from(*part)).collect::<Value>();
    Ok(match name {
        "removeprefix" => text.strip_prefix(argument(arguments)?).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(argument(arguments)?).unwrap_or(text).into(),
        "partition" => match text.split_once(argument(arguments)?) {
            Some((before, after)) => list(&[before, argument(arguments)?, after]),
            None => list(&[text, "", ""]),
        },
        "rpartition" => match text.rsplit_once(argument(arguments)?) {
            Some((before, after)) => list(&[before, argument(arguments)?, after]),
            None => list(&["", "", text]),
        },
        "rsplit" => {
            let (separator, splits): (&str, Option<usize>) = from_args(arguments)?;
            let count = splits.map_or(usize::MAX, |splits| splits.saturating_add(1));
            let mut parts: Vec<_> = text.rsplitn(count, separator).collect();
            parts.reverse();
            list(&parts)
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

/// Prints a value: floats as Python does, everything else as minijinja does.
pub(crate) fn print(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        let number = f64::try_from(value.clone())?;
        // Python prints `nan` and `inf`; only JSON has `NaN` and `Infinity`.
        let finite = number.is_finite();
        let text = if finite { float(number) } else { number.to_string().to_lowercase() };
        return Ok(out.write_str(&text)?);
    }
    minijinja::escape_formatter(out, state, value)
}

/// Serializes a value as Python's `json.dumps` does: without HTML escapes, and with a space after
/// every comma and colon.
#[expect(clippy::needless_pass_by_value, reason = "the signature of a filter")]
pub(crate) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let between = if indent.is_some() { "," } else { ", " };
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.as_str(), key.as_str()),
        _ => (between, ": "),
    };
    let ascii = ascii.unwrap_or(false);
    let sorted = sorted.unwrap_or(false);
    let mut json = JsonWriter { out: String::new(), indent, ascii, sorted, item, key };
    json.value(value, 0)?;
    Ok(json.out)
}

struct JsonWriter<'a> {
    out: String,
    indent: Option<usize>,
    ascii: bool,
    sorted: bool,
    item: &'a str,
    key: &'a str,
}

impl JsonWriter<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => self.out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', &items, depth, |json, item, depth| json.value(item, depth))?;
            }
            ValueKind::Map => {
                let mut names: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    names.sort();
                }
                self.list('{', '}', &names, depth, |json, name, depth| {
                    json.text(&name.to_string());
                    json.out.push_str(json.key);
                    json.value(&value.get_item(name)?, depth)
                })?;
            }
            other => {
                let message = format!("cannot serialize a value of type {other} as JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(self.item);
            }
            self.new_line(depth + 1);
            write(self, item, depth + 1)?;
        }
        if !items.is_empty() {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    /// Begins a new line, if indentation is on.
    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth).min(1 << 10)));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && (c > '~')) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Formats a float as Python's `json.dumps` does: `1.0`, `1e-05`, `1e+16`, `NaN`, `Infinity`.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, power)) => {
            let (sign, power) = match power.strip_prefix('-') {
                Some(power) => ('-', power),
                None => ('+', power),
            };
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            format!("{digits}e{sign}{power:0>2}")
        }
    }
}

/// Formats a time in UTC with the `strftime` directives that templates use.
pub(crate) fn strftime(format: &str, moment: SystemTime) -> Result<String, Error> {
    const DAYS: [&str; 7] =
        ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let seconds = moment.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let days = seconds / 86_400;
    let second = seconds % 86_400;
    let (year, month, day) = Timestamp::from(moment).date();
    let hour = second / 3600;
    let minute = second / 60 % 60;
    let second = second % 60;
    let nth = |names: &[&'static str], n: u64| usize::try_from(n).map_or("", |n| names[n]);
    let weekday = nth(&DAYS, days % 7);
    let month_name = nth(&MONTHS, u64::from(month) - 1);
    let short = |name: &'static str| &name[..3];
    let hour12 = if hour.is_multiple_of(12) { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(c) = letters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let piece = match letters.next() {
            Some('Y') => format!("{year:04}"),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('e') => format!("{day:2}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => short(month_name).to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => short(weekday).to_owned(),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{hour12:02}"),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{year:04}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".to_owned(),
            other => {
                let letter = other.map_or(String::new(), String::from);
                let message = format!("strftime_now does not support %{letter}");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        out.push_str(&piece);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(format, UNIX_EPOCH + Duration::from_secs(seconds)).unwrap()
    }

    #[test]
    fn dates_follow_the_gregorian_calendar() {
        // Expected values from `date -u -d @SECONDS`.
        assert_eq!(at(0, "%A %d %B %Y"), "Thursday 01 January 1970");
        assert_eq!(at(951_782_400, "%d %b %Y"), "29 Feb 2000");
        assert_eq!(at(1_735_689_599, "%F %T %a"), "2024-12-31 23:59:59 Tue");
        assert_eq!(at(1_735_689_600, "%Y-%m-%d %I:%M %p"), "2025-01-01 12:00 AM");
        assert_eq!(at(4_107_542_400, "%d %b %y %% %e"), "01 Mar 00 %  1");
        assert!(strftime("%Q", UNIX_EPOCH).is_err());
        assert!(strftime("%", UNIX_EPOCH).is_err());
    }

    #[test]
    fn floats_are_printed_as_in_python() {
        for (number, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1.5e-7, "1.5e-07"),
            (0.0001, "0.0001"),
            (1e-5, "1e-05"),
            (-2.5e100, "-2.5e+100"),
            (123_456_789_012_345.0, "123456789012345.0"),
        ] {
            assert_eq!(float(number), text);
        }
    }
}
