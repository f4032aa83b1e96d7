//! Compatibility with older and newer peers, and validation of requests.

use bytes::Bytes;
use serde_json::{Value, json};
use tinkex_wire::*;

fn decode<T: serde::de::DeserializeOwned>(body: &Value) -> Result<T, DecodeError> {
    codec::json::decode(body.to_string().as_bytes())
}

/// The bodies were recorded from version 0.25 of the Python SDK.
#[test]
fn requests_of_older_clients_are_decoded() {
    let sample = json!({
        "num_samples": 1, "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "sampling_session_id": "s1:sample:0", "seq_id": 0, "prompt_logprobs": false,
        "topk_prompt_logprobs": 0, "type": "sample",
    });
    let expected = SampleRequest::new([1, 2], SamplingParams::new().max_tokens(2))
        .sampling_session_id(Some("s1:sample:0".into()))
        .seq_id(Seq::new(0))
        .record_stability_info(None);
    assert_eq!(decode::<SampleRequest>(&sample).unwrap(), expected);

    let create = json!({
        "session_id": "s1", "model_seq_id": 0, "base_model": "x", "type": "create_model",
        "lora_config": {"rank": 8, "train_unembed": true, "train_mlp": true, "train_attn": true},
    });
    let expected =
        CreateModel::new("s1".into(), 0, "x").lora_config(Some(LoraConfig::with_rank(8)));
    assert_eq!(decode::<CreateModel>(&create).unwrap(), expected);
}

#[test]
fn submit_responses_without_sequence_ids_are_decoded() {
    let submitted: SubmitResponse = decode(&json!({"request_id": "r"})).unwrap();
    assert_eq!(submitted.sample_sequence_ids, None);
}

#[test]
fn json_samples_of_older_servers_are_decoded() {
    let body = json!({
        "type": "sample",
        "sequences": [
            {"stop_reason": "length", "tokens": [5, 6], "logprobs": [-0.5, null]},
            {"stop_reason": "stop", "tokens": []},
        ],
        "prompt_logprobs": [null, -1.0],
        "topk_prompt_logprobs": [null, [[7, -0.25], [8, -2.0]], [[9, -0.5]]],
    });
    let payload = ResultPayload::Json(body.to_string().into());
    let response = SampleRequest::decode_output(&payload).unwrap();
    assert_eq!(response.sequences[0].tokens[..], [5, 6]);
    let logprobs = response.sequences[0].logprobs.as_ref().unwrap();
    assert_eq!(logprobs.iter().collect::<Vec<_>>(), [Some(-0.5), None]);
    assert_eq!(response.sequences[1].stop_reason, StopReason::Stop);
    assert_eq!(response.sequences[1].logprobs, None);
    assert_eq!(response.prompt_logprobs.as_ref().unwrap().get(1), Some(-1.0));
    let topk = response.topk_prompt_logprobs.as_ref().unwrap();
    let rows: Vec<_> = topk.rows().map(|row| row.map(Iterator::collect::<Vec<_>>)).collect();
    assert_eq!(rows, [None, Some(vec![(7, -0.25), (8, -2.0)]), Some(vec![(9, -0.5)])]);

    // Protobuf yields the same result.
    assert_eq!(SampleResponse::from_proto(&response.to_proto()).unwrap(), {
        let mut same = response.clone();
        same.sequences[0].logprobs = Some(vec![-0.5, f32::NAN].into());
        same
    });
    let again: SampleResponse = decode(&serde_json::to_value(&response).unwrap()).unwrap();
    assert_eq!(again, response);
}

#[test]
fn json_training_results_of_older_servers_are_decoded() {
    let body = json!({
        "loss_fn_output_type": "TorchLossReturn",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-1.0, null], "dtype": "float32", "shape": [2]}},
            {"logprobs": {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [2, 2]}},
            {"logprobs": {"dtype": "float32", "data": []}},
        ],
        "metrics": {"loss:sum": 1.5, "bad:mean": null},
    });
    let output =
        ForwardBackward::decode_output(&ResultPayload::Json(body.to_string().into())).unwrap();
    let outputs = &output.loss_fn_outputs;
    assert_eq!(outputs.len(), 3);
    assert!(outputs.get(0).unwrap().f32("logprobs").unwrap()[1].is_nan());
    assert_eq!(outputs.get(1).unwrap().tensor("logprobs").unwrap().shape().dims(), [2, 2]);
    assert_eq!(outputs.get(2).unwrap().f32("logprobs").unwrap(), [0.0; 0]);
    assert_eq!(output.metrics["loss:sum"], 1.5);
    assert!(output.metrics["bad:mean"].is_nan());
    let again: ForwardBackwardOutput = decode(&serde_json::to_value(&output).unwrap()).unwrap();
    assert_eq!(again.loss_fn_outputs, output.loss_fn_outputs);
}

#[test]
fn status_wrappers_of_older_servers_are_decoded() {
    let poll = |body: Value| PollResponse::decode("application/json", &body.to_string().into());
    assert_eq!(
        poll(json!({"status": "pending"})),
        Ok(PollResponse::TryAgain(QueueStatus::default()))
    );
    let done = poll(json!({"status": "completed", "result": {"path": "tinker://r/weights/a"}}));
    let Ok(PollResponse::Ready(payload)) = done else { panic!("{done:?}") };
    assert_eq!(SaveWeights::decode_output(&payload).unwrap().path, "tinker://r/weights/a");
    let failed =
        |error: &str, category| Ok(PollResponse::Failed(RequestFailed::new(error, category)));
    assert_eq!(
        poll(json!({"status": "failed", "error": {"message": "no", "category": "USER"}})),
        failed("no", ErrorCategory::User)
    );
    assert_eq!(
        poll(json!({"status": "failed"})),
        failed("the server did not report a reason", ErrorCategory::Unknown)
    );
    assert_eq!(poll(json!({"error": null})), failed("null", ErrorCategory::Unknown));
    assert!(poll(json!({"status": "completed"})).is_err(), "the result is missing");
    assert_eq!(
        poll(json!({"status": "failed", "error": {"message": "x"}, "category": "user"})),
        failed("x", ErrorCategory::User)
    );
    let proto = PollResponse::decode("Application/X-Protobuf; v=1", &Bytes::new());
    assert_eq!(proto, Ok(PollResponse::Ready(ResultPayload::Proto(Bytes::new()))));
    // A result may use the names of wrapper fields for other types.
    for result in [json!({"status": 7, "type": []}), json!([1]), json!("x"), json!({})] {
        let body: Bytes = result.to_string().into();
        assert_eq!(poll(result), Ok(PollResponse::Ready(ResultPayload::Json(body))));
    }
    assert!(PollResponse::decode("text/html", &"<html>".into()).is_err());
    assert!(PollResponse::decode("application/json", &"{\"a\":".into()).is_err());
}

#[test]
fn unknown_fields_of_newer_servers_are_ignored() {
    let body = json!({"session_id": "s", "type": "create_session", "new": {"deep": [1]}});
    let response = SessionCreated::from_body(&body.to_string().into()).unwrap();
    assert_eq!(response.session_id.as_str(), "s");
}

#[test]
fn unexpected_tags_and_values_are_named() {
    let wrong = |body: Value| SessionCreated::from_body(&body.to_string().into()).unwrap_err();
    let error = wrong(json!({"session_id": "s", "type": "create_model"}));
    assert_eq!((error.kind(), error.path()), (DecodeErrorKind::Value, "type"));
    let error = wrong(json!({"session_id": 7}));
    assert_eq!((error.kind(), error.path()), (DecodeErrorKind::Json, "session_id"));
    let cut = SessionCreated::from_body(&"{\"session_id\":\"s".into()).unwrap_err();
    assert_eq!(cut.kind(), DecodeErrorKind::Truncated);

    // Values outside the protocol.
    let search = json!({"sessions": [{
        "session_id": "s", "created_at": 0, "owner": "o", "project_id": "p",
        "checkpoints_count": 0, "status": {"type": "sleeping"},
    }]});
    let error = rest::SessionSearchPage::from_body(&search.to_string().into()).unwrap_err();
    assert!(error.path().starts_with("sessions[0].status"), "{error}");
    assert!(
        decode::<FuturesRetrieved>(
            &json!({"completions": [{"state": "lost", "request_id": "r"}], "cursor": 0})
        )
        .is_err()
    );
    let without_state = json!({"completions": [{"request_id": "r"}], "cursor": 0});
    let decoded: FuturesRetrieved = decode(&without_state).unwrap();
    let finished = matches!(decoded.completions[0], CompletedFuture::Finished { .. });
    assert!(finished, "the default state is finished");
    assert!(decode::<Health>(&json!({"status": "ill"})).is_err());
    assert!(decode::<TelemetryResponse>(&json!({"status": "refused"})).is_err());
}

#[test]
fn errors_in_results_name_their_path() {
    let payload =
        ResultPayload::Json(json!({"type": "save_weights", "path": "p"}).to_string().into());
    let error = CreateModel::decode_output(&payload).unwrap_err();
    assert_eq!(error.path(), "type");
    let error = CreateModel::decode_output(&ResultPayload::Proto(Bytes::new())).unwrap_err();
    assert_eq!(error.kind(), DecodeErrorKind::Json);
    // Other JSON must not decode as an empty result.
    for body in [
        json!({"type": "create_model", "model_id": "x"}),
        json!({"status": "queued", "detail": "hold on"}),
        json!([]),
    ] {
        let payload = ResultPayload::Json(body.to_string().into());
        assert!(ForwardBackward::decode_output(&payload).is_err(), "{body}");
        assert!(SampleRequest::decode_output(&payload).is_err(), "{body}");
    }
    let payload =
        ResultPayload::Json(json!({"type": "create_model", "sequences": []}).to_string().into());
    assert_eq!(SampleRequest::decode_output(&payload).unwrap_err().path(), "type");
    let body =
        json!({"sequences": [{"stop_reason": "stop", "tokens": [1, 2], "logprobs": [-1.0]}]});
    let error =
        SampleRequest::decode_output(&ResultPayload::Json(body.to_string().into())).unwrap_err();
    assert_eq!(error.path(), "sequences[0].logprobs");
}

#[test]
fn sequence_ids_are_assigned_from_the_submit_response() {
    let sequences = vec![SampledSequence::default(); 2];
    let mut response = SampleResponse::default().sequences(sequences);
    let submitted = |ids: Option<Vec<&str>>| {
        let ids = ids.map(|ids| ids.into_iter().map(Into::into).collect());
        SubmitResponse::new("r").sample_sequence_ids(ids)
    };
    response.assign_sequence_ids(&submitted(None)).unwrap();
    assert_eq!(response.sequences[0].sequence_id, None, "older servers send no ids");
    let error = response.assign_sequence_ids(&submitted(Some(vec!["a"]))).unwrap_err();
    assert_eq!(error.path(), "sample_sequence_ids");
    response.assign_sequence_ids(&submitted(Some(vec!["a", "b"]))).unwrap();
    assert_eq!(response.sequences[1].sequence_id.as_ref().unwrap(), &"b");
}

#[test]
fn ttl_seconds_is_required() {
    use tinkex_wire::rest::CheckpointTtl;
    assert!(decode::<CheckpointTtl>(&json!({})).is_err());
    assert_eq!(decode::<CheckpointTtl>(&json!({"ttl_seconds": null})).unwrap().ttl_seconds, None);
}

#[test]
fn optimizer_defaults_to_adamw() {
    assert_eq!(decode::<OptimizerConfig>(&json!({})).unwrap(), OptimizerConfig::adamw());
    let settings = [("type".to_owned(), json!("x"))].into_iter().collect();
    let odd = OptimizerConfig::new("adamw", settings);
    assert_eq!(serde_json::to_string(&odd).unwrap(), r#"{"type":"adamw"}"#);
    let dimuon = DimuonParams::with_learning_rate(0.5);
    let body = serde_json::to_value(dimuon).unwrap();
    assert_eq!(
        decode::<DimuonParams>(&body).unwrap(),
        dimuon,
        "decoding is the inverse of encoding"
    );
}

#[test]
fn empty_query_parameters_are_omitted() {
    let storage = rest::StorageUsageRequest::default().project_id(Some(String::new()));
    assert_eq!(storage.target().unwrap(), "/api/v1/billing/usage/checkpoints/current");
    let error = codec::query::decode::<rest::ListSessions>("limit=many").unwrap_err();
    assert_eq!((error.kind(), error.path()), (DecodeErrorKind::Value, "query"));
}

#[test]
fn secrets_are_not_in_debug_output() {
    let mut load = LoadWeights::as_new_model("s".into(), 0, "tinker://r/weights/a");
    load.weights_access_token = Some("tml-hidden".into());
    assert!(!format!("{load:?}").contains("hidden"));
    let token = AuthToken::new("eyJhidden");
    assert!(!format!("{token:?}").contains("hidden"));
    let mut holder =
        HandleHolder::new("http://h", ClientConfig::default(), DynamicConfig::default());
    holder.default_headers_overrides = Some([("X-Key".to_owned(), "hidden".to_owned())].into());
    assert!(!format!("{holder:?}").contains("hidden"));
    let body = load.body().unwrap().bytes();
    assert!(
        String::from_utf8_lossy(&body).contains("tml-hidden"),
        "the request body contains the token"
    );
    holder.base_url = "https://me:hidden@h/p?key=hidden".to_owned();
    assert!(!format!("{holder:?}").contains("hidden") && format!("{holder:?}").contains("h/p"));
}

#[test]
fn signed_urls_are_redacted_in_debug_output() {
    let signed = "https://files.example/hidden/a.bin?X-Signature=hidden";
    let urls: rest::ExternalWeightsUrls =
        decode(&json!({ "urls": { "a.bin": signed }, "expires": "2026-01-01T00:00:00Z" })).unwrap();
    let debug = format!("{urls:?}");
    assert!(debug.contains("a.bin") && debug.contains("https://files.example"), "{debug}");
    assert!(!debug.contains("hidden"), "{debug}");
    assert_eq!(urls.urls["a.bin"], signed, "the value itself is not redacted");

    let trace: rest::TraceExport = decode(&json!({ "status": "ready", "url": signed })).unwrap();
    let debug = format!("{trace:?}");
    assert!(debug.contains("files.example") && !debug.contains("hidden"), "{debug}");

    let location = "https://images.example/cat.png?sig=hidden";
    let image = InputChunk::image_url(location, ImageFormat::Png);
    let request = SampleRequest::new(ModelInput::default().chunk(image), SamplingParams::new());
    let debug = format!("{request:?}");
    assert!(debug.contains("images.example/cat.png") && !debug.contains("hidden"), "{debug}");
}

#[test]
fn invalid_requests_are_rejected_before_encoding() {
    let field = |error: Result<RequestBody, InvalidInput>| error.unwrap_err().field().to_owned();
    let nan = SampleRequest::new([1], SamplingParams::new().temperature(f64::NAN));
    assert_eq!(field(nan.body()), "sampling_params.temperature");

    let mut create =
        CreateModel::new("s".into(), 0, "m").lora_config(Some(LoraConfig::with_rank(0)));
    assert_eq!(field(create.body()), "lora_config.rank");
    let none = LoraConfig::default().train_attn(false).train_mlp(false).train_unembed(false);
    create.lora_config = Some(none);
    assert_eq!(field(create.body()), "lora_config.train_attn");

    let mut session = CreateSamplingSession::from_base("s".into(), 0, "m");
    session.base_model = None;
    assert_eq!(field(session.body()), "model_path");
    session.model_path = Some("/tmp/x".to_owned());
    assert_eq!(field(session.body()), "model_path");

    let mut load = LoadWeights::into_model("m".into(), Seq::FIRST, "tinker://r/weights/a");
    load.session_id = Some("s".into());
    assert_eq!(field(load.body()), "model_id");
    load.model_seq_id = Some(0);
    assert_eq!(field(load.body()), "model_id");

    let path: TinkerPath = "tinker://r/weights/a".parse().unwrap();
    assert_eq!(field(rest::ExternalWeightsUrlsRequest::new(path).body()), "tinker_path");

    let search = rest::SearchSessions::default().limit(201);
    assert_eq!(field(search.body()), "limit");
    let finished = rest::SessionStatusFilter::ClientFinished { reasons: Some(vec![]) };
    let search = rest::SearchSessions::default().statuses([finished]);
    assert_eq!(field(search.body()), "statuses.reasons");

    let telemetry = TelemetryBatch::new(vec![], "Linux", "s", "p");
    assert_eq!(field(telemetry.body()), "events");

    let pointer = InputChunk::image_url("https://example.invalid/a.png", ImageFormat::Png);
    let input = ModelInput::from_tokens([1]).chunk(pointer.expected_tokens(Some(1)));
    let data = vec![Datum::builder(input).build().unwrap()];
    let mut train = ForwardBackward::new("m", data, LossFn::CrossEntropy);
    assert_eq!(field(train.body()), "data[0].model_input[1]");
    let spans = vec![ProvenanceSpan::prompt("q", u64::MAX, 1)];
    let datum = Datum::builder([1]).provenance(spans.clone(), spans).build().unwrap();
    train.data = vec![datum];
    assert_eq!(field(train.body()), "data[0].provenance");
    let image = InputChunk::image(Bytes::new(), ImageFormat::Png).expected_tokens(Some(u32::MAX));
    train.data = vec![Datum::builder(ModelInput::default().chunk(image)).build().unwrap()];
    assert_eq!(field(train.body()), "data[0].model_input[0]");
    train.data.clear();
    train.seq_id = Some(Seq::new(1 << 31));
    assert_eq!(field(train.body()), "seq_id");
    assert_eq!(
        train.validate().unwrap_err().field(),
        "seq_id",
        "validate and body return the same error"
    );
}
