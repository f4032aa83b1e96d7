//! [`PeftConfig`]: the `adapter_config.json` of the `peft` library.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::atomic::write_file;
use crate::json_fields::read_small;
use crate::{Error, Result};

/// Configuration of a plain LoRA adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct PeftConfig {
    /// Rank of all pairs of matrices, 1 to 65,536.
    pub rank: usize,
    /// Numerator of the scale `alpha / rank` of the deltas.
    pub alpha: f64,
    /// Name of the base model; empty if the file does not name it.
    pub base_model: String,
    /// Last components of the names of adapted modules, for example `q_proj`. Empty if the file
    /// gives a pattern instead of a list.
    pub target_modules: Vec<String>,
}

impl PeftConfig {
    /// Returns the factor `alpha / rank` of the deltas.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Returns whether [`target_modules`](Self::target_modules) selects a module: by its name or by
    /// the end of its name, as `peft` does. A pattern selects every module.
    #[must_use]
    pub fn targets(&self, module: &str) -> bool {
        self.target_modules.is_empty()
            || self.target_modules.iter().any(|target| selects(target, module))
    }

    /// Returns whether `base`, the name or the folder of a model, may be the base model that the
    /// file names: the last components of both are equal, apart from case and from a variant after
    /// a colon. The folder of a model in the Hugging Face hub cache has the name of its repository.
    /// Returns true for every model if the file names no base model.
    ///
    /// The result suits a warning: a folder may have any name.
    #[must_use]
    pub fn may_be_base(&self, base: &str) -> bool {
        let named = last_component(&self.base_model);
        let is_named = |name: &str| last_component(name).eq_ignore_ascii_case(named);
        let in_cache = |part: &str| {
            let repository = part.strip_prefix("models--");
            repository.is_some_and(|id| is_named(&id.replace("--", "/")))
        };
        named.is_empty() || is_named(base) || base.split(['/', '\\']).any(in_cache)
    }

    /// Reads the file `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::BadFile`] if it is not an adapter
    /// configuration, or enables a variant that computes something other than plain LoRA.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = read_small(path)?;
        let raw: RawPeftConfig = serde_json::from_slice(&text)
            .map_err(|e| Error::bad_file(path, format!("not an adapter configuration: {e}")))?;
        raw.validate().map_err(|reason| Error::bad_file(path, reason))
    }

    /// Writes the file `path`, atomically replacing it.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut modules = self.target_modules.clone();
        modules.sort();
        // Some readers accept only an integer here.
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
        let text = serde_json::to_vec_pretty(&config).expect("a JSON value serializes");
        write_file(path.as_ref(), |out| out.write_all(&text))
    }
}

/// Returns the last component of a model name or path, without a variant after a colon.
fn last_component(name: &str) -> &str {
    let name = name.trim_end_matches(['/', '\\']);
    let last = name.rsplit(['/', '\\']).next().unwrap_or(name);
    last.split(':').next().unwrap_or(last)
}

/// Returns whether an entry of `target_modules` selects a module, as in `peft`: by its name or by
/// the last components of its name.
pub(crate) fn selects(target: &str, module: &str) -> bool {
    module.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
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

/// Settings of `peft` that select another variant than plain LoRA, in which the tensors have
/// another meaning.
const OTHER_VARIANTS: [&str; 16] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
];

/// Values of `init_lora_weights` with which `peft` changes the weights of the base model, by their
/// beginnings. The saved adapter fits only the changed base model. Other values, such as `eva`,
/// `gaussian` and `orthogonal`, concern the start of the training alone.
const BASE_CHANGING_INITS: [&str; 5] = ["pissa", "corda", "olora", "lora_ga", "loftq"];

impl RawPeftConfig {
    /// Checks that the adapter is a plain LoRA adapter. Returns a description of the first problem.
    fn validate(self) -> Result<PeftConfig, String> {
        if let Some(kind) = self.peft_type.filter(|kind| kind != "LORA") {
            return Err(format!("peft_type {kind:?} is not supported, expected \"LORA\""));
        }
        if let Some(bias) = self.bias.filter(|bias| bias != "none") {
            return Err(format!("bias {bias:?} is not supported, expected \"none\""));
        }
        for name in OTHER_VARIANTS {
            if self.rest.get(name).is_some_and(is_enabled) {
                return Err(format!("{name} is set; only plain LoRA is supported"));
            }
        }
        if let Some(name) = self.rest.get("init_lora_weights").and_then(Value::as_str) {
            check_init(name)?;
        }
        let rank = match usize::try_from(self.r) {
            Ok(rank @ 1..=65_536) => rank,
            _ => return Err(format!("r is {}, expected 1 to 65536", self.r)),
        };
        if !self.lora_alpha.is_finite() {
            return Err(format!("lora_alpha is {}, expected a finite number", self.lora_alpha));
        }
        let target_modules = match self.target_modules {
            Value::Array(names) => {
                names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
            }
            // A pattern, or absent: the names of the tensors determine the modules.
            _ => Vec::new(),
        };
        let base_model = self.base_model_name_or_path.unwrap_or_default();
        Ok(PeftConfig { rank, alpha: self.lora_alpha, base_model, target_modules })
    }
}

/// Checks that the initialization `name` leaves the base model as it is.
fn check_init(name: &str) -> Result<(), String> {
    let lower = name.to_lowercase();
    let Some(init) = BASE_CHANGING_INITS.iter().find(|init| lower.starts_with(**init)) else {
        return Ok(());
    };
    let advice = match *init {
        // The base model is quantized too, so the difference is not a LoRA adapter.
        "loftq" => "merge it into that base model with merge_and_unload of peft",
        _ => {
            "convert it to plain LoRA with save_pretrained(..., \
             path_initial_model_for_weight_conversion=...) of peft"
        }
    };
    Err(format!(
        "init_lora_weights {name:?} changes the weights of the base model, and the adapter fits \
         only the changed ones; {advice}"
    ))
}

/// Returns whether a setting is enabled: not null, not false, and not empty.
fn is_enabled(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Array(items) => !items.is_empty(),
        Value::Object(entries) => !entries.is_empty(),
        Value::Number(_) | Value::String(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_base_model_is_compared_without_its_folder() {
        let config = |base_model: &str| PeftConfig {
            rank: 1,
            alpha: 1.0,
            base_model: base_model.to_owned(),
            target_modules: Vec::new(),
        };
        let cached = "/hub/models--Qwen--Qwen3-0.6B/snapshots/c0ffee";
        for (named, base) in [
            ("Qwen/Qwen3-0.6B", "models/qwen3-0.6b/"),
            ("Qwen/Qwen3-0.6B:beta", "Qwen/Qwen3-0.6B"),
            ("Qwen/Qwen3-0.6B", cached),
            ("/data/tiny", "tiny"),
            ("", "tiny"),
        ] {
            assert!(config(named).may_be_base(base), "{named} {base}");
        }
        for (named, base) in
            [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"), ("Qwen/Qwen3-1.7B", cached), ("a", "")]
        {
            assert!(!config(named).may_be_base(base), "{named} {base}");
        }
    }
}
