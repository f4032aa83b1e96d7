//! [`Metadata`]: user-defined strings by name, in insertion order.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// User-defined strings by name.
///
/// Iteration and encoding keep the order of the decoded JSON object. Comparison ignores it.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::Metadata;
///
/// let read: Metadata = serde_json::from_str(r#"{"seed":"7","experiment":"a"}"#)?;
/// assert_eq!(read.get("seed"), Some("7"));
/// assert_eq!(serde_json::to_string(&read)?, r#"{"seed":"7","experiment":"a"}"#);
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Default, Eq)]
pub struct Metadata(Vec<(String, String)>);

impl Metadata {
    /// Creates an empty map.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the value with the given name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(key, _)| *key == name).map(|(_, text)| text)
    }

    /// Inserts a value. Replaces an existing value of that name in its position.
    pub fn insert(&mut self, name: impl Into<String>, text: impl Into<String>) {
        let name = name.into();
        let text = text.into();
        match self.0.iter_mut().find(|(key, _)| *key == name) {
            Some((_, old)) => *old = text,
            None => self.0.push((name, text)),
        }
    }

    /// Iterates over names and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> + ExactSizeIterator {
        self.0.iter().map(|(name, text)| (name.as_str(), text.as_str()))
    }

    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl PartialEq for Metadata {
    /// Compares names and values; ignores the order.
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().all(|(name, text)| other.get(name) == Some(text))
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<N: Into<String>, T: Into<String>> FromIterator<(N, T)> for Metadata {
    fn from_iter<I: IntoIterator<Item = (N, T)>>(pairs: I) -> Self {
        let mut metadata = Self::new();
        for (name, text) in pairs {
            metadata.insert(name, text);
        }
        metadata
    }
}

impl From<BTreeMap<String, String>> for Metadata {
    fn from(map: BTreeMap<String, String>) -> Self {
        // The names of a map are unique.
        Self(map.into_iter().collect())
    }
}

impl Serialize for Metadata {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;

        impl<'de> Visitor<'de> for Pairs {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with string values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                // Find duplicates by a map: a linear search would take quadratic time.
                let mut positions = BTreeMap::new();
                let mut pairs = Vec::<(String, String)>::new();
                while let Some((name, text)) = map.next_entry::<String, String>()? {
                    match positions.get(&name) {
                        Some(position) => {
                            let (_, old): &mut (String, String) = &mut pairs[*position];
                            *old = text;
                        }
                        None => {
                            positions.insert(name.clone(), pairs.len());
                            pairs.push((name, text));
                        }
                    }
                }
                Ok(Metadata(pairs))
            }
        }

        deserializer.deserialize_map(Pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_preserved_and_the_last_duplicate_wins() {
        let text = r#"{"z":"1","a":"2","z":"3"}"#;
        let read: Metadata = serde_json::from_str(text).unwrap();
        assert_eq!(read.iter().collect::<Vec<_>>(), [("z", "3"), ("a", "2")]);
        let other: Metadata = [("a", "2"), ("z", "3")].into_iter().collect();
        assert_eq!(read, other, "comparison ignores the order");
        assert!(serde_json::from_str::<Metadata>(r#"{"a":1}"#).is_err());
    }
}
