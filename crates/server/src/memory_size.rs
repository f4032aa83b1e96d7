//! [`MemorySize`]: sizes on the command line, such as `4GiB`.

use std::fmt;
use std::str::FromStr;

/// Amount of memory or disk space in bytes, parsed from a number with a unit.
///
/// Units are `B`, the decimal units `KB`, `MB`, `GB` and `TB`, and the binary units `KiB`, `MiB`,
/// `GiB` and `TiB`, in upper or lower case. The number may have a fraction.
///
/// ```
/// use tinkex_server::MemorySize;
///
/// assert_eq!("4GiB".parse::<MemorySize>()?.bytes(), 4 << 30);
/// assert_eq!("512 MB".parse::<MemorySize>()?.bytes(), 512_000_000);
/// assert_eq!(MemorySize::new(3 << 29).to_string(), "1.5 GiB");
/// # Ok::<_, String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemorySize(usize);

/// Smallest accepted size: 1 MiB. A smaller size is probably a typing error, and no model works
/// with it.
const MIN_BYTES: usize = 1 << 20;

const UNITS: [(&str, u64); 9] = [
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];

impl MemorySize {
    /// Creates a size of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self(bytes)
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.0
    }

    /// Parses a size such as `512MB`, without the minimum of 1 MiB that [`FromStr`] requires.
    ///
    /// # Errors
    /// Returns a description of the expected format.
    pub fn parse_without_minimum(text: &str) -> Result<Self, String> {
        let expected = || "expected a size with a unit, such as 4GiB or 512MB".to_owned();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(expected)?;
        let (number, unit) = text.split_at(end);
        let number: f64 = number.parse().map_err(|_| expected())?;
        let unit = unit.trim().to_ascii_lowercase();
        let (_, scale) = UNITS.into_iter().find(|(name, _)| *name == unit).ok_or_else(expected)?;
        #[expect(clippy::cast_precision_loss, reason = "units are exact as floats")]
        let bytes = number * scale as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the number has no sign, and a number that is too large becomes the maximum"
        )]
        match bytes as usize {
            usize::MAX => Err("the size is too large".to_owned()),
            bytes => Ok(Self(bytes)),
        }
    }
}

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match Self::parse_without_minimum(text)? {
            Self(bytes) if bytes < MIN_BYTES => Err("expected at least 1MiB".to_owned()),
            size => Ok(size),
        }
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, scale) = match self.0 {
            bytes if bytes >= 1 << 30 => ("GiB", 1 << 30),
            bytes if bytes >= 1 << 20 => ("MiB", 1 << 20),
            bytes => return write!(f, "{bytes} B"),
        };
        #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
        let tenths = (self.0 as f64 / f64::from(scale) * 10.0).round();
        write!(f, "{} {unit}", tenths / 10.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("1048576B", 1 << 20),
            ("2mib", 2 << 20),
            ("1.5GiB", 3 << 29),
            ("2 GB", 2_000_000_000),
            ("1TiB", 1 << 40),
            ("2048KiB", 2 << 20),
        ] {
            assert_eq!(text.parse(), Ok(MemorySize(bytes)), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_name_what_is_expected() {
        let error = |text: &str| text.parse::<MemorySize>().unwrap_err();
        for text in ["", "4", "GiB", "4G", "4GiBs", "-1GiB", "1.2.3GiB", ".GiB", "1e3GiB", "inf"] {
            assert_eq!(error(text), "expected a size with a unit, such as 4GiB or 512MB", "{text}");
        }
        for text in ["0GiB", "1000KB"] {
            assert_eq!(error(text), "expected at least 1MiB", "{text}");
        }
        assert_eq!(MemorySize::parse_without_minimum("1000KB"), Ok(MemorySize(1_000_000)));
        for text in ["99999999999TiB", &format!("{}GiB", "9".repeat(400))] {
            assert_eq!(error(text), "the size is too large", "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_one_decimal() {
        for (bytes, text) in
            [(900, "900 B"), (1 << 20, "1 MiB"), (512 << 20, "512 MiB"), (4 << 30, "4 GiB")]
        {
            assert_eq!(MemorySize(bytes).to_string(), text);
        }
    }
}
