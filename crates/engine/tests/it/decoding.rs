//! Token sampling compared with `fixtures/semantics/sampling.json` and with a simple reference.

use proptest::prelude::*;
use tinkex_engine::Error;
use tinkex_engine::decode::{DecodingParams, SampleRng, TokenSampler, log_normalizer, logprob};

use crate::fixtures::{assert_close, floats, number, numbers, semantics};

#[test]
fn every_case_keeps_the_recorded_tokens_and_probabilities() {
    let fixture = semantics("sampling.json");
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 14);
    let mut sampler = TokenSampler::default();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let logits = floats(&case["logits"]);
        let params = DecodingParams {
            temperature: number(&case["temperature"]),
            top_k: case["top_k"].as_i64().unwrap(),
            top_p: number(&case["top_p"]),
        };
        params.check().unwrap();
        let normalizer = log_normalizer(&logits, params.temperature);
        let mut sample =
            |uniform| sampler.sample(&logits, &params, normalizer, uniform).unwrap() as usize;

        // Tokens in descending order of probability divide [0, 1) in proportion.
        let chances = numbers(&case["draw_probabilities"]);
        let kept: Vec<usize> = numbers(&case["kept"])
            .into_iter()
            .map(|token| (0..logits.len()).find(|&i| i as f64 == token).unwrap())
            .collect();
        let mut order = kept.clone();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let mut start = 0.0;
        for &token in &order {
            let end = start + chances[token];
            for uniform in [start + 1e-9, f64::midpoint(start, end), end - 1e-9] {
                assert_eq!(sample(uniform), token, "{name} at {uniform}");
            }
            start = end;
        }
        assert_close(name, &[start], &[1.0], 0.0, 1e-9);
        assert_eq!(sample(0.0), order[0]);
        assert_eq!(sample(1.0 - f64::EPSILON / 2.0), order[order.len() - 1], "{name}");

        for (token, want) in case["reported_logprob_if_drawn"].as_object().unwrap() {
            let token: usize = token.parse().unwrap();
            let got = f64::from(logprob(logits[token], params.temperature, normalizer));
            assert_close(name, &[got], &[number(want)], 1e-6, 1e-6);
            let raw = f64::from(logprob(logits[token], 1.0, log_normalizer(&logits, 1.0)));
            assert_close(
                name,
                &[raw],
                &[number(&case["temperature_1_logprob"][token.to_string()])],
                1e-6,
                1e-6,
            );
        }
    }
}

#[test]
fn parameters_out_of_range_are_refused() {
    for params in [
        DecodingParams { temperature: -0.1, ..DecodingParams::default() },
        DecodingParams { temperature: f64::NAN, ..DecodingParams::default() },
        DecodingParams { temperature: f64::INFINITY, ..DecodingParams::default() },
        DecodingParams { top_k: -2, ..DecodingParams::default() },
        DecodingParams { top_p: 0.0, ..DecodingParams::default() },
        DecodingParams { top_p: 1.1, ..DecodingParams::default() },
        DecodingParams { top_p: f64::NAN, ..DecodingParams::default() },
    ] {
        assert!(matches!(params.check(), Err(Error::Invalid { .. })), "{params:?}");
    }
    DecodingParams::default().check().unwrap();
}

#[test]
fn nan_and_infinite_logits_are_errors_and_negative_infinity_is_not() {
    let mut sampler = TokenSampler::default();
    let params = DecodingParams::default();
    for logits in [
        &[0.0, f32::NAN][..],
        &[f32::NAN, 0.0],
        &[f32::INFINITY, 0.0],
        &[f32::NEG_INFINITY; 3],
        &[],
    ] {
        let error = sampler.sample(logits, &params, log_normalizer(logits, 1.0), 0.5).unwrap_err();
        assert!(matches!(error, Error::NonFiniteResult { .. }), "{error}");
    }
    let logits = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY];
    for uniform in [0.0, 0.5, 1.0 - f64::EPSILON] {
        let token =
            sampler.sample(&logits, &params, log_normalizer(&logits, 1.0), uniform).unwrap();
        assert_eq!(token, 1);
    }
}

#[test]
fn sampling_frequencies_match_the_probabilities() {
    let logits: Vec<f32> = (0..300_i16).map(|i| f32::from(i % 7) - f32::from(i) / 40.0).collect();
    let params = DecodingParams { temperature: 1.3, ..DecodingParams::default() };
    let normalizer = log_normalizer(&logits, params.temperature);
    let mut sampler = TokenSampler::default();
    let mut rng = SampleRng::sample(5, 0);
    let mut counts = vec![0_u32; logits.len()];
    let total = 40_000;
    for _ in 0..total {
        counts[sampler.sample(&logits, &params, normalizer, rng.uniform()).unwrap() as usize] += 1;
    }
    for (token, &count) in counts.iter().enumerate() {
        let want = f64::from(logprob(logits[token], params.temperature, normalizer)).exp();
        let got = f64::from(count) / f64::from(total);
        let spread = (want * (1.0 - want) / f64::from(total)).sqrt();
        assert!((got - want).abs() < 5.0 * spread + 1e-4, "{token}: {got} instead of {want}");
    }
}

#[test]
fn top_tokens_are_sorted_and_limited_by_the_vocabulary() {
    let mut sampler = TokenSampler::default();
    let logits = [1.0, 3.0, 1.0, 2.0];
    assert_eq!(sampler.top(&logits, 3), [(3.0, 1), (2.0, 3), (1.0, 0)]);
    assert_eq!(sampler.top(&logits, 9).len(), 4);
    assert!(sampler.top(&logits, 0).is_empty());
}

/// Samples by sorting all tokens and accumulating. Also returns whether no threshold is so close to
/// a cumulative probability that rounding errors decide.
fn reference(logits: &[f32], params: &DecodingParams, uniform: f64) -> (u32, bool) {
    let mut order: Vec<u32> = (0..u32::try_from(logits.len()).unwrap()).collect();
    let logit = |token: u32| f64::from(logits[token as usize]);
    order.sort_by(|&a, &b| logit(b).total_cmp(&logit(a)).then(a.cmp(&b)));
    if params.temperature == 0.0 {
        return (order[0], true);
    }
    if let Ok(k @ 1..) = usize::try_from(params.top_k) {
        order.truncate(k);
    }
    let top = logit(order[0]);
    let weight = |token: u32| ((logit(token) - top) / params.temperature).exp();
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut clear = true;
    if params.top_p < 1.0 {
        let mut sum = 0.0;
        let cut = order.iter().position(|&token| {
            sum += weight(token);
            clear &= (sum / total - params.top_p).abs() > 1e-9;
            sum >= params.top_p * total
        });
        order.truncate(cut.map_or(order.len(), |cut| cut + 1));
    }
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut sum = 0.0;
    for &token in &order {
        sum += weight(token);
        clear &= (sum / total - uniform).abs() > 1e-9;
        if sum > uniform * total {
            return (token, clear);
        }
    }
    (order[order.len() - 1], false)
}

proptest! {
    #[test]
    fn sampling_matches_the_reference(
        logits in prop::collection::vec(-30.0_f32..10.0, 1..200),
        temperature in prop_oneof![Just(0.0), 0.05_f64..3.0],
        top_k in -1_i64..220,
        top_p in prop_oneof![Just(1.0), 0.01_f64..1.0],
        uniform in 0.0_f64..1.0,
    ) {
        let params = DecodingParams { temperature, top_k, top_p };
        let normalizer = log_normalizer(&logits, temperature);
        let got = TokenSampler::default().sample(&logits, &params, normalizer, uniform).unwrap();
        let (want, clear) = reference(&logits, &params, uniform);
        // Where rounding decides, both neighbours are valid.
        prop_assume!(clear);
        prop_assert_eq!(got, want);
    }

    #[test]
    fn extreme_temperatures_do_not_panic(
        logits in prop::collection::vec(any::<f32>(), 0..40),
        temperature in prop_oneof![Just(0.0), Just(f64::MIN_POSITIVE), Just(1e300), 1e-12_f64..1e3],
        top_p in f64::MIN_POSITIVE..1.0,
        uniform in 0.0_f64..1.0,
    ) {
        let params = DecodingParams { temperature, top_p, ..DecodingParams::default() };
        let normalizer = log_normalizer(&logits, temperature);
        let sampled = TokenSampler::default().sample(&logits, &params, normalizer, uniform);
        if let Ok(token) = sampled {
            prop_assert!((token as usize) < logits.len());
        }
    }
}
