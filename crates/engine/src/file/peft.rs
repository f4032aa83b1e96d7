//! `adapter_config.json`, as `peft` reads and writes it.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::atomic::write_file;
use super::config::read_small;
use crate::{Error, Result};

/// What an adapter's configuration says, of what the engine understands.
#[derive(Clone, Debug, PartialEq)]
pub struct PeftConfig {
    /// The rank of every pair.
    pub rank: usize,
    /// The product of the pair counts `alpha / rank` times.
    pub alpha: f64,
    /// The model that it was trained on.
    pub base_model: String,
    /// The last parts of the names of adapted modules, such as `q_proj`.
    pub target_modules: Vec<String>,
}

impl PeftConfig {
    /// What the product of a pair is multiplied by.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Reads the file `path`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] if it is something else, or asks for a variant of LoRA
    /// that would compute something else than plain LoRA.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = read_small(path)?;
        let raw: RawPeftConfig = serde_json::from_slice(&text).map_err(|e| {
            Error::bad_file(path, format!("is not an adapter's configuration: {e}"))
        })?;
        raw.check().map_err(|why| Error::bad_file(path, why))
    }

    /// Writes the file `path`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut modules = self.target_modules.clone();
        modules.sort();
        // A whole number is written as one: some readers want it so.
        let alpha = if self.alpha.fract() == 0.0 && self.alpha.abs() < 1e15 {
            #[expect(clippy::cast_possible_truncation, reason = "it is a whole number in range")]
            let whole = self.alpha as i64;
            json!(whole)
        } else {
            json!(self.alpha)
        };
        let config = json!({
            "base_model_name_or_path": self.base_model,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": modules,
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": false,
        });
        let text = serde_json::to_vec_pretty(&config).expect("texts and numbers are always JSON");
        write_file(path.as_ref(), |out| out.write_all(&text))
    }
}

#[derive(Deserialize)]
struct RawPeftConfig {
    r: u64,
    lora_alpha: f64,
    #[serde(default)]
    base_model_name_or_path: Option<String>,
    #[serde(default)]
    peft_type: Option<String>,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    target_modules: Value,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Switches of `peft` under which the same tensors mean something else.
const OTHER_VARIANTS: [&str; 13] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
];

impl RawPeftConfig {
    fn check(self) -> Result<PeftConfig, String> {
        if let Some(kind) = self.peft_type.filter(|kind| kind != "LORA") {
            return Err(format!("adapters of type {kind:?} are not supported; LORA is"));
        }
        if let Some(bias) = self.bias.filter(|bias| bias != "none") {
            return Err(format!("bias {bias:?} is not supported; \"none\" is"));
        }
        for name in OTHER_VARIANTS {
            if self.rest.get(name).is_some_and(is_on) {
                return Err(format!("{name} is set; only plain LoRA is supported"));
            }
        }
        let rank = match usize::try_from(self.r) {
            Ok(rank @ 1..=65_536) => rank,
            _ => return Err(format!("r is {}, expected 1 to 65536", self.r)),
        };
        if !self.lora_alpha.is_finite() {
            return Err(format!("lora_alpha is {}", self.lora_alpha));
        }
        let target_modules = match self.target_modules {
            Value::Array(names) => {
                names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
            }
            // A pattern, or nothing: the tensors themselves tell.
            _ => Vec::new(),
        };
        let base_model = self.base_model_name_or_path.unwrap_or_default();
        Ok(PeftConfig { rank, alpha: self.lora_alpha, base_model, target_modules })
    }
}

/// Whether a switch is set: neither null, false nor empty.
fn is_on(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Array(items) => !items.is_empty(),
        Value::Object(entries) => !entries.is_empty(),
        Value::Number(_) | Value::String(_) => true,
    }
}
