//! Log-probabilities of models under other configurations, compared with `transformers`.

use std::fs;

use serde_json::Value;
use tinkex_engine::loss::Loss;
use tinkex_engine::optim::OptimizerKind;
use tinkex_engine::train::{Datum, TrainingObjective};
use tinkex_engine::{Engine, EngineOptions, LoraConfig};

use crate::golden::{copy_of, folder};

/// Fields that contradict each other, have several forms, or are missing have the meaning that they
/// have in `transformers`.
#[test]
fn configurations_are_read_as_by_transformers() {
    let cases: Vec<Value> =
        serde_json::from_slice(&fs::read(folder("configurations.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 16);
    for case in &cases {
        let name = &case["name"];
        let copy = copy_of(case["model"].as_str().unwrap());
        let path = copy.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let fields = config.as_object_mut().unwrap();
        for (field, value) in case["changes"].as_object().unwrap() {
            fields.remove(field);
            if !value.is_null() {
                fields.insert(field.clone(), value.clone());
            }
        }
        fs::write(&path, config.to_string()).unwrap();
        let options = EngineOptions { threads: 1, ..EngineOptions::default() };
        let engine = Engine::open(copy.path(), options).unwrap_or_else(|e| panic!("{name}: {e}"));
        let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
        let trainer = engine.create_trainer(lora, OptimizerKind::Adam).unwrap();
        let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        let want: Vec<f32> = serde_json::from_value(case["logprobs"].clone()).unwrap();
        let inputs = &tokens[..want.len()];
        let targets = &tokens[1..];
        let datum = Datum { tokens: inputs, targets, ..Datum::default() };
        let objective = TrainingObjective::Loss(Loss::CrossEntropy);
        let got = trainer.forward(&objective, &[datum]).unwrap().logprobs.remove(0);
        assert_eq!(got.len(), want.len());
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() <= 2e-5, "{name} at {at}: {got} instead of {want}");
        }
    }
}
