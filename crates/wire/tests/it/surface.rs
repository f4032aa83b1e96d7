//! Properties of the public types: sizes, equality and automatic conversions.

use tinkex_wire::*;

use crate::fixtures;

#[test]
fn frequent_types_have_bounded_sizes() {
    assert_eq!(size_of::<DecodeError>(), size_of::<usize>());
    assert!(size_of::<Datum>() <= 64, "{}", size_of::<Datum>());
    assert!(size_of::<InputChunk>() <= 64, "{}", size_of::<InputChunk>());
    assert!(size_of::<TensorData>() <= 96, "{}", size_of::<TensorData>());
    assert!(size_of::<SampledSequence>() <= 192, "{}", size_of::<SampledSequence>());
}

#[test]
fn equality_ignores_the_grouping_into_records() {
    let record = |values: Vec<f32>, lengths: Vec<usize>| {
        LossOutputs::from(LossRecord::new(lengths.len()).field("x", values, lengths).unwrap())
    };
    let whole = record(vec![1.0, 2.0, 3.0], vec![1, 2]);
    let mut parts = record(vec![1.0], vec![1]);
    parts.append(record(vec![2.0, 3.0], vec![2]));
    assert_eq!(whole, parts);
    assert_ne!(whole, record(vec![1.0, 2.0, 3.0], vec![2, 1]));
    assert_eq!((&whole).into_iter().count(), 2);
}

#[test]
fn mostly_zero_target_matrices_become_sparse() {
    let mut targets = vec![0_i64; 4 * 50];
    targets[7] = 9;
    let matrix = TensorData::from(targets).reshape([4, 50]).unwrap();
    let datum = Datum::builder([1, 2, 3, 4])
        .loss_input("target_tokens", matrix.clone())
        .loss_input("my_own", matrix.clone())
        .build()
        .unwrap();
    assert!(datum.loss_input("target_tokens").unwrap().is_sparse());
    assert_eq!(datum.loss_input("target_tokens").unwrap().to_dense(200).unwrap(), matrix);
    assert!(!datum.loss_input("my_own").unwrap().is_sparse(), "custom inputs are not converted");
}

#[test]
fn losses_have_the_names_of_the_python_sdk() {
    let signatures = fixtures::load("sdk", "signatures.json");
    let literal = signatures["types"]["LossFnType"]["is"].as_str().unwrap();
    let names: Vec<&str> = literal.split('\'').skip(1).step_by(2).collect();
    let ours: Vec<&str> = LossFn::BUILT_IN.iter().map(LossFn::as_str).collect();
    assert_eq!(ours, names);
}
