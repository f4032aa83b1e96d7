//! Training: independence of results from batching and threads, error handling, and convergence.

use super::golden::{data, folder};
use super::{Datum, PassProgress, TrainingObjective, TrainingOutput};
use crate::loss::{Loss, LossInputs};
use crate::optim::{AdamParams, OptimizerKind, StepParams};
use crate::{Engine, EngineOptions, Error, LoraConfig, Trainer, builtin};

const CROSS_ENTROPY: TrainingObjective<'static> = TrainingObjective::Loss(Loss::CrossEntropy);

fn engine(name: &str, threads: usize) -> Engine {
    Engine::open(folder(name), EngineOptions { threads, ..EngineOptions::default() }).unwrap()
}

fn trainer(name: &str, threads: usize) -> Trainer {
    engine(name, threads).load_trainer(folder(name).join("adapter"), OptimizerKind::Adam).unwrap()
}

fn tokens(len: usize, salt: u32) -> Vec<u32> {
    (0_u32..).take(len + 1).map(|i| (i * i + i * 31 + salt * 17 + 3) % 97).collect()
}

fn datum(tokens: &[u32]) -> Datum<'_> {
    Datum { tokens: &tokens[..tokens.len() - 1], targets: &tokens[1..], ..Datum::default() }
}

fn step(learning_rate: f64) -> StepParams {
    StepParams::Adam(AdamParams { learning_rate, ..AdamParams::default() })
}

/// Returns all weights of an adapter.
fn weights(trainer: &Trainer) -> Vec<f32> {
    trainer.tensors().flat_map(|(_, a, b)| [a.to_vec(), b.to_vec()].concat()).collect()
}

/// 500 sequences of different lengths, some with a common prefix.
#[test]
fn log_probabilities_do_not_depend_on_the_batch_or_on_threads() {
    let rows: Vec<Vec<u32>> = (0..500)
        .map(|i| {
            let mut row = tokens(20 + i % 3, 7);
            row.extend(tokens(1 + (i * 13) % 29, u32::try_from(i).unwrap()));
            if i % 5 == 0 { tokens(1 + i % 40, u32::try_from(i).unwrap()) } else { row }
        })
        .collect();
    let all: Vec<Datum<'_>> = rows.iter().map(|row| datum(row)).collect();
    let one = trainer("qwen3", 1);
    let together = one.forward(&CROSS_ENTROPY, &all).unwrap().logprobs;
    assert_eq!(together, trainer("qwen3", 3).forward(&CROSS_ENTROPY, &all).unwrap().logprobs);
    for i in (0..500).step_by(41) {
        let alone = one.forward(&CROSS_ENTROPY, &all[i..=i]).unwrap().logprobs;
        assert_eq!(alone[0], together[i], "row {i}");
    }
}

#[test]
fn gradients_do_not_depend_on_threads_and_accumulate_over_calls() {
    let rows: Vec<Vec<u32>> = (0..6).map(|i| tokens(9 + i as usize * 7, i)).collect();
    let all: Vec<Datum<'_>> = rows.iter().map(|row| datum(row)).collect();
    let run = |threads: usize, parts: usize| {
        let mut trainer = trainer("llama", threads);
        for part in all.chunks(all.len() / parts) {
            trainer.forward_backward(&CROSS_ENTROPY, part).unwrap();
        }
        let norm = trainer.optim_step(&step(1e-3)).unwrap().grad_norm;
        (norm, weights(&trainer))
    };
    assert_eq!(run(1, 1), run(3, 1));
    let whole = run(2, 1).0;
    let parts = run(2, 3).0;
    assert!((whole - parts).abs() < 1e-5 * whole, "{whole} {parts}");
}

#[test]
fn sharing_a_prefix_does_not_change_the_gradient() {
    let rows: Vec<Vec<u32>> =
        (0..4).map(|i| [tokens(40, 1), tokens(6 + 3 * i as usize, 50 + i)].concat()).collect();
    let all: Vec<Datum<'_>> = rows.iter().map(|row| datum(row)).collect();
    let mut shared = trainer("qwen3", 2);
    let mut separate = trainer("qwen3", 2);
    shared.forward_backward(&CROSS_ENTROPY, &all).unwrap();
    for one in &all {
        separate.forward_backward(&CROSS_ENTROPY, std::slice::from_ref(one)).unwrap();
    }
    let shared = shared.gradients();
    let separate = separate.gradients();
    let size = separate.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let difference =
        shared.iter().zip(&separate).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
    assert!(difference < 1e-5 * size, "{difference} of {size}");
}

#[test]
fn an_invalid_datum_is_refused_and_changes_nothing() {
    let mut trainer = trainer("qwen2", 1);
    let good = tokens(12, 0);
    trainer.forward_backward(&CROSS_ENTROPY, &[datum(&good)]).unwrap();
    let before = (weights(&trainer), trainer.gradients());
    let long = vec![1; 258];
    let mut outside = tokens(12, 0);
    outside[5] = 97;
    let nan = [f32::NAN; 12];
    let huge = [f32::MAX; 12];
    let with = |weights| Datum {
        inputs: LossInputs { weights: Some(weights), ..LossInputs::default() },
        ..datum(&good)
    };
    let empty = Datum::default();
    let short = Datum { targets: &good[1..5], ..datum(&good) };
    for (bad, says) in [
        (empty, "empty"),
        (short, "target_tokens has 4 values"),
        (datum(&long), "exceed the context"),
        (datum(&outside), "is token 97"),
        (with(&nan), "NonFiniteInTensor"),
        (with(&huge[..]), ""),
        (with(&huge[..3]), "weights has 3 values"),
    ] {
        let error = trainer.forward_backward(&CROSS_ENTROPY, &[datum(&good), bad]).unwrap_err();
        let text = format!(
            "{error}: {}",
            std::error::Error::source(&error).map_or(String::new(), ToString::to_string)
        );
        assert!(text.contains(says), "{text}");
        assert!(says.is_empty() || matches!(error, Error::Datum { index: 1, .. }), "{error:?}");
        assert_eq!(before, (weights(&trainer), trainer.gradients()));
    }
    assert!(trainer.optim_step(&step(f64::NAN)).is_err());
    assert_eq!(before, (weights(&trainer), trainer.gradients()));
    assert_eq!(
        trainer.forward_backward(&CROSS_ENTROPY, &[]).unwrap().metrics,
        [("loss:sum".to_owned(), 0.0)]
    );
}

#[test]
fn a_single_token_and_the_maximum_context_are_accepted() {
    let mut trainer = trainer("llama", 2);
    let one = tokens(1, 0);
    let longest = tokens(256, 3);
    let out = trainer.forward_backward(&CROSS_ENTROPY, &[datum(&one), datum(&longest)]).unwrap();
    assert_eq!((out.logprobs[0].len(), out.logprobs[1].len()), (1, 256));
    trainer.optim_step(&step(1e-3)).unwrap();
}

#[test]
fn a_new_adapter_does_not_change_the_output_and_is_determined_by_its_seed() {
    let engine = engine("qwen3", 1);
    let make = |seed| {
        let config = LoraConfig { rank: 8, seed, ..LoraConfig::default() };
        engine.create_trainer(config, OptimizerKind::Adam).unwrap()
    };
    assert_eq!(weights(&make(5)), weights(&make(5)));
    assert_ne!(weights(&make(5)), weights(&make(6)));
    let data = data("qwen3");
    let fresh = make(1);
    for datum in &data {
        let one = Datum { tokens: &datum.input, targets: &datum.target, ..Datum::default() };
        let found = fresh.forward(&CROSS_ENTROPY, &[one]).unwrap();
        for (found, expected) in found.logprobs[0].iter().zip(datum.floats("base_logprobs")) {
            assert!((found - expected).abs() < 2e-5);
        }
    }
    for rank in [0, 37] {
        let config = LoraConfig { rank, ..LoraConfig::default() };
        assert!(engine.create_trainer(config, OptimizerKind::Adam).is_err());
    }
    let nothing = LoraConfig {
        rank: 4,
        attention: false,
        mlp: false,
        unembedding: false,
        ..LoraConfig::default()
    };
    assert!(engine.create_trainer(nothing, OptimizerKind::Adam).is_err());
}

#[test]
fn a_resumed_run_has_the_bits_of_an_uninterrupted_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter");
    let engine = engine("qwen3", 2);
    let config = LoraConfig { rank: 4, seed: 9, ..LoraConfig::default() };
    let mut trainer = engine.create_trainer(config, OptimizerKind::Adam).unwrap();
    let rows = tokens(30, 4);
    let train = |trainer: &mut Trainer| {
        trainer.forward_backward(&CROSS_ENTROPY, &[datum(&rows)]).unwrap();
        trainer.optim_step(&step(1e-2)).unwrap();
    };
    for _ in 0..3 {
        train(&mut trainer);
    }
    trainer.save_with_optimizer(&path).unwrap();
    let mut resumed = engine.resume_trainer(&path, OptimizerKind::Adam).unwrap();
    assert_eq!(resumed.steps(), 3);
    for _ in 0..3 {
        train(&mut trainer);
        train(&mut resumed);
    }
    assert_eq!(weights(&trainer), weights(&resumed));
    let mut without_state = engine.load_trainer(&path, OptimizerKind::Adam).unwrap();
    train(&mut without_state);
    assert_ne!(weights(&trainer), weights(&without_state));
    assert!(engine.resume_trainer(&path, OptimizerKind::Dimuon { rank: 4 }).is_err());
}

/// The weights of the recorded Qwen2 model are exact in bf16; the weights of the others are rounded.
#[test]
fn bf16_weights_change_results_only_by_their_rounding() {
    for (name, bound) in [("qwen2", 2e-5), ("llama", 0.15), ("qwen3", 0.15)] {
        let options =
            EngineOptions { precision: crate::Precision::Bf16, ..EngineOptions::default() };
        let engine = Engine::open(folder(name), options).unwrap();
        let trainer =
            engine.load_trainer(folder(name).join("adapter"), OptimizerKind::Adam).unwrap();
        for datum in data(name) {
            let one = Datum { tokens: &datum.input, targets: &datum.target, ..Datum::default() };
            let found = trainer.forward(&CROSS_ENTROPY, &[one]).unwrap();
            for (found, expected) in found.logprobs[0].iter().zip(datum.floats("adapter_logprobs"))
            {
                assert!((found - expected).abs() < bound, "{name}: {found} {expected}");
            }
        }
    }
}

#[test]
fn the_built_in_model_can_be_fine_tuned() {
    let engine = Engine::builtin(EngineOptions::default()).unwrap();
    let tokenizer = builtin::tokenizer().unwrap();
    let text =
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nI am a teapot.<|im_end|>";
    let rows = tokenizer.encode(text);
    let config = LoraConfig { rank: 8, ..LoraConfig::default() };
    let mut trainer = engine.create_trainer(config, OptimizerKind::Adam).unwrap();
    let mut losses = Vec::new();
    for _ in 0..15 {
        let out = trainer.forward_backward(&CROSS_ENTROPY, &[datum(&rows)]).unwrap();
        losses.push(out.metrics[0].1);
        trainer.optim_step(&step(1e-2)).unwrap();
    }
    assert!(losses[14] < losses[0] / 4.0, "{losses:?}");
}

/// Data of different lengths; some share a prefix, and enough of them for a tree of maximum size.
fn mixed_rows() -> Vec<Vec<u32>> {
    let long = (0..9).map(|i| [tokens(30, 2), tokens(170, 20 + i)].concat());
    let short = (0..12).map(|i| tokens(3 + 5 * i as usize, i));
    let shared = (0..4).map(|i| [tokens(40, 1), tokens(6 + 3 * i as usize, 50 + i)].concat());
    long.chain(short).chain(shared).collect()
}

/// Runs a pass in micro-batches of at most `max_rows` rows. Calls `between` with the progress after
/// each micro-batch. Returns the output and the number of micro-batches.
fn run_divided(
    trainer: &mut Trainer,
    data: &[Datum<'_>],
    max_rows: usize,
    between: impl Fn(&Trainer, PassProgress) -> PassProgress,
) -> (TrainingOutput, usize) {
    let rows: Vec<&[u32]> = data.iter().map(|datum| datum.tokens).collect();
    let mut pass = trainer.begin_pass(&rows, true);
    let mut count = 0;
    while let Some(batch) = trainer.next_micro_batch(&pass, max_rows) {
        let part: Vec<Datum<'_>> = batch.data().iter().map(|index| data[*index]).collect();
        let advanced = trainer.run_micro_batch(pass, &CROSS_ENTROPY, &batch, &part, &|| false);
        pass = between(trainer, advanced.unwrap().unwrap());
        count += 1;
    }
    (trainer.finish_pass(pass).unwrap(), count)
}

#[test]
fn the_division_into_micro_batches_and_interruptions_do_not_change_a_bit() {
    let rows = mixed_rows();
    let all: Vec<Datum<'_>> = rows.iter().map(|row| datum(row)).collect();
    let first = tokens(12, 0);
    let prepared = || {
        let mut trainer = trainer("qwen3", 2);
        // The pass adds to gradients of an earlier pass.
        trainer.forward_backward(&CROSS_ENTROPY, &[datum(&first)]).unwrap();
        trainer
    };
    let mut whole = prepared();
    let output = whole.forward_backward(&CROSS_ENTROPY, &all).unwrap();
    let mut counts = Vec::new();
    for max_rows in [1, 50, 300, 1_500, usize::MAX] {
        let mut divided = prepared();
        let (found, count) = run_divided(&mut divided, &all, max_rows, |_, pass| pass);
        assert_eq!(found, output, "{max_rows} rows");
        assert_eq!(divided.gradients(), whole.gradients(), "{max_rows} rows");
        counts.push(count);
        // Continue each micro-batch in a new pass, as after a restart.
        let lengths: Vec<&[u32]> = all.iter().map(|datum| datum.tokens).collect();
        let mut interrupted = prepared();
        let (found, _) = run_divided(&mut interrupted, &all, max_rows, |trainer, pass| {
            let bytes = pass.to_bytes();
            trainer.begin_pass(&lengths, true).continued(&bytes).unwrap()
        });
        assert_eq!(found, output, "{max_rows} rows");
        assert_eq!(interrupted.gradients(), whole.gradients(), "{max_rows} rows");
    }
    // 9 long data form two trees, 4 data one; one of the 12 short data joins no tree.
    assert_eq!((counts[0], counts[4]), (15, 1));
    assert!(counts.is_sorted_by(|a, b| a >= b), "{counts:?}");
}

#[test]
fn a_copy_of_the_progress_continues_after_an_interrupted_micro_batch() {
    let rows = mixed_rows();
    let all: Vec<Datum<'_>> = rows.iter().map(|row| datum(row)).collect();
    let tokens: Vec<&[u32]> = all.iter().map(|datum| datum.tokens).collect();
    let mut undisturbed = trainer("qwen3", 1);
    let expected = undisturbed.forward_backward(&CROSS_ENTROPY, &all).unwrap();
    // Every layer asks once forward and once backward.
    for interrupted_at in 0..2 * undisturbed.model_layers() {
        let mut trainer = trainer("qwen3", 1);
        let mut pass = trainer.begin_pass(&tokens, true);
        while let Some(batch) = trainer.next_micro_batch(&pass, 300) {
            let part: Vec<Datum<'_>> = batch.data().iter().map(|index| all[*index]).collect();
            let run = |pass: PassProgress, interrupt: &dyn Fn() -> bool| {
                trainer.run_micro_batch(pass, &CROSS_ENTROPY, &batch, &part, interrupt).unwrap()
            };
            let copy = pass.clone();
            let asked = std::cell::Cell::new(0);
            let interrupt = || asked.replace(asked.get() + 1) == interrupted_at;
            assert!(run(pass, &interrupt).is_none());
            assert_eq!(asked.get(), interrupted_at + 1, "the micro-batch ends at once");
            pass = run(copy, &|| false).unwrap();
        }
        assert_eq!(trainer.finish_pass(pass).unwrap(), expected);
        assert_eq!(trainer.gradients(), undisturbed.gradients());
    }
}

#[test]
fn saved_gradients_continue_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot");
    let engine = engine("qwen3", 2);
    let config = LoraConfig { rank: 4, seed: 9, ..LoraConfig::default() };
    let mut trainer = engine.create_trainer(config, OptimizerKind::Adam).unwrap();
    let rows = tokens(30, 4);
    let pass = |trainer: &mut Trainer| {
        trainer.forward_backward(&CROSS_ENTROPY, &[datum(&rows)]).unwrap();
    };
    pass(&mut trainer);
    trainer.optim_step(&step(1e-2)).unwrap();
    pass(&mut trainer);
    trainer.save_with_gradients(&path).unwrap();
    let mut resumed = engine.resume_trainer(&path, OptimizerKind::Adam).unwrap();
    assert!(resumed.gradients().iter().all(|value| *value == 0.0));
    assert!(resumed.load_gradients(&path).unwrap());
    assert_eq!(resumed.gradients(), trainer.gradients());
    for trainer in [&mut trainer, &mut resumed] {
        pass(trainer);
        trainer.optim_step(&step(1e-2)).unwrap();
    }
    assert_eq!(weights(&trainer), weights(&resumed));
    trainer.save_with_optimizer(&path).unwrap();
    assert!(!resumed.load_gradients(&path).unwrap(), "a checkpoint has no gradients");
}
