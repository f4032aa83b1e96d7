//! Golden cases of `fixtures/behaviour` that concern this crate.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tinkex_autodiff::{is_input_name, is_metric_name};
use tinkex_wire::*;

use crate::fixtures::{files, load};

/// Checks the cases of one file.
type Check = fn(&Value);

/// Check of each file.
const CHECKS: &[(&str, Check)] = &[
    ("byte_estimates.json", sizes_are_estimated_like_the_reference),
    ("client_config_defaults.json", omitted_settings_have_the_reference_defaults),
    ("custom_loss.json", custom_losses_follow_the_naming_rules),
    ("future_retrieve.json", poll_responses_are_distinguished),
    ("optimizer_params.json", optimizer_parameters_are_encoded_and_validated),
    ("sampler_handle.json", handles_are_exchanged_with_the_reference),
    ("sampling_validation.json", sampling_requests_and_responses_are_validated),
    ("telemetry_events.json", telemetry_events_are_encoded_like_the_reference),
    ("tinker_path.json", paths_are_parsed_like_the_reference),
];

/// Files that the tests of the client read.
const READ_ELSEWHERE: [&str; 27] = [
    "auth_resolution.json",
    "base_url.json",
    "billing_pause.json",
    "bytes_semaphore.json",
    "chunking.json",
    "client_pool.json",
    "credentials_file.json",
    "empty_400.json",
    "error_mapping.json",
    "execute_with_retries.json",
    "futures_poller.json",
    "heartbeat.json",
    "http_retry_delay.json",
    "jwt.json",
    "metrics_reduction.json",
    "queue_state_log.json",
    "regularizers.json",
    "retry_after_parsing.json",
    "retry_classification.json",
    "retry_handler_delay.json",
    "sampling_backoff.json",
    "sampling_concurrency.json",
    "sampling_recent_backoff.json",
    "should_retry.json",
    "telemetry_env.json",
    "tokenizer_id.json",
    "turn_taking.json",
];

#[test]
fn all_golden_cases_pass() {
    for file in files("behaviour") {
        if READ_ELSEWHERE.contains(&file.as_str()) {
            continue;
        }
        let check = CHECKS.iter().find(|(name, _)| *name == file);
        let (_, check) = check.unwrap_or_else(|| panic!("no test reads {file}"));
        check(&load("behaviour", &file));
    }
}

fn cases(file: &Value) -> &[Value] {
    file["cases"].as_array().unwrap()
}

fn paths_are_parsed_like_the_reference(file: &Value) {
    for case in cases(file) {
        let text = case["path"].as_str().unwrap();
        let path = text.parse::<TinkerPath>();
        let run = case["training_run_id"].as_str();
        let id = case["checkpoint_id"].as_str();
        // Unlike the reference, this crate rejects an empty run or name.
        let empty = run == Some("") || id.is_some_and(|id| id.ends_with('/'));
        if case["ok"] == false || empty {
            let error = path.expect_err(text);
            assert_eq!(error.field(), "tinker_path");
            continue;
        }
        let path = path.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(Some(path.run().as_str()), run);
        assert_eq!(Some(&*path.checkpoint_id()), id);
        assert_eq!(Some(path.kind().as_str()), case["checkpoint_type"].as_str());
        assert_eq!(path.to_string(), text);
    }
}

fn sizes_are_estimated_like_the_reference(file: &Value) {
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    for case in cases(file) {
        let mut input = ModelInput::default();
        for chunk in case["chunks"].as_array().unwrap() {
            let raw = || Bytes::from(vec![0; number(&chunk["raw_bytes"])]);
            input = match chunk["type"].as_str().unwrap() {
                "encoded_text" => input.tokens(vec![7_u32; number(&chunk["length"])]),
                "image" => input.image(raw(), ImageFormat::Png),
                "dmel" => input.chunk(InputChunk::dmel(raw())),
                "image_asset_pointer" => {
                    let location = chunk["location"].as_str().unwrap();
                    input.chunk(InputChunk::image_url(location, ImageFormat::Png))
                }
                other => panic!("{other}"),
            };
        }
        assert_eq!(input.sampling_bytes(), number(&case["sampling_estimate"]), "{}", case["id"]);

        // Use custom names, whose lengths the builder does not check.
        let tensors = case["tensors"].as_object().unwrap().iter();
        let datum = tensors.fold(Datum::builder(input), |datum, (name, tensor)| {
            datum.loss_input(format!("my_{name}"), tensor_of(tensor, &number))
        });
        // A datum must not be empty.
        let Ok(datum) = datum.build() else {
            assert_eq!(case["id"], "text_0");
            continue;
        };
        assert_eq!(datum.training_bytes(), number(&case["training_estimate"]), "{}", case["id"]);
    }
}

fn tensor_of(tensor: &Value, number: &impl Fn(&Value) -> usize) -> TensorData {
    let n = number(&tensor["elements"]);
    if tensor["crow"].is_null() {
        return match tensor["dtype"].as_str().unwrap() {
            "int64" => TensorData::from(vec![0_i64; n]),
            _ => TensorData::from(vec![0.0_f32; n]),
        };
    }
    // Only the number of row starts and columns affects the estimate.
    let rows = number(&tensor["crow"]) - 1;
    let mut starts = vec![n as i64; rows + 1];
    starts[0] = 0;
    let columns: Vec<i64> = (0..n as i64).collect();
    TensorData::sparse(vec![0_i64; n], starts, columns, [rows, n]).unwrap()
}

/// Decodes an optimizer step with the given parameters.
fn step(params: &Value, field: &str) -> Result<OptimStep, DecodeError> {
    let body = json!({"model_id": "m", "seq_id": 3, "type": "optim_step", field: params});
    codec::json::decode(body.to_string().as_bytes())
}

fn optimizer_parameters_are_encoded_and_validated(file: &Value) {
    let adam = AdamParams::default();
    let dimuon = DimuonParams::with_learning_rate(0.01);
    let request = |params: OptimParams| {
        let step = OptimStep::new("m", params).seq_id(Seq::new(3));
        serde_json::to_value(step).unwrap()
    };
    for case in cases(file) {
        let wire = &case["wire"];
        let params = &case["params"];
        match case["id"].as_str().unwrap() {
            "adam_default" => assert_eq!(&request(adam.into())["adam_params"], wire),
            "dimuon" => assert_eq!(&request(dimuon.into())["optimizer_params"], wire),
            "custom_family" => {
                let step = step(wire, "optim_params").unwrap();
                assert!(matches!(step.params, OptimParams::Other(_)));
                assert_eq!(&request(step.params)["optimizer_params"], wire);
            }
            "config_adam" => {
                assert_eq!(&serde_json::to_value(OptimizerConfig::default()).unwrap(), wire);
            }
            "config_dimuon" => {
                assert_eq!(&serde_json::to_value(OptimizerConfig::dimuon()).unwrap(), wire);
            }
            "optim_step_request_adam" => assert_eq!(&request(adam.into()), wire),
            "optim_step_request_dimuon" => assert_eq!(&request(dimuon.into()), wire),
            // The Python SDK does not check the ranges of Adam parameters. The decoder accepts the
            // same values, and `validate` refuses those that no server computes with.
            "adam_validate" => {
                let decoded = step(params, "adam_params");
                assert_eq!(decoded.is_ok(), case["ok"].as_bool().unwrap(), "{case}");
                let is_valid = decoded.is_ok_and(|step| step.params.validate().is_ok());
                assert!(!is_valid, "{case}");
            }
            "dimuon_validate" => {
                let mut params = params.clone();
                params["type"] = json!("dimuon");
                // JSON cannot represent NaN, so construct the value directly.
                let ok = if params["learning_rate"] == "nan" {
                    OptimParams::from(DimuonParams::with_learning_rate(f64::NAN)).validate().is_ok()
                } else {
                    step(&params, "optimizer_params")
                        .is_ok_and(|step| step.params.validate().is_ok())
                };
                assert_eq!(ok, case["ok"].as_bool().unwrap(), "{case}");
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn all_aliases_of_the_step_parameters_are_decoded() {
    for field in ["optim_params", "adam_params", "optimizer_params"] {
        let step = step(&json!({"learning_rate": 0.5}), field).unwrap();
        assert_eq!(step.params, AdamParams::with_learning_rate(0.5).into());
    }
    let nan = AdamParams::default().eps(f64::NAN);
    let step = OptimStep::new("m", nan);
    assert_eq!(step.body().unwrap_err().field(), "optim_params.eps");
}

#[test]
fn optimizer_parameters_out_of_range_are_rejected() {
    let adam = AdamParams::default();
    let dimuon = DimuonParams::with_learning_rate(0.1);
    let max = f64::from(f32::MAX);
    let valid: [OptimParams; 5] = [
        adam.learning_rate(0.0).beta1(0.0).beta2(0.0).eps(0.0).into(),
        adam.learning_rate(max).weight_decay(max).into(),
        adam.grad_clip_norm(-1.0).into(),
        dimuon.beta1(0.0).into(),
        dimuon.learning_rate(0.0).grad_clip_norm(-1.0).into(),
    ];
    for params in valid {
        assert_eq!(params.validate(), Ok(()), "{params:?}");
    }
    let invalid: [(OptimParams, &str); 10] = [
        (adam.learning_rate(-1.0).into(), "learning_rate"),
        (adam.learning_rate(max * 1.01).into(), "learning_rate"),
        (adam.beta1(2.0).into(), "beta1"),
        (adam.beta2(1.0).into(), "beta2"),
        (adam.eps(-1e-9).into(), "eps"),
        (adam.weight_decay(f64::NAN).into(), "weight_decay"),
        (adam.grad_clip_norm(f64::INFINITY).into(), "grad_clip_norm"),
        (dimuon.learning_rate(-1.0).into(), "learning_rate"),
        (dimuon.beta1(1.0).into(), "beta1"),
        (dimuon.grad_clip_norm(f64::NAN).into(), "grad_clip_norm"),
    ];
    for (params, field) in invalid {
        assert_eq!(params.validate().unwrap_err().field(), field, "{params:?}");
        let step = OptimStep::new("m", params);
        assert_eq!(step.body().unwrap_err().field(), format!("optim_params.{field}"));
    }
}

fn omitted_settings_have_the_reference_defaults(file: &Value) {
    let config: ClientConfig = codec::json::decode(b"{\"new_flag\":1}").unwrap();
    assert_eq!(serde_json::to_value(config).unwrap(), file["client_config"]);
    let dynamic: DynamicConfig = codec::json::decode(b"{}").unwrap();
    assert_eq!(serde_json::to_value(dynamic).unwrap(), file["client_dynamic_config"]);
}

fn sampling_requests_and_responses_are_validated(file: &Value) {
    let base = || SampleRequest::new([1, 2, 3], SamplingParams::new());
    for case in cases(file) {
        let value = case["value"].as_i64();
        let ok = match case["check"].as_str().unwrap() {
            "target_prompt_logprobs" => {
                let dims = case["shape"].as_array().map(|dims| {
                    let dim = |dim: &Value| usize::try_from(dim.as_u64().unwrap()).unwrap();
                    Shape::from(dims.iter().map(dim).collect::<Vec<_>>())
                });
                let shape = dims.unwrap_or(Shape::UNSPECIFIED);
                let values = match case["dtype"].as_str().unwrap() {
                    "int64" => TensorValues::Int64(vec![0; 6].into()),
                    _ => TensorValues::Float32(vec![0.0; 6].into()),
                };
                let targets = TensorData::new(values, shape).unwrap();
                base().target_prompt_logprobs(Some(targets)).validate().is_ok()
            }
            // The type cannot represent what the reference rejects, so decode it from JSON.
            "prompt_alt_tokens_k" => accepted_with("prompt_alt_tokens_k", &case["value"]),
            "prompt_logprobs_last_n" => {
                let mut body = serde_json::to_value(base()).unwrap();
                body["prompt_logprobs"] = case["include_prompt_logprobs"].clone();
                if value.is_some() {
                    body["prompt_logprobs_last_n"] = case["value"].clone();
                }
                accepted(&body)
            }
            "last_n_honored" => {
                let last = u32::try_from(value.unwrap()).unwrap();
                let request = base().prompt_logprobs_last_n(Some(last));
                let response = json!({"sequences": [], "prompt_logprobs": case["prompt_logprobs"]});
                let response = codec::json::decode(response.to_string().as_bytes()).unwrap();
                request.validate_response(&response).is_ok()
            }
            other => panic!("{other}"),
        };
        assert_eq!(ok, case["ok"].as_bool().unwrap(), "{case}");
    }
    let request = base().prompt_alt_tokens_k(2);
    let error = request.validate_response(&SampleResponse::default()).unwrap_err();
    assert_eq!(error.path(), "prompt_alt_tokens");
}

/// Returns whether a sampling request with the given value of one field is accepted.
fn accepted_with(name: &str, value: &Value) -> bool {
    let request = SampleRequest::new([1], SamplingParams::new());
    let mut body = serde_json::to_value(request).unwrap();
    body[name] = value.clone();
    accepted(&body)
}

/// Returns whether a sampling request decodes and is valid.
fn accepted(body: &Value) -> bool {
    codec::json::decode::<SampleRequest>(body.to_string().as_bytes())
        .is_ok_and(|request| request.validate().is_ok())
}

fn handles_are_exchanged_with_the_reference(file: &Value) {
    let text = file["handle"].as_str().unwrap();
    let handle = SamplerHandle::from_text(text).unwrap();
    assert_eq!(handle.to_text(), text, "field order and padding are part of the form");
    assert_eq!(serde_json::to_value(&handle).unwrap(), file["payload"]);
    assert!(SamplerHandle::from_text("no handle").is_err());

    // The key of a handle from another client is discarded.
    let mut payload = file["payload"].clone();
    payload["holder"]["api_key"] = json!("tml-secret");
    let foreign: SamplerHandle = serde_json::from_value(payload).unwrap();
    assert_eq!(foreign.to_text(), text);
    assert!(!format!("{foreign:?}").contains("tml-secret"));
}

fn telemetry_events_are_encoded_like_the_reference(file: &Value) {
    for case in file["cases"].as_array().unwrap() {
        if case["id"] != "events" {
            // The client implements queueing and batching.
            assert!(matches!(case["id"].as_str(), Some("sessionless" | "queue_cap" | "flush")));
            continue;
        }
        for event in case["events"].as_array().unwrap() {
            // The fixture omits the two fields that differ in every recording.
            let mut complete = event.clone();
            complete["event_id"] = json!("8d145ecc-cb8f-4fd3-a14a-52c12e327e44");
            complete["timestamp"] = json!("2026-11-15T17:56:21.141851Z");
            let read: TelemetryEvent = serde_json::from_value(complete.clone()).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), complete);
        }
    }
    for case in file["duration_text"].as_array().unwrap() {
        let micros = case["microseconds"].as_u64().unwrap();
        assert_eq!(json!(format_duration(Duration::from_micros(micros))), case["text"]);
    }
}

fn custom_losses_follow_the_naming_rules(file: &Value) {
    for rule in file["metric_key_rule"].as_array().unwrap() {
        assert_eq!(json!(is_metric_name(rule["key"].as_str().unwrap())), rule["ok"], "{rule}");
    }
    let upload = |name: &str| {
        let inputs = [("logprobs", 1), (name, 1)];
        let inputs = inputs.map(|(name, rank)| GraphInput::new(name, rank));
        CreateCustomLoss {
            session_id: "s".into(),
            custom_loss_seq_id: 0,
            name: "loss".to_owned(),
            // The first case is `logprobs`, which is always the first input.
            inputs: inputs.into_iter().skip(usize::from(name == "logprobs")).collect(),
            graph: LossGraph::new(vec![]),
        }
    };
    for rule in file["input_name_rule"].as_array().unwrap() {
        let name = rule["name"].as_str().unwrap();
        assert_eq!(json!(is_input_name(name)), rule["ok"], "{rule}");
        assert_eq!(json!(upload(name).validate().is_ok()), rule["ok"], "{rule}");
    }
}

/// Checks the decoded poll responses of the retrieve scripts; the client implements the loop.
fn poll_responses_are_distinguished(file: &Value) {
    let mut seen = BTreeSet::new();
    for case in cases(file) {
        for step in case["script"].as_array().unwrap() {
            let observed = || case["observer_calls"].as_array().unwrap();
            if let Some([status, body]) = step.as_array().map(Vec::as_slice) {
                if status == 408 {
                    let pending = PollResponse::decode_timeout(&body.to_string().into());
                    let state = pending.queue_state.map(QueueState::as_str);
                    let call = json!([state, pending.queue_state_reason]);
                    assert!(state.is_none() || observed().contains(&call), "{case}");
                }
                continue;
            }
            if !step.is_object() {
                continue;
            }
            let outcome =
                PollResponse::decode("application/json", &step.to_string().into()).unwrap();
            match &outcome {
                PollResponse::TryAgain(pending) => {
                    seen.insert("try_again");
                    let known = |state: &QueueState| *state != QueueState::Unknown;
                    let state = pending.queue_state.filter(known).map(QueueState::as_str);
                    let call = json!([state, pending.queue_state_reason]);
                    assert!(state.is_none() || observed().contains(&call), "{case}");
                }
                PollResponse::MetadataOnly { response_payload_size } => {
                    seen.insert("metadata");
                    let acquired = case["bytes_acquired"].as_array().unwrap();
                    assert!(acquired.contains(&json!(response_payload_size)), "{case}");
                }
                PollResponse::Failed(failed) => {
                    seen.insert("failed");
                    let text = step["error"].as_str().map_or("null".to_owned(), str::to_owned);
                    assert_eq!(failed.error, text);
                    // Unlike the reference, this crate ignores the case of category names.
                    let category = step["category"].as_str().unwrap_or("unknown");
                    assert_eq!(failed.category, ErrorCategory::from_name(category));
                }
                PollResponse::Ready(payload) => {
                    seen.insert("ready");
                    assert_eq!(payload.json().unwrap(), &step.to_string());
                }
            }
        }
    }
    assert_eq!(seen, ["failed", "metadata", "ready", "try_again"].into());
}
