//! Measurements.

use std::borrow::Cow;
use std::time::Instant;

use super::pass::{Pass, Sequence};
use crate::Result;
use crate::file::ModelConfig;
use crate::kernel::{Kernel, Precision};
use crate::lora::{Adapter, LoraConfig};
use crate::model::{Model, NoSink, Source};

pub(crate) struct Random(pub(crate) ModelConfig);

impl Source for Random {
    fn values(&self, name: &str) -> Result<Cow<'_, [f32]>> {
        let (_, shape) = self.0.tensors().find(|(n, _)| n == name).unwrap();
        let len: usize = shape.iter().product();
        if shape.len() == 1 { return Ok(vec![1.0; len].into()); }
        let mut s = 0x9E37_79B9_u32 ^ name.len() as u32;
        let scale = 1.0 / (shape[1] as f32).sqrt();
        Ok((0..len).map(|_| { s ^= s << 13; s ^= s >> 17; s ^= s << 5; (f32::from_bits((s >> 9) | 0x3f80_0000) - 1.5) * 2.0 * scale }).collect::<Vec<_>>().into())
    }
}

pub(crate) fn config(big: bool) -> ModelConfig {
    let text = if big { r#"{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
     "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
     "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
     "max_position_embeddings": 40960, "tie_word_embeddings": true}"# } else { r#"{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 4096, "hidden_size": 256,
     "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
     "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
     "max_position_embeddings": 4096, "tie_word_embeddings": true}"# };
    ModelConfig::parse(text.as_bytes(), "config.json").unwrap()
}

fn run(big: bool, precision: Precision, threads: usize) {
    let config = config(big);
    let begun = Instant::now();
    let model = Model::load(&config, &Random(config.clone()), precision, Kernel::new(threads).unwrap()).unwrap();
    println!("big {big} {precision:?} loaded in {:.2?}", begun.elapsed());
    let adapter = Adapter::new(&config, LoraConfig::default()).unwrap();
    let lora = adapter.packed(&config);
    let data: Vec<Vec<u32>> = (0..4).map(|i| (0..257).map(|j| (i * 1000 + j * 7) as u32 % 4096).collect()).collect();
    let seqs: Vec<Sequence<'_>> = data.iter().map(|d| Sequence { tokens: &d[..256], targets: &d[1..] }).collect();
    for _ in 0..if big { 1 } else { 5 } {
        let begun = Instant::now();
        let (pass, lp) = Pass::forward(&model, Some(&lora), &seqs, Some(usize::MAX));
        let f = begun.elapsed();
        let slopes: Vec<Vec<f32>> = lp.iter().map(|l| vec![-1.0; l.len()]).collect();
        let grads = pass.backward(&slopes, &mut NoSink);
        let mut sums = adapter.zeros();
        adapter.collect(&grads, &mut sums);
        println!("forward {f:.2?} all {:.2?}", begun.elapsed());
    }
}

#[test]
#[ignore = "a measurement"]
fn small() { run(false, Precision::F32, 1); run(false, Precision::Bf16, 1); run(false, Precision::F32, 2); }

#[test]
#[ignore = "a measurement"]
fn big() { run(true, Precision::F32, 2); run(true, Precision::Bf16, 2); }
