//! Operations on models, in the form in which a backend executes them.

use tinkex_store::record::FailureCategory;
use tinkex_wire::{CheckpointKind, Metadata, SamplerId, TinkerPath};

/// An operation on a model. `T` is the backend's type of a training request, and `W` the backend's
/// type of a weights location.
pub enum ModelOperation<T, W> {
    /// Creates the model.
    Create,
    /// Runs training data through the model, or applies the accumulated gradients.
    Train(T),
    /// Saves a checkpoint.
    Save(Box<CheckpointSave>),
    /// Saves weights for a new sampling session that has no checkpoint path.
    SaveForSampler(SamplerId),
    /// Loads a checkpoint into the model.
    Load(CheckpointLoad<W>),
    /// Fails with this message when the sequence number of the request is due. Used for stored
    /// requests that cannot be decoded or validated after a restart.
    Fail(FailureCategory, String),
}

/// A model operation that has the same form for all backends.
pub enum CommonOperation {
    Create,
    Save(Box<CheckpointSave>),
    SaveForSampler(SamplerId),
    Fail(FailureCategory, String),
}

impl<T, W> From<CommonOperation> for ModelOperation<T, W> {
    fn from(operation: CommonOperation) -> Self {
        match operation {
            CommonOperation::Create => Self::Create,
            CommonOperation::Save(save) => Self::Save(save),
            CommonOperation::SaveForSampler(sampler) => Self::SaveForSampler(sampler),
            CommonOperation::Fail(category, message) => Self::Fail(category, message),
        }
    }
}

/// A backend's type of a training request.
pub trait TrainingOperation {
    /// Returns the name for log events: `forward`, `forward_backward`, `optim_step` or
    /// `discard_gradient`.
    fn name(&self) -> &'static str;

    /// Returns the memory that the operation holds or will allocate beyond the request body, in
    /// bytes.
    fn extra_bytes(&self) -> usize;
}

/// A checkpoint to load.
pub struct CheckpointLoad<W> {
    pub weights: W,
    /// Path of the checkpoint, for the response.
    pub path: TinkerPath,
    /// Whether the optimizer state is loaded too.
    pub optimizer: bool,
    /// Whether the load creates the model.
    pub creates: bool,
}

impl<T: TrainingOperation, W> ModelOperation<T, W> {
    /// Returns the operation's name for log events.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fail(..) => "request",
            Self::Create => "create_model",
            Self::Train(training) => training.name(),
            Self::Save(_) => "save",
            Self::SaveForSampler(_) => "save_for_sampler",
            Self::Load(_) => "load",
        }
    }

    /// Returns the memory that the operation holds or will allocate beyond the request body, in
    /// bytes.
    pub fn extra_bytes(&self) -> usize {
        match self {
            Self::Train(training) => training.extra_bytes(),
            Self::Create
            | Self::Save(_)
            | Self::SaveForSampler(_)
            | Self::Load(_)
            | Self::Fail(..) => 0,
        }
    }
}

/// A checkpoint to save.
#[derive(Clone)]
pub struct CheckpointSave {
    pub path: TinkerPath,
    pub overwrite: bool,
    pub ttl_seconds: Option<u64>,
    pub user_metadata: Option<Metadata>,
}

impl CheckpointSave {
    /// Returns the message for a save whose name is taken.
    #[must_use]
    pub fn name_taken(&self) -> String {
        let advice = match self.path.kind() {
            CheckpointKind::Training => "set overwrite, choose another name, or delete it first",
            _ => "choose another name, or delete it first",
        };
        format!("checkpoint {} already exists; {advice}", self.path)
    }
}
