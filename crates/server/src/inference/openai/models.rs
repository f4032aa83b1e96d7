//! `models`: the names that requests can use.

use serde::Serialize;

use crate::inference::{InferenceError, NamedModel};
use crate::state::ServerState;

#[derive(Serialize)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
}

/// A model. `max_model_len` is an extension that vLLM has too.
#[derive(Serialize)]
pub(crate) struct ModelObject {
    id: String,
    object: &'static str,
    /// Seconds since the Unix epoch.
    created: i64,
    owned_by: &'static str,
    /// Base model of the weights.
    root: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<usize>,
}

/// Lists base models, aliases and checkpoints.
pub(crate) fn list_models(state: &ServerState) -> ModelList {
    let data = NamedModel::list(state).into_iter().map(ModelObject::new).collect();
    ModelList { object: "list", data }
}

/// Describes one model; accepts every name that a request may have.
pub(crate) fn model(state: &ServerState, name: &str) -> Result<ModelObject, InferenceError> {
    Ok(ModelObject::new(NamedModel::resolve(state, name)?))
}

impl ModelObject {
    fn new(model: NamedModel) -> Self {
        Self {
            id: model.name,
            object: "model",
            created: model.created_at.div_euclid(1_000_000),
            owned_by: "local",
            root: model.base.name.clone(),
            max_model_len: model.base.known_context(),
        }
    }
}
