//! `tinker://` paths of checkpoints.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::InvalidInput;
use crate::codec::json::positioned;
use crate::ids::ModelId;

const SCHEME: &str = "tinker://";

/// Path of a checkpoint: `tinker://<run>/<kind>/<name>`.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::{CheckpointKind, TinkerPath};
///
/// let path: TinkerPath = "tinker://s:train:0/weights/step-100".parse()?;
/// assert_eq!(path.kind(), CheckpointKind::Training);
/// assert_eq!(path.checkpoint_id(), "weights/step-100");
/// assert_eq!(path.to_string(), "tinker://s:train:0/weights/step-100");
/// assert_eq!(TinkerPath::try_from("tinker://s:train:0/weights/step-100")?, path);
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TinkerPath {
    run: ModelId,
    kind: CheckpointKind,
    name: String,
}

/// Purpose of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum CheckpointKind {
    /// Weights and optimizer state, for further training.
    Training,
    /// Weights for sampling.
    Sampler,
    /// Weights as files for download.
    External,
}

impl CheckpointKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Training, Self::Sampler, Self::External];

    /// Returns the path segment of the kind, for example `sampler_weights`.
    #[must_use]
    pub const fn segment(self) -> &'static str {
        match self {
            Self::Training => "weights",
            Self::Sampler => "sampler_weights",
            Self::External => "external_weights",
        }
    }

    /// Returns the name of the kind in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::Sampler => "sampler",
            Self::External => "external",
        }
    }

    /// Returns the kind with the given path segment.
    #[must_use]
    pub fn from_segment(segment: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.segment() == segment)
    }
}

impl fmt::Display for CheckpointKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl TinkerPath {
    /// Creates a path.
    ///
    /// # Errors
    /// Returns an error if `run` or `name` is empty or contains a `/`.
    pub fn new(
        run: impl Into<ModelId>,
        kind: CheckpointKind,
        name: impl Into<String>,
    ) -> Result<Self, InvalidInput> {
        let run = run.into();
        let name = name.into();
        for (part, text) in [("run id", run.as_str()), ("checkpoint name", &name)] {
            if text.is_empty() || text.contains('/') {
                let reason = format!("the {part} {text:?} must not be empty or contain `/`");
                return Err(InvalidInput::new("tinker_path", reason));
            }
        }
        Ok(Self { run, kind, name })
    }

    /// Returns the id of the training run.
    #[must_use]
    pub fn run(&self) -> &ModelId {
        &self.run
    }

    /// Returns the purpose of the checkpoint.
    #[must_use]
    pub fn kind(&self) -> CheckpointKind {
        self.kind
    }

    /// Returns the name of the checkpoint.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns kind and name, for example `weights/step-100`.
    #[must_use]
    pub fn checkpoint_id(&self) -> String {
        format!("{}/{}", self.kind.segment(), self.name)
    }
}

impl fmt::Display for TinkerPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}/{}", self.run, self.kind.segment(), self.name)
    }
}

impl FromStr for TinkerPath {
    type Err = InvalidInput;

    fn from_str(text: &str) -> Result<Self, InvalidInput> {
        let invalid = |problem: &str| {
            let form = "expected tinker://<run>/<weights|sampler_weights|external_weights>/<name>";
            InvalidInput::new("tinker_path", format!("{text:?} {problem}; {form}"))
        };
        let rest =
            text.strip_prefix(SCHEME).ok_or_else(|| invalid("does not start with tinker://"))?;
        let parts: Vec<&str> = rest.split('/').collect();
        let [run, segment, name] = parts[..] else {
            return Err(invalid("does not have three parts"));
        };
        let kind = CheckpointKind::from_segment(segment)
            .ok_or_else(|| invalid("has an unknown checkpoint kind"))?;
        Self::new(run, kind, name)
    }
}

impl TryFrom<&str> for TinkerPath {
    type Error = InvalidInput;

    fn try_from(text: &str) -> Result<Self, InvalidInput> {
        text.parse()
    }
}

impl TryFrom<String> for TinkerPath {
    type Error = InvalidInput;

    fn try_from(text: String) -> Result<Self, InvalidInput> {
        text.parse()
    }
}

impl TryFrom<&String> for TinkerPath {
    type Error = InvalidInput;

    fn try_from(text: &String) -> Result<Self, InvalidInput> {
        text.parse()
    }
}

impl From<&Self> for TinkerPath {
    fn from(path: &Self) -> Self {
        path.clone()
    }
}

impl Serialize for TinkerPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TinkerPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        positioned::string(deserializer, "a tinker:// path", |text| {
            text.parse().map_err(|error: InvalidInput| error.to_string())
        })
    }
}
