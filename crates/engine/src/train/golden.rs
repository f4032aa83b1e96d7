//! The passes against numbers that torch computed.

use std::path::PathBuf;

use serde_json::Value;

use super::pass::{Pass, Sequence};
use crate::file::{AdapterFile, ModelFolder, TensorFile};
use crate::kernel::{Kernel, Precision};
use crate::lora::Adapter;
use crate::model::{Model, NoSink};

pub(crate) const MODELS: [&str; 3] = ["llama", "qwen2", "qwen3"];

pub(crate) fn folder(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "golden", name].iter().collect()
}

pub(crate) fn model(name: &str, threads: usize) -> Model {
    let folder = ModelFolder::open(folder(name)).unwrap();
    let kernel = Kernel::new(threads).unwrap();
    Model::load(folder.config(), &folder, Precision::F32, kernel).unwrap()
}

pub(crate) fn adapter(name: &str, model: &Model) -> Adapter {
    let file = AdapterFile::load(folder(name).join("adapter")).unwrap();
    Adapter::from_file(&model.config, file, 0).unwrap()
}

pub(crate) struct Datum {
    pub(crate) input: Vec<u32>,
    pub(crate) target: Vec<u32>,
    pub(crate) json: Value,
}

impl Datum {
    pub(crate) fn floats(&self, field: &str) -> Vec<f32> {
        self.json[field].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    }
}

pub(crate) fn data(name: &str) -> Vec<Datum> {
    let text = std::fs::read(folder(name).join("expected.json")).unwrap();
    let json: Value = serde_json::from_slice(&text).unwrap();
    let tokens = |json: &Value| -> Vec<u32> {
        json.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect()
    };
    json["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|json| Datum {
            input: tokens(&json["input"]),
            target: tokens(&json["target"]),
            json: json.clone(),
        })
        .collect()
}

pub(crate) fn sequences(data: &[Datum]) -> Vec<Sequence<'_>> {
    data.iter().map(|datum| Sequence { tokens: &datum.input, targets: &datum.target }).collect()
}

#[test]
fn log_probabilities_are_those_of_torch() {
    for name in MODELS {
        let model = model(name, 2);
        let lora = adapter(name, &model).packed(&model.config);
        let data = data(name);
        for (lora, field) in [(None, "base_logprobs"), (Some(&lora), "adapter_logprobs")] {
            let (_, found) = Pass::forward(&model, lora, &sequences(&data), None);
            for (found, datum) in found.iter().zip(&data) {
                for (found, expected) in found.iter().zip(datum.floats(field)) {
                    assert!((found - expected).abs() < 2e-5, "{name} {field}: {found} {expected}");
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_torch_whatever_is_kept() {
    for name in MODELS {
        let model = model(name, 2);
        let adapter = adapter(name, &model);
        let lora = adapter.packed(&model.config);
        let data = data(name);
        let expected = TensorFile::open(folder(name).join("expected.safetensors")).unwrap();
        let mut before: Option<Vec<[Vec<f32>; 2]>> = None;
        for memory in [0, usize::MAX] {
            let (pass, _) = Pass::forward(&model, Some(&lora), &sequences(&data), Some(memory));
            let slopes: Vec<Vec<f32>> =
                data.iter().map(|datum| datum.floats("weights").iter().map(|w| -w).collect()).collect();
            let grads = pass.backward(&slopes, &mut NoSink);
            let mut sums = adapter.zeros();
            adapter.collect(&grads, &mut sums);
            for (pair, sums) in adapter.pairs.iter().zip(&sums) {
                for (half, sum) in ["A", "B"].into_iter().zip(sums) {
                    let module = pair.place.module();
                    let key = format!("grad.cross_entropy.base_model.model.{module}.lora_{half}.weight");
                    let expected = expected.get(&key).unwrap_or_else(|| panic!("{key}")).to_f32().unwrap();
                    let norm = expected.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
                    let off = expected.iter().zip(sum).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>();
                    assert!(off.sqrt() < 1e-4 * norm, "{name} {key}: off by {} of {norm}", off.sqrt());
                }
            }
            if let Some(before) = &before {
                assert_eq!(*before, sums, "recomputing must not change a bit");
            }
            before = Some(sums);
        }
    }
}
