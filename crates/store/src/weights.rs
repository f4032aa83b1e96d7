//! Locations of saved weights, and the backends that can use them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Backend that executes the requests of a run or of a sampling session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The engine of this process.
    Engine,
    /// The upstream with this name.
    Upstream(Arc<str>),
}

/// Location of saved weights.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsLocation {
    /// Name of a folder under `weights/` in the data folder.
    Local(String),
    Upstream(RemoteWeights),
}

/// Saved weights on an upstream.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RemoteWeights {
    /// Name of the upstream.
    #[serde(rename = "name")]
    pub upstream: String,
    /// Path of the checkpoint on the upstream.
    pub path: String,
}

impl WeightsLocation {
    /// Returns the name of the folder of weights in the data folder; `None` if the weights are on
    /// an upstream.
    #[must_use]
    pub fn local(&self) -> Option<&str> {
        match self {
            Self::Local(folder) => Some(folder),
            Self::Upstream(_) => None,
        }
    }

    /// Returns the name of the folder of weights in the data folder; `None` if the weights are on
    /// an upstream.
    #[must_use]
    pub fn into_local(self) -> Option<String> {
        match self {
            Self::Local(folder) => Some(folder),
            Self::Upstream(_) => None,
        }
    }

    /// Returns the weights if they are on an upstream; `None` if they are in the data folder.
    #[must_use]
    pub fn remote(&self) -> Option<&RemoteWeights> {
        match self {
            Self::Local(_) => None,
            Self::Upstream(remote) => Some(remote),
        }
    }

    /// Returns the backend that can use the weights.
    #[must_use]
    pub fn backend(&self) -> Backend {
        match self {
            Self::Local(_) => Backend::Engine,
            Self::Upstream(remote) => Backend::Upstream(remote.upstream.as_str().into()),
        }
    }
}

/// Weights to sample from: a base model, and an adapter if `location` is set.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WeightsKey {
    pub base_model: String,
    pub location: Option<WeightsLocation>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_stored_form_of_locations_does_not_change() {
        let local = WeightsLocation::Local("m-weights-a-12".to_owned());
        let upstream = "gpu".to_owned();
        let path = "tinker://m/weights/a".to_owned();
        let remote = WeightsLocation::Upstream(RemoteWeights { upstream, path });
        let stored = json!({"upstream": {"name": "gpu", "path": "tinker://m/weights/a"}});
        for (location, stored) in [(&local, json!({"local": "m-weights-a-12"})), (&remote, stored)]
        {
            assert_eq!(serde_json::to_value(location).unwrap(), stored);
            assert_eq!(serde_json::from_value::<WeightsLocation>(stored).unwrap(), *location);
        }
        assert_eq!(local.backend(), Backend::Engine);
        assert_eq!(remote.backend(), Backend::Upstream("gpu".into()));
    }
}
