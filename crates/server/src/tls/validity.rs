//! [`Validity`]: the time for which a certificate is valid.
//!
//! rustls verifies certificates of servers but does not show their contents, so this module finds
//! the two times in the DER encoding (RFC 5280).

use tinkex_wire::Timestamp;

const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;

/// The time for which a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Validity {
    pub(super) not_before: Timestamp,
    pub(super) not_after: Timestamp,
}

impl Validity {
    /// Returns the validity of a certificate in DER encoding; `None` if it cannot be read.
    pub(super) fn of(certificate: &[u8]) -> Option<Self> {
        let certificate = DerReader(certificate).next(SEQUENCE)?;
        let mut fields = DerReader(DerReader(certificate).next(SEQUENCE)?);
        if fields.0.first() == Some(&VERSION) {
            fields.next(VERSION)?;
        }
        fields.next(INTEGER)?;
        let _signature_algorithm = fields.next(SEQUENCE)?;
        let _issuer = fields.next(SEQUENCE)?;
        let mut times = DerReader(fields.next(SEQUENCE)?);
        Some(Self { not_before: times.time()?, not_after: times.time()? })
    }
}

/// The values that follow each other in a DER encoding.
struct DerReader<'a>(&'a [u8]);

impl<'a> DerReader<'a> {
    /// Reads a value with this tag, and returns its contents.
    fn next(&mut self, tag: u8) -> Option<&'a [u8]> {
        let (found, rest) = self.0.split_first()?;
        let (first, rest) = rest.split_first()?;
        // Long form: the first byte has the number of length bytes.
        let (length, rest) = match first {
            0..=0x7f => (usize::from(*first), rest),
            0x81..=0x84 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                let length = bytes.iter().fold(0_usize, |all, byte| all << 8 | usize::from(*byte));
                (length, rest)
            }
            _ => return None,
        };
        let (contents, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        (*found == tag).then_some(contents)
    }

    /// Reads a time: `YYMMDDHHMMSSZ`, whose year is from 1950 to 2049, or `YYYYMMDDHHMMSSZ`.
    fn time(&mut self) -> Option<Timestamp> {
        let tag = *self.0.first()?;
        let text = std::str::from_utf8(self.next(tag)?).ok()?.strip_suffix('Z')?;
        let digits = match tag {
            UTC_TIME if text.len() == 12 => {
                let century = if text < "50" { "20" } else { "19" };
                format!("{century}{text}")
            }
            GENERALIZED_TIME if text.len() == 14 => text.to_owned(),
            _ => return None,
        };
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let part = |range: std::ops::Range<usize>| &digits[range];
        let date = format!("{}-{}-{}", part(0..4), part(4..6), part(6..8));
        let time = format!("{}:{}:{}", part(8..10), part(10..12), part(12..14));
        format!("{date}T{time}Z").parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(not_before: (i32, u8, u8), not_after: (i32, u8, u8)) -> Vec<u8> {
        let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let date = |(year, month, day)| rcgen::date_time_ymd(year, month, day);
        params.not_before = date(not_before);
        params.not_after = date(not_after);
        params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn the_times_of_a_certificate_are_read() {
        for (not_before, not_after, texts) in [
            ((1999, 12, 31), (2049, 1, 2), ["1999-12-31T00:00:00Z", "2049-01-02T00:00:00Z"]),
            ((2026, 11, 18), (2150, 1, 2), ["2026-11-18T00:00:00Z", "2150-01-02T00:00:00Z"]),
        ] {
            let validity = Validity::of(&certificate(not_before, not_after)).unwrap();
            assert_eq!([validity.not_before, validity.not_after].map(|t| t.to_string()), texts);
        }
    }

    #[test]
    fn a_damaged_certificate_has_no_times() {
        let whole = certificate((2020, 1, 1), (2030, 1, 1));
        for length in 0..whole.len() {
            assert_eq!(Validity::of(&whole[..length]), None, "{length}");
        }
        let mut damaged = whole;
        for at in 0..damaged.len() {
            damaged[at] ^= 0xff;
            // Must not panic.
            let _ = Validity::of(&damaged);
            damaged[at] ^= 0xff;
        }
    }
}
