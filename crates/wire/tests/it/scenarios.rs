//! Scenarios of `docs/scenarios.md` about the wire format.

use serde_json::{Value, json};
use tinkex_wire::*;

use crate::fixtures::Recorded;

fn to_json<T: serde::Serialize>(value: T) -> Value {
    serde_json::to_value(value).unwrap()
}

fn from_json<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// Covers T1.1.3.
#[test]
fn stop_reasons_are_decoded_with_a_fallback() {
    for (reason, word) in [(StopReason::Stop, "stop"), (StopReason::Length, "length")] {
        assert_eq!(to_json(reason), word);
        assert_eq!(from_json::<StopReason>(json!(word)), reason);
        assert_eq!(reason.as_str(), word);
    }
    assert_eq!(from_json::<StopReason>(json!("tool_call")), StopReason::Unknown);
    // Protobuf number 7 is unknown.
    let response = SampleResponse::from_proto(b"\x0a\x02\x08\x07").unwrap();
    assert_eq!(response.sequences[0].stop_reason, StopReason::Unknown);
}

/// Covers T0.1.1.
#[test]
fn recorded_stop_reasons_are_decoded() {
    // The first sample ends at a stop sequence, the other two at `max_tokens`.
    for (name, recorded, reason) in [
        ("retrieve_future_asample_minimal", "STOP_REASON_STOP", StopReason::Stop),
        ("retrieve_future_asample_stop_string_seed", "STOP_REASON_LENGTH", StopReason::Length),
    ] {
        let decoded = crate::fixtures::load("wire", &format!("{name}.response.decoded.json"));
        for sequence in decoded["sequences"].as_array().unwrap() {
            assert_eq!(sequence["stop_reason"], recorded, "the recording changed");
        }
        let response = Recorded(crate::fixtures::load("wire", &format!("{name}.response.json")));
        let response = SampleResponse::from_proto(&response.plain_body()).unwrap();
        assert!(!response.sequences.is_empty());
        for sequence in &response.sequences {
            assert_eq!(sequence.stop_reason, reason, "{name}");
            // Servers with JSON results send the lower-case word.
            let word = recorded.strip_prefix("STOP_REASON_").unwrap().to_lowercase();
            assert_eq!(from_json::<StopReason>(json!(word)), reason);
        }
    }
}

/// Covers T0.1.2.
#[test]
fn recorded_categories_are_decoded() {
    for (name, category) in [
        ("user", ErrorCategory::User),
        ("server", ErrorCategory::Server),
        ("unknown", ErrorCategory::Unknown),
    ] {
        let file = format!("retrieve_future_failed_{name}.response.json");
        let recorded = Recorded(crate::fixtures::load("wire", &file));
        let response = PollResponse::decode(JSON, &recorded.plain_body()).unwrap();
        let PollResponse::Failed(failed) = response else { panic!("{name}: {response:?}") };
        assert_eq!(failed.category, category);
        let word = recorded.json()["category"].as_str().unwrap();
        assert_eq!(word, word.to_lowercase(), "the protocol has lower-case categories");
        assert_eq!(failed.error, recorded.json()["error"].as_str().unwrap());
    }
}

/// Covers T0.1.2, T1.1.2.
#[test]
fn categories_are_decoded_without_case() {
    for word in ["user", "USER", "User"] {
        assert_eq!(from_json::<ErrorCategory>(json!(word)), ErrorCategory::User);
    }
    assert_eq!(from_json::<ErrorCategory>(json!("Server")), ErrorCategory::Server);
    for odd in [json!("weird"), json!(""), Value::Null, json!(7)] {
        assert_eq!(from_json::<ErrorCategory>(odd), ErrorCategory::Unknown);
    }
}

/// Covers T0.1.3, T1.2.4.
#[test]
fn images_are_encoded_as_recorded() {
    let recorded = crate::fixtures::load("wire", "asample_multimodal.request.json");
    let chunks = recorded["body"]["prompt"]["chunks"].as_array().unwrap();
    let [_, Value::Object(image), Value::Object(sized), Value::Object(pointer), _] = &chunks[..]
    else {
        panic!("the recorded chunks changed: {chunks:?}");
    };
    let data = |chunk: &InputChunk| match chunk {
        InputChunk::Image { data, .. } => data.clone(),
        other => panic!("{other:?}"),
    };
    let png = data(&from_json(Value::Object(image.clone())));
    assert!(png.starts_with(b"\x89PNG"), "the image data is decoded from Base64");
    let made = InputChunk::image(png.clone(), ImageFormat::Png);
    assert_eq!(to_json(made), Value::Object(image.clone()));
    let made = InputChunk::image(png, ImageFormat::Jpeg).expected_tokens(Some(4));
    assert_eq!(to_json(made), Value::Object(sized.clone()));
    let made = InputChunk::image_url("https://example.invalid/a.png", ImageFormat::Png);
    let made = made.expected_tokens(Some(5));
    assert_eq!(to_json(made), Value::Object(pointer.clone()));
}

/// Covers T0.1.4, T1.2.2.
#[test]
fn prompt_logprobs_true_false_and_null_have_golden_bodies() {
    let session = "11111111-2222-4333-8444-555555555555:sample:0";
    let request = |n: u64, params: SamplingParams, setting: Option<bool>| {
        SampleRequest::new([1, 2, 3, 4], params)
            .sampling_session_id(Some(session.into()))
            .seq_id(Seq::new(n))
            .prompt_logprobs(setting)
    };
    for (name, request) in [
        ("asample_minimal", request(0, SamplingParams::new(), Some(false))),
        ("asample_prompt_logprobs", request(5, SamplingParams::new().max_tokens(1), Some(true))),
    ] {
        let recorded = crate::fixtures::load("wire", &format!("{name}.request.json"));
        assert_eq!(to_json(&request), recorded["body"], "{name}");
        assert_eq!(from_json_text::<SampleRequest>(&recorded["body"]), request, "{name}");
    }
    // The field is omitted for null, like every null field of a request, and null is accepted.
    for (setting, field) in [
        (Some(true), r#""prompt_logprobs":true,"#),
        (Some(false), r#""prompt_logprobs":false,"#),
        (None, ""),
    ] {
        let request = request(0, SamplingParams::new(), setting);
        let golden = r#"{"type":"sample","num_samples":1,"#.to_owned()
            + r#""prompt":{"chunks":[{"type":"encoded_text","tokens":[1,2,3,4]}]},"#
            + r#""sampling_params":{"temperature":1.0,"top_k":-1,"top_p":1.0},"#
            + &format!(r#""sampling_session_id":"{session}","seq_id":0,{field}"#)
            + r#""topk_prompt_logprobs":0,"topk_sample_logprobs":0,"prompt_alt_tokens_k":0,"#
            + r#""record_stability_info":false}"#;
        let RequestBody::Json(body) = request.body().unwrap() else { panic!("not JSON") };
        assert_eq!(str::from_utf8(&body).unwrap(), golden);
        assert_eq!(codec::json::decode::<SampleRequest>(&body).unwrap(), request);
    }
    let mut with_null = to_json(request(0, SamplingParams::new(), None));
    with_null["prompt_logprobs"] = Value::Null;
    assert_eq!(from_json_text::<SampleRequest>(&with_null).prompt_logprobs, None);
}

/// Decodes the text of a JSON value, as a server does.
fn from_json_text<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    codec::json::decode(value.to_string().as_bytes()).unwrap()
}

/// Covers T1.1.1.
#[test]
fn enum_names_round_trip() {
    for (reason, word) in [
        (StopReason::Stop, "stop"),
        (StopReason::Length, "length"),
        (StopReason::Unknown, "unknown"),
    ] {
        assert_eq!(to_json(reason), word);
        assert_eq!(from_json::<StopReason>(json!(word)), reason);
        let sequence = SampledSequence::default().tokens([1]).stop_reason(reason);
        let response = SampleResponse::default().sequences(vec![sequence]);
        let decoded = SampleResponse::from_proto(&response.to_proto()).unwrap();
        assert_eq!(decoded.sequences[0].stop_reason, reason, "{word} in protobuf");
    }

    let losses = [
        (LossFn::CrossEntropy, "cross_entropy"),
        (LossFn::ImportanceSampling, "importance_sampling"),
        (LossFn::Ppo, "ppo"),
        (LossFn::Cispo, "cispo"),
        (LossFn::Dro, "dro"),
        (LossFn::Gspo, "gspo"),
        (LossFn::StableReinforce, "stable_reinforce"),
        (LossFn::Custom, "custom"),
        (LossFn::Other("brand_new".to_owned()), "brand_new"),
    ];
    assert!(LossFn::BUILT_IN.iter().eq(losses[..8].iter().map(|(loss, _)| loss)), "all losses");
    for (loss, word) in losses {
        assert_eq!(LossFn::from(word), loss);
        let data = vec![Datum::completion([1, 2], [3]).unwrap()];
        let pass = ForwardBackward::new("m", data, loss.clone());
        assert_eq!(to_json(JsonForwardBackward(&pass))["forward_backward_input"]["loss_fn"], word);
        let decoded = ForwardBackward::from_proto(&pass.to_proto().unwrap()).unwrap();
        assert_eq!(decoded.loss_fn, loss, "{word} in protobuf");
    }

    for (category, word) in [
        (ErrorCategory::Unknown, "unknown"),
        (ErrorCategory::Server, "server"),
        (ErrorCategory::User, "user"),
    ] {
        assert_eq!(to_json(category), word);
        assert_eq!(from_json::<ErrorCategory>(json!(word)), category);
    }

    for (tensor, dtype, word) in [
        (TensorData::from(vec![1_i64]), DType::Int64, "int64"),
        (TensorData::from(vec![1.0_f32]), DType::Float32, "float32"),
    ] {
        assert_eq!((tensor.dtype(), dtype.as_str()), (dtype, word));
        assert_eq!(from_json::<DType>(json!(word)), dtype);
        let body = to_json(&tensor);
        assert_eq!(body["dtype"], word);
        assert_eq!(from_json::<TensorData>(body).dtype(), dtype);
    }

    for (state, word) in [
        (QueueState::Active, "active"),
        (QueueState::PausedCapacity, "paused_capacity"),
        (QueueState::PausedRateLimit, "paused_rate_limit"),
    ] {
        assert_eq!((state.as_str(), QueueState::from_name(word)), (word, Some(state)));
    }
    for kind in CheckpointKind::ALL {
        assert_eq!(CheckpointKind::from_segment(kind.segment()), Some(kind));
        assert_eq!(to_json(kind), kind.as_str());
    }
    for (format, word) in [(ImageFormat::Png, "png"), (ImageFormat::Jpeg, "jpeg")] {
        assert_eq!(to_json(format), word);
        assert_eq!(ImageFormat::from_name(word), Some(format));
    }
}

/// Covers T1.2.1.
#[test]
fn optional_request_fields_have_defaults() {
    let request = SampleRequest::new([1], SamplingParams::new());
    assert_eq!((request.num_samples, request.seq_id), (1, None));
    let body = to_json(&request);
    for (field, default) in [
        ("num_samples", json!(1)),
        ("topk_prompt_logprobs", json!(0)),
        ("record_stability_info", json!(false)),
        ("type", json!("sample")),
    ] {
        assert_eq!(body[field], default, "defaults are sent");
    }
    // A body with only the required fields decodes to the same request.
    let required_fields = json!({"prompt": body["prompt"], "sampling_params": {}});
    let read: SampleRequest = from_json_text(&required_fields);
    assert_eq!(read, request.prompt_logprobs(None).record_stability_info(None));
    assert_eq!(from_json::<LoraConfig>(json!({"rank": 32})), LoraConfig::default());
    assert_eq!(from_json::<AdamParams>(json!({})), AdamParams::default());
    assert_eq!(CreateSession::default().sdk_version, SDK_VERSION);
}

/// Covers T1.2.3.
#[test]
fn numbers_are_converted_to_the_two_element_types() {
    let floats = TensorData::from(vec![0.1_f64, 1e300, f64::NAN]);
    let values = floats.as_f32().unwrap();
    assert_eq!((values[0], values[1]), (0.1, f32::INFINITY));
    assert!(values[2].is_nan());
    for tensor in [
        TensorData::from(vec![-1_i8, 2]),
        TensorData::from(vec![-1_i16, 2]),
        TensorData::from(vec![-1_i32, 2]),
        TensorData::from(vec![-1_i64, 2]),
    ] {
        assert_eq!(tensor.as_i64(), Some(&[-1, 2][..]));
    }
    for tensor in [
        TensorData::from(vec![1_u8, 2]),
        TensorData::from(vec![1_u16, 2]),
        TensorData::from(&[1_u32, 2][..]),
        TensorData::from([1_i32, 2]),
        [1_u8, 2].into_iter().collect(),
        TensorData::from(&Tokens::from([1, 2])),
        TensorData::from(Tokens::from(&vec![1, 2])),
        TensorData::from(&vec![1_u8, 2]),
        TensorData::from(&[1_i64, 2]),
    ] {
        assert_eq!(tensor.as_i64(), Some(&[1, 2][..]));
    }
    assert_eq!(TensorData::from(vec![u32::MAX]).as_i64(), Some(&[4_294_967_295][..]));

    let ints = vec![1_i64, 2];
    let floats = vec![0.5_f32];
    let at_ints = ints.as_ptr();
    let at_floats = floats.as_ptr();
    assert_eq!(TensorData::from(ints).as_i64().unwrap().as_ptr(), at_ints, "not copied");
    assert_eq!(TensorData::from(floats).as_f32().unwrap().as_ptr(), at_floats, "not copied");

    // The shape may be a list, null or missing.
    for (shape, dims) in [(json!([2, 1]), &[2, 1][..]), (Value::Null, &[])] {
        let tensor: TensorData =
            from_json(json!({"data": [1, 2], "dtype": "int64", "shape": shape}));
        assert_eq!(tensor.shape().dims(), dims);
        assert_eq!(tensor.rows(), 2);
    }
    let scalar = TensorData::scalar(2.5_f32);
    assert_eq!(to_json(&scalar), json!({"data": [2.5], "dtype": "float32", "shape": []}));
    assert_eq!(from_json::<TensorData>(to_json(&scalar)), scalar);
    assert_eq!((scalar.rank(), scalar.may_be_scalar()), (0, true));
    let unspecified: TensorData = from_json(json!({"data": [2.5], "dtype": "float32"}));
    assert_eq!((unspecified.rank(), unspecified.may_be_scalar()), (1, true));
    assert!(TensorData::from_rows(&[vec![1.0_f32, 2.0], vec![3.0]]).is_err(), "ragged");
    assert_eq!(TensorData::from_rows(&[[1_i64, 2], [3, 4]]).unwrap().shape().dims(), [2, 2]);
}

/// Covers T1.2.5.
#[test]
fn tensors_with_missing_values_round_trip() {
    // `roundtrip.rs` tests the general case as a property.
    let tensor = TensorData::from(vec![1.0_f32, f32::NAN, -0.0]).reshape([3, 1]).unwrap();
    let body = to_json(&tensor);
    assert_eq!(body, json!({"data": [1.0, null, -0.0], "dtype": "float32", "shape": [3, 1]}));
    assert_eq!(from_json_text::<TensorData>(&body), tensor);
}

/// Covers Q1.
#[test]
fn significant_nulls_are_encoded() {
    let finish = FinishDetails::new(FinishReason::Errored, None);
    assert_eq!(to_json(finish), json!({"reason": {"type": "errored"}, "detail": null}));
    assert_eq!(to_json(rest::CheckpointTtl { ttl_seconds: None }), json!({"ttl_seconds": null}));
    let metadata = [("k".to_owned(), Value::Null)].into_iter().collect();
    let session = CreateSession::default().user_metadata(Some(metadata));
    let body = to_json(session);
    assert_eq!(body["user_metadata"], json!({"k": null}), "nulls inside metadata are kept");
    assert_eq!(body.get("project_id"), None, "null fields of the request are omitted");
    let node = GraphNode::method("s", "sum", [GraphArg::node("x")]).kwarg("dim", GraphArg::None);
    assert_eq!(to_json(node)["kwargs"], json!({"dim": null}));
}
