//! Documents of the `models` endpoint, which lists the models that requests can name.

use serde::Serialize;

/// A model that requests can name.
#[derive(Clone, Debug)]
pub struct ModelDescription {
    /// Name of the model in requests.
    pub name: String,
    /// Time at which its weights were saved, in seconds since the Unix epoch.
    pub created: i64,
    /// Base model of its weights.
    pub base_model: String,
    /// Context length in tokens, if it is known.
    pub context: Option<usize>,
}

/// Response of `models`.
#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
}

/// Response of `models/{name}`. `max_model_len` is an extension that vLLM has too.
#[derive(Debug, Serialize)]
pub struct ModelObject {
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

impl FromIterator<ModelDescription> for ModelList {
    fn from_iter<I: IntoIterator<Item = ModelDescription>>(models: I) -> Self {
        let data = models.into_iter().map(ModelObject::from).collect();
        Self { object: "list", data }
    }
}

impl From<ModelDescription> for ModelObject {
    fn from(model: ModelDescription) -> Self {
        Self {
            id: model.name,
            object: "model",
            created: model.created,
            owned_by: "local",
            root: model.base_model,
            max_model_len: model.context,
        }
    }
}
