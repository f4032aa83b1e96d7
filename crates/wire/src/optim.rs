//! Optimizers and their hyperparameters.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::codec::json::positioned;
use crate::error::finite;
use crate::future::SubmitResponse;
use crate::ids::{ModelId, Seq};
use crate::request::{json_output, json_request};
use crate::setters::setters;
use crate::training::Metrics;
use crate::{InvalidInput, JsonObject};

const ADAMW: &str = "adamw";
const DIMUON: &str = "dimuon";

/// Optimizer of a model, fixed when the model is created.
///
/// Optimizers and settings that this crate does not know are preserved unchanged.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::OptimizerConfig;
///
/// let json = serde_json::to_string(&OptimizerConfig::dimuon())?;
/// assert_eq!(json, r#"{"type":"dimuon","version":1}"#);
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct OptimizerConfig {
    /// Name of the optimizer. Encoded as `type`.
    #[serde(rename = "type", default = "adamw")]
    pub kind: String,
    /// Settings of the optimizer. A setting named `type` is not encoded.
    #[serde(flatten)]
    pub settings: JsonObject,
}

fn adamw() -> String {
    ADAMW.to_owned()
}

impl Serialize for OptimizerConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let kind = Value::from(&*self.kind);
        let settings = self.settings.iter().filter(|(name, _)| *name != "type");
        let named = settings.map(|(name, value)| (name.as_str(), value));
        serializer.collect_map([("type", &kind)].into_iter().chain(named))
    }
}

impl OptimizerConfig {
    /// Creates the configuration of an optimizer that this version does not know.
    #[must_use]
    pub fn new(kind: impl Into<String>, settings: JsonObject) -> Self {
        Self { kind: kind.into(), settings }
    }

    /// Returns the default optimizer: Adam with decoupled weight decay (AdamW).
    #[must_use]
    pub fn adamw() -> Self {
        Self { kind: adamw(), settings: JsonObject::new() }
    }

    /// Returns the Dimuon optimizer, version 1.
    #[must_use]
    pub fn dimuon() -> Self {
        let settings = [("version".to_owned(), Value::from(1))].into_iter().collect();
        Self { kind: DIMUON.to_owned(), settings }
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::adamw()
    }
}

/// Hyperparameters of one optimizer step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum OptimParams {
    /// AdamW.
    Adam(AdamParams),
    /// Dimuon.
    Dimuon(DimuonParams),
    /// An optimizer that this crate does not know.
    Other(OptimizerConfig),
}

/// Hyperparameters of an AdamW step.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::AdamParams;
///
/// let adam = AdamParams::with_learning_rate(2e-4).grad_clip_norm(1.0);
/// assert_eq!((adam.beta2, adam.eps), (0.95, 1e-12));
/// ```
// Reject unknown fields, unlike elsewhere: ignoring a hyperparameter would train another model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct AdamParams {
    /// Learning rate, at least 0. Defaults to 1e-4.
    pub learning_rate: f64,
    /// Decay rate of the first moment, at least 0 and less than 1. Defaults to 0.9.
    pub beta1: f64,
    /// Decay rate of the second moment, at least 0 and less than 1. Defaults to 0.95.
    pub beta2: f64,
    /// Term added to the denominator, at least 0. Defaults to 1e-12.
    pub eps: f64,
    /// Decoupled weight decay, at least 0. Defaults to 0.
    pub weight_decay: f64,
    /// Maximum norm of the gradient; 0, the default, or less disables clipping.
    pub grad_clip_norm: f64,
}

impl AdamParams {
    /// Returns the defaults with the given learning rate.
    #[must_use]
    pub fn with_learning_rate(learning_rate: f64) -> Self {
        Self { learning_rate, ..Self::default() }
    }

    fn validate(&self) -> Result<(), InvalidInput> {
        at_least_zero("learning_rate", self.learning_rate)?;
        decay_rate("beta1", self.beta1)?;
        decay_rate("beta2", self.beta2)?;
        at_least_zero("eps", self.eps)?;
        at_least_zero("weight_decay", self.weight_decay)?;
        finite("grad_clip_norm", self.grad_clip_norm)
    }
}

impl Default for AdamParams {
    fn default() -> Self {
        Self {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-12,
            weight_decay: 0.0,
            grad_clip_norm: 0.0,
        }
    }
}

setters!(AdamParams {
    learning_rate: f64;
    beta1: f64;
    beta2: f64;
    eps: f64;
    weight_decay: f64;
    grad_clip_norm: f64;
});

/// Hyperparameters of a Dimuon step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename = "dimuon")]
#[non_exhaustive]
pub struct DimuonParams {
    /// Learning rate, at least 0.
    pub learning_rate: f64,
    /// Maximum norm of the gradient; 0, the default, or less disables clipping.
    pub grad_clip_norm: f64,
    /// Momentum, at least 0 and less than 1. Defaults to 0.9.
    pub beta1: f64,
}

impl<'de> Deserialize<'de> for DimuonParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct DimuonFields {
            #[serde(default, rename = "type")]
            kind: Option<String>,
            learning_rate: f64,
            #[serde(default)]
            grad_clip_norm: f64,
            #[serde(default = "DimuonParams::default_beta1")]
            beta1: f64,
        }

        positioned::object(deserializer, |form: DimuonFields| {
            let DimuonFields { kind, learning_rate, grad_clip_norm, beta1 } = form;
            match kind.as_deref() {
                None | Some(DIMUON) => Ok(Self { learning_rate, grad_clip_norm, beta1 }),
                Some(other) => Err(format!("unknown variant `{other}`, expected `{DIMUON}`")),
            }
        })
    }
}

impl DimuonParams {
    /// Returns the defaults with the given learning rate.
    #[must_use]
    pub fn with_learning_rate(learning_rate: f64) -> Self {
        Self { learning_rate, grad_clip_norm: 0.0, beta1: Self::default_beta1() }
    }

    fn default_beta1() -> f64 {
        0.9
    }

    fn validate(&self) -> Result<(), InvalidInput> {
        at_least_zero("learning_rate", self.learning_rate)?;
        decay_rate("beta1", self.beta1)?;
        finite("grad_clip_norm", self.grad_clip_norm)
    }
}

setters!(DimuonParams {
    learning_rate: f64;
    grad_clip_norm: f64;
    beta1: f64;
});

impl From<AdamParams> for OptimParams {
    fn from(params: AdamParams) -> Self {
        Self::Adam(params)
    }
}

impl From<DimuonParams> for OptimParams {
    fn from(params: DimuonParams) -> Self {
        Self::Dimuon(params)
    }
}

impl OptimParams {
    /// Checks that all hyperparameters are finite and within their ranges. A client checks this
    /// before it sends the pass whose gradient the step applies, and a server before it admits the
    /// step.
    ///
    /// # Errors
    /// Returns an error that names the first invalid hyperparameter.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        match self {
            Self::Adam(params) => params.validate(),
            Self::Dimuon(params) => params.validate(),
            Self::Other(_) => Ok(()),
        }
    }

    fn from_fields(mut fields: JsonObject) -> Result<Self, serde_json::Error> {
        let kind = match fields.remove("type") {
            None => ADAMW.to_owned(),
            Some(kind) => serde_json::from_value(kind)?,
        };
        Ok(match &*kind {
            ADAMW | "adam" => Self::Adam(serde_json::from_value(Value::Object(fields))?),
            DIMUON => Self::Dimuon(serde_json::from_value(Value::Object(fields))?),
            _ => Self::Other(OptimizerConfig { kind, settings: fields }),
        })
    }
}

/// Checks that a hyperparameter is at least 0. Optimizers compute with `f32`, in which a value above
/// its maximum would be infinite.
fn at_least_zero(field: &str, value: f64) -> Result<(), InvalidInput> {
    if (0.0..=f64::from(f32::MAX)).contains(&value) {
        return Ok(());
    }
    Err(InvalidInput::new(field, format!("must be from 0 to 3.4e38, got {value}")))
}

/// Checks that a decay rate is at least 0 and less than 1.
fn decay_rate(field: &str, value: f64) -> Result<(), InvalidInput> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(InvalidInput::new(field, format!("must be at least 0 and less than 1, got {value}")))
}

/// Updates the weights of a model with the gradient accumulated since the last step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct OptimStep {
    /// Id of the model.
    pub model_id: ModelId,
    /// Sequence number among the requests of the model. The server executes them in this order.
    pub seq_id: Option<Seq>,
    /// Hyperparameters of the step.
    pub params: OptimParams,
}

/// Result of [`OptimStep`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OptimStepOutput {
    /// Metrics of the step.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::training::some_metrics"
    )]
    pub metrics: Option<Metrics>,
}

impl OptimStepOutput {
    /// Creates a result with the given metrics.
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        Self { metrics: Some(metrics) }
    }
}

impl OptimStep {
    /// Creates a step without a sequence number.
    pub fn new(model_id: impl Into<ModelId>, params: impl Into<OptimParams>) -> Self {
        Self { model_id: model_id.into(), seq_id: None, params: params.into() }
    }

    fn validate_params(&self) -> Result<(), InvalidInput> {
        self.params.validate().map_err(|error| error.within("optim_params"))
    }
}

setters!(OptimStep { seq_id: Seq => Some(seq_id); });

impl Serialize for OptimStep {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(tag = "type", rename = "optim_step")]
        struct StepFields<'a> {
            model_id: &'a ModelId,
            #[serde(skip_serializing_if = "Option::is_none")]
            seq_id: Option<Seq>,
            #[serde(skip_serializing_if = "Option::is_none")]
            adam_params: Option<&'a AdamParams>,
            #[serde(skip_serializing_if = "Option::is_none")]
            optimizer_params: Option<OtherParams<'a>>,
        }

        #[derive(Serialize)]
        #[serde(untagged)]
        enum OtherParams<'a> {
            Dimuon(&'a DimuonParams),
            Other(&'a OptimizerConfig),
        }

        let (adam_params, optimizer_params) = match &self.params {
            OptimParams::Adam(params) => (Some(params), None),
            OptimParams::Dimuon(params) => (None, Some(OtherParams::Dimuon(params))),
            OptimParams::Other(params) => (None, Some(OtherParams::Other(params))),
        };
        let model_id = &self.model_id;
        let seq_id = self.seq_id;
        StepFields { model_id, seq_id, adam_params, optimizer_params }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OptimStep {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct StepFields {
            model_id: ModelId,
            seq_id: Option<Seq>,
            #[serde(alias = "adam_params", alias = "optimizer_params")]
            optim_params: JsonObject,
        }

        positioned::object(deserializer, |form: StepFields| {
            let params = OptimParams::from_fields(form.optim_params)
                .map_err(|error| format!("optim_params: {error}"))?;
            Ok(Self { model_id: form.model_id, seq_id: form.seq_id, params })
        })
    }
}

/// Discards the gradient that a model has accumulated since the last optimizer step. The weights and
/// the state of the optimizer do not change.
///
/// Extension of `tinkex` servers; the Python SDK does not send it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DiscardGradient {
    /// Id of the model.
    pub model_id: ModelId,
    /// Sequence number among the requests of the model. The server executes them in this order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<Seq>,
}

impl DiscardGradient {
    /// Creates a request without a sequence number.
    pub fn new(model_id: impl Into<ModelId>) -> Self {
        Self { model_id: model_id.into(), seq_id: None }
    }
}

setters!(DiscardGradient { seq_id: Seq => Some(seq_id); });

/// Result of [`DiscardGradient`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "discard_gradient")]
#[non_exhaustive]
pub struct GradientDiscarded {}

json_request! {
    OptimStep: OptimStep => SubmitResponse, validate OptimStep::validate_params;
    DiscardGradient: DiscardGradient => SubmitResponse;
}

json_output! {
    OptimStep: "OptimStep" => OptimStepOutput;
    DiscardGradient: "DiscardGradient" => GradientDiscarded = "discard_gradient";
}
