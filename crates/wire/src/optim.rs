//! Optimizers: which one a model has, and the numbers of one step.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value;

use crate::error::finite;
use crate::future::SubmitResponse;
use crate::ids::{ModelId, Seq};
use crate::request::{json_output, json_request};
use crate::training::Metrics;
use crate::{InvalidInput, JsonObject};

const ADAMW: &str = "adamw";
const DIMUON: &str = "dimuon";

/// Which optimizer a model has, chosen when it is created.
///
/// An open type: a server may know optimizers and settings that this crate does not, and they are
/// kept as they are.
///
/// ```
/// use tinkex_wire::OptimizerConfig;
///
/// let json = serde_json::to_string(&OptimizerConfig::dimuon())?;
/// assert_eq!(json, r#"{"type":"dimuon","version":1}"#);
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct OptimizerConfig {
    /// Its name.
    #[serde(rename = "type", default = "adamw")]
    pub kind: String,
    /// Its settings. One called `type` is not sent: that is the name.
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
    /// Adam with decoupled weight decay: the default.
    #[must_use]
    pub fn adamw() -> Self {
        Self { kind: adamw(), settings: JsonObject::new() }
    }

    /// Dimuon, version 1.
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

/// The numbers of one optimizer step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum OptimParams {
    /// Adam.
    Adam(AdamParams),
    /// Dimuon.
    Dimuon(DimuonParams),
    /// An optimizer this version has no type for.
    Other(OptimizerConfig),
}

/// The numbers of an Adam step.
///
/// ```
/// use tinkex_wire::AdamParams;
///
/// let adam = AdamParams { grad_clip_norm: 1.0, ..AdamParams::with_learning_rate(2e-4) };
/// assert_eq!((adam.beta2, adam.eps), (0.95, 1e-12));
/// ```
// A number that is not understood would change the training, so unlike elsewhere it is refused.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamParams {
    /// Step size.
    pub learning_rate: f64,
    /// Memory of the mean of gradients.
    pub beta1: f64,
    /// Memory of their square.
    pub beta2: f64,
    /// Keeps the division from zero.
    pub eps: f64,
    /// Decoupled decay of the weights.
    pub weight_decay: f64,
    /// The largest gradient norm; 0 for no limit.
    pub grad_clip_norm: f64,
}

impl AdamParams {
    /// The defaults with another step size.
    #[must_use]
    pub fn with_learning_rate(learning_rate: f64) -> Self {
        Self { learning_rate, ..Self::default() }
    }

    fn validate(&self) -> Result<(), InvalidInput> {
        finite("learning_rate", self.learning_rate)?;
        finite("beta1", self.beta1)?;
        finite("beta2", self.beta2)?;
        finite("eps", self.eps)?;
        finite("weight_decay", self.weight_decay)?;
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

/// The numbers of a Dimuon step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename = "dimuon")]
pub struct DimuonParams {
    /// Step size, at least 0.
    pub learning_rate: f64,
    /// The largest gradient norm; 0 or less for no limit.
    pub grad_clip_norm: f64,
    /// Momentum, at least 0 and below 1.
    pub beta1: f64,
}

impl<'de> Deserialize<'de> for DimuonParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Form {
            #[serde(default, rename = "type")]
            kind: Option<String>,
            learning_rate: f64,
            #[serde(default)]
            grad_clip_norm: f64,
            #[serde(default = "DimuonParams::beta1")]
            beta1: f64,
        }

        let Form { kind, learning_rate, grad_clip_norm, beta1 } = Form::deserialize(deserializer)?;
        match kind.as_deref() {
            None | Some(DIMUON) => Ok(Self { learning_rate, grad_clip_norm, beta1 }),
            Some(other) => Err(de::Error::unknown_variant(other, &[DIMUON])),
        }
    }
}

impl DimuonParams {
    /// The defaults with a step size.
    #[must_use]
    pub fn with_learning_rate(learning_rate: f64) -> Self {
        Self { learning_rate, grad_clip_norm: 0.0, beta1: Self::beta1() }
    }

    fn beta1() -> f64 {
        0.9
    }

    fn validate(&self) -> Result<(), InvalidInput> {
        finite("learning_rate", self.learning_rate)?;
        finite("grad_clip_norm", self.grad_clip_norm)?;
        finite("beta1", self.beta1)?;
        if self.learning_rate < 0.0 {
            return Err(InvalidInput::new("learning_rate", "must not be negative"));
        }
        if !(0.0..1.0).contains(&self.beta1) {
            return Err(InvalidInput::new("beta1", "must be at least 0 and below 1"));
        }
        Ok(())
    }
}

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
    /// Refuses numbers that cannot be sent or make no sense.
    ///
    /// # Errors
    /// Names the first number that is wrong.
    pub fn validate(&self) -> Result<(), InvalidInput> {
        match self {
            Self::Adam(params) => params.validate(),
            Self::Dimuon(params) => params.validate(),
            Self::Other(_) => Ok(()),
        }
    }

    fn read(mut fields: JsonObject) -> Result<Self, serde_json::Error> {
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

/// Applies the gradient that was gathered since the last step.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimStep {
    /// The model.
    pub model_id: ModelId,
    /// Its place among the model's requests.
    pub seq_id: Option<Seq>,
    /// The numbers of this step.
    pub params: OptimParams,
}

/// What a step did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OptimStepOutput {
    /// Numbers about it.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::training::some_metrics"
    )]
    pub metrics: Option<Metrics>,
}

impl OptimStep {
    fn check_params(&self) -> Result<(), InvalidInput> {
        self.params.validate().map_err(|error| error.within("optim_params"))
    }
}

impl Serialize for OptimStep {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(tag = "type", rename = "optim_step")]
        struct Form<'a> {
            model_id: &'a ModelId,
            #[serde(skip_serializing_if = "Option::is_none")]
            seq_id: Option<Seq>,
            #[serde(skip_serializing_if = "Option::is_none")]
            adam_params: Option<&'a AdamParams>,
            #[serde(skip_serializing_if = "Option::is_none")]
            optimizer_params: Option<Others<'a>>,
        }

        #[derive(Serialize)]
        #[serde(untagged)]
        enum Others<'a> {
            Dimuon(&'a DimuonParams),
            Other(&'a OptimizerConfig),
        }

        let (adam_params, optimizer_params) = match &self.params {
            OptimParams::Adam(params) => (Some(params), None),
            OptimParams::Dimuon(params) => (None, Some(Others::Dimuon(params))),
            OptimParams::Other(params) => (None, Some(Others::Other(params))),
        };
        let (model_id, seq_id) = (&self.model_id, self.seq_id);
        Form { model_id, seq_id, adam_params, optimizer_params }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OptimStep {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Form {
            model_id: ModelId,
            seq_id: Option<Seq>,
            #[serde(alias = "adam_params", alias = "optimizer_params")]
            optim_params: JsonObject,
        }

        let form = Form::deserialize(deserializer)?;
        let params = OptimParams::read(form.optim_params)
            .map_err(|why| de::Error::custom(format!("optim_params: {why}")))?;
        Ok(Self { model_id: form.model_id, seq_id: form.seq_id, params })
    }
}

json_request! {
    OptimStep: OptimStep => SubmitResponse, validate OptimStep::check_params;
}

json_output! {
    OptimStep: "OptimStep" => OptimStepOutput;
}
