//! [`QueryParams`]: parameters of a dashboard request.

use tinkex_wire::percent_decode;

use crate::error::ServerError;
use crate::history::MetricsQuery;

/// Maximum number of points per metric in one response.
const MAX_POINTS: usize = 4_000;

/// Decoded parameters of a query string. If a parameter is repeated, its first value counts.
#[derive(Clone, Debug, Default)]
pub struct QueryParams(Vec<(String, String)>);

impl QueryParams {
    /// Parses a query string.
    #[must_use]
    pub fn parse(query: &str) -> Self {
        let decode = |text: &str| percent_decode(&text.replace('+', " ")).unwrap_or_default();
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        Self(pairs.map(|(name, value)| (decode(name), decode(value))).collect())
    }

    /// Returns the value of a parameter; `None` if it is absent or empty.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    /// Returns a numeric parameter.
    ///
    /// # Errors
    /// [`ServerError::Invalid`] if its value is not a number in range.
    pub(crate) fn number<T: std::str::FromStr>(
        &self,
        name: &str,
    ) -> Result<Option<T>, ServerError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let invalid = || ServerError::invalid(format!("{name}: expected a number"));
        text.parse().map(Some).map_err(|_| invalid())
    }

    /// Returns the parameters of a request for metrics.
    pub(crate) fn metrics(&self) -> Result<MetricsQuery, ServerError> {
        let points = self.number("points")?.unwrap_or(2_000_usize);
        Ok(MetricsQuery {
            from: self.number("from")?.unwrap_or(0),
            to: self.number("to")?.unwrap_or(u32::MAX),
            points: points.clamp(2, MAX_POINTS),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded() {
        let query = QueryParams::parse("run=a%3Atrain%3A0&search=x+y%26&empty=&points=7&n=x");
        assert_eq!(query.text("run"), Some("a:train:0"));
        assert_eq!(query.text("search"), Some("x y&"));
        assert_eq!(query.text("empty"), None);
        assert_eq!(query.metrics().unwrap().points, 7);
        assert!(query.number::<u32>("n").is_err());
        assert!(QueryParams::parse("").text("run").is_none());
    }
}
