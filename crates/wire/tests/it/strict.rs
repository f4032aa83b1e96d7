//! Old servers and new ones: what may be missing, what may be left out, what is never lost.

use bytes::Bytes;
use serde_json::{Value, json};
use tinkex_wire::*;

fn read<T: serde::de::DeserializeOwned>(body: &Value) -> Result<T, DecodeError> {
    codec::json::decode(body.to_string().as_bytes())
}

fn lean<T: ApiRequest>(call: &T) -> Value {
    let body = codec::json::without_defaults(T::ROUTE, &call.body().unwrap().bytes());
    serde_json::from_slice(&body).unwrap()
}

/// These two bodies are what SDK 0.25 sends, recorded from it.
#[test]
fn without_defaults_bodies_hold_nothing_that_0_25_servers_do_not_know() {
    let mut sample = SampleRequest::new([1, 2], SamplingParams::new().max_tokens(2));
    sample.sampling_session_id = Some("s1:sample:0".into());
    sample.seq_id = Some(Seq::new(0));
    let recorded = json!({
        "num_samples": 1, "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "sampling_session_id": "s1:sample:0", "seq_id": 0, "prompt_logprobs": false,
        "topk_prompt_logprobs": 0, "type": "sample",
    });
    let sent = lean(&sample);
    for (key, value) in sent.as_object().unwrap() {
        assert_eq!(Some(value), recorded.get(key), "{key} is not known there");
    }
    assert_eq!(read::<SampleRequest>(&recorded).unwrap().prompt, sample.prompt);

    let create = CreateModel {
        session_id: "s1".into(),
        model_seq_id: 0,
        base_model: "x".to_owned(),
        user_metadata: None,
        lora_config: Some(LoraConfig::with_rank(8)),
        optimizer_config: OptimizerConfig::default(),
    };
    let recorded = json!({
        "session_id": "s1", "model_seq_id": 0, "base_model": "x", "type": "create_model",
        "lora_config": {"rank": 8, "train_unembed": true, "train_mlp": true, "train_attn": true},
    });
    assert_eq!(lean(&create), recorded);
    assert_eq!(read::<CreateModel>(&recorded).unwrap(), create);
}

#[test]
fn without_defaults_keeps_what_was_asked_for() {
    let mut sample = SampleRequest::new([1], SamplingParams::new());
    sample.topk_sample_logprobs = 3;
    sample.prompt_logprobs = Some(true);
    let sent = lean(&sample);
    assert_eq!(
        (&sent["topk_sample_logprobs"], &sent["prompt_logprobs"]),
        (&json!(3), &json!(true))
    );
    assert_eq!(sent.get("prompt_alt_tokens_k"), None);

    let beat = SessionHeartbeat::new("s");
    assert_eq!(lean(&beat), serde_json::to_value(beat).unwrap(), "nothing optional here");
}

#[test]
fn tickets_without_sequence_ids_are_tickets() {
    let ticket: SubmitResponse = read(&json!({"request_id": "r"})).unwrap();
    assert_eq!(ticket.sample_sequence_ids, None);
}

#[test]
fn json_samples_of_older_servers_are_read() {
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

    // And the same through protobuf.
    assert_eq!(SampleResponse::from_proto(&response.to_proto()).unwrap(), {
        let mut same = response.clone();
        same.sequences[0].logprobs = Some(vec![-0.5, f32::NAN].into());
        same
    });
    let again: SampleResponse = read(&serde_json::to_value(&response).unwrap()).unwrap();
    assert_eq!(again, response);
}

#[test]
fn json_training_results_of_older_servers_are_read() {
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
    let again: ForwardBackwardOutput = read(&serde_json::to_value(&output).unwrap()).unwrap();
    assert_eq!(again.loss_fn_outputs, output.loss_fn_outputs);
}

#[test]
fn status_wrappers_of_older_servers_are_read() {
    let outcome = |body: Value| PollResponse::decode("application/json", &body.to_string().into());
    assert_eq!(
        outcome(json!({"status": "pending"})),
        Ok(PollResponse::TryAgain(QueueStatus::default()))
    );
    let done = outcome(json!({"status": "completed", "result": {"path": "tinker://r/weights/a"}}));
    let Ok(PollResponse::Ready(payload)) = done else { panic!("{done:?}") };
    assert_eq!(SaveWeights::decode_output(&payload).unwrap().path, "tinker://r/weights/a");
    let failed = |error: &str, category| {
        Ok(PollResponse::Failed(RequestFailed { error: error.to_owned(), category }))
    };
    assert_eq!(
        outcome(json!({"status": "failed", "error": {"message": "no", "category": "USER"}})),
        failed("no", ErrorCategory::User)
    );
    assert_eq!(
        outcome(json!({"status": "failed"})),
        failed("the server gave no reason", ErrorCategory::Unknown)
    );
    assert_eq!(outcome(json!({"error": null})), failed("null", ErrorCategory::Unknown));
    // Results that happen to use the same names for other things are results.
    assert!(outcome(json!({"status": "completed"})).is_err(), "completed, but with what?");
    assert_eq!(
        outcome(json!({"status": "failed", "error": {"message": "x"}, "category": "user"})),
        failed("x", ErrorCategory::User)
    );
    let proto = PollResponse::decode("Application/X-Protobuf; v=1", &Bytes::new());
    assert_eq!(proto, Ok(PollResponse::Ready(ResultPayload::Proto(Bytes::new()))));
    for result in [json!({"status": 7, "type": []}), json!([1]), json!("x"), json!({})] {
        let body: Bytes = result.to_string().into();
        assert_eq!(outcome(result), Ok(PollResponse::Ready(ResultPayload::Json(body))));
    }
    assert!(PollResponse::decode("text/html", &"<html>".into()).is_err());
    assert!(PollResponse::decode("application/json", &"{\"a\":".into()).is_err());
}

#[test]
fn replies_of_newer_servers_keep_their_known_parts() {
    let body = json!({"session_id": "s", "type": "create_session", "new": {"deep": [1]}});
    let reply = SessionCreated::from_body(&body.to_string().into()).unwrap();
    assert_eq!(reply.session_id.as_str(), "s");
}

#[test]
fn a_wrong_tag_or_value_in_a_reply_is_named() {
    let wrong = |body: Value| SessionCreated::from_body(&body.to_string().into()).unwrap_err();
    let error = wrong(json!({"session_id": "s", "type": "create_model"}));
    assert_eq!((error.kind(), error.path()), (DecodeErrorKind::Value, "type"));
    let error = wrong(json!({"session_id": 7}));
    assert_eq!((error.kind(), error.path()), (DecodeErrorKind::Json, "session_id"));
    let cut = SessionCreated::from_body(&"{\"session_id\":\"s".into()).unwrap_err();
    assert_eq!(cut.kind(), DecodeErrorKind::Truncated);

    // TensorValues that the protocol does not let through.
    let search = json!({"sessions": [{
        "session_id": "s", "created_at": 0, "owner": "o", "project_id": "p",
        "checkpoints_count": 0, "status": {"type": "sleeping"},
    }]});
    let error = rest::SessionSearchPage::from_body(&search.to_string().into()).unwrap_err();
    assert!(error.path().starts_with("sessions[0].status"), "{error}");
    assert!(
        read::<FuturesRetrieved>(
            &json!({"completions": [{"state": "lost", "request_id": "r"}], "cursor": 0})
        )
        .is_err()
    );
    let silent = json!({"completions": [{"request_id": "r"}], "cursor": 0});
    let silent: FuturesRetrieved = read(&silent).unwrap();
    assert!(matches!(silent.completions[0], CompletedFuture::Finished { .. }), "the default state");
    assert!(read::<Health>(&json!({"status": "ill"})).is_err());
    assert!(read::<TelemetryResponse>(&json!({"status": "refused"})).is_err());
}

#[test]
fn a_wrong_polled_result_is_an_error_with_its_place() {
    let payload =
        ResultPayload::Json(json!({"type": "save_weights", "path": "p"}).to_string().into());
    let error = CreateModel::decode_output(&payload).unwrap_err();
    assert_eq!(error.path(), "type");
    let error = CreateModel::decode_output(&ResultPayload::Proto(Bytes::new())).unwrap_err();
    assert_eq!(error.kind(), DecodeErrorKind::Json);
    // What is not such a result at all must not pass for an empty one.
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
fn samples_get_the_names_that_came_with_the_ticket() {
    let sequences = vec![SampledSequence::default(); 2];
    let mut response = SampleResponse { sequences, ..Default::default() };
    let ticket = |names: Option<Vec<&str>>| SubmitResponse {
        request_id: "r".into(),
        model_id: None,
        sample_sequence_ids: names.map(|names| names.into_iter().map(Into::into).collect()),
    };
    response.assign_sequence_ids(&ticket(None)).unwrap();
    assert_eq!(response.sequences[0].sequence_id, None, "older servers say nothing");
    let error = response.assign_sequence_ids(&ticket(Some(vec!["a"]))).unwrap_err();
    assert_eq!(error.path(), "sample_sequence_ids");
    response.assign_sequence_ids(&ticket(Some(vec!["a", "b"]))).unwrap();
    assert_eq!(response.sequences[1].sequence_id.as_ref().unwrap(), &"b");
}

#[test]
fn a_ttl_must_be_said_to_be_removed() {
    use tinkex_wire::rest::CheckpointTtl;
    assert!(read::<CheckpointTtl>(&json!({})).is_err());
    assert_eq!(read::<CheckpointTtl>(&json!({"ttl_seconds": null})).unwrap().ttl_seconds, None);
}

#[test]
fn an_optimizer_without_a_name_is_the_default_one() {
    assert_eq!(read::<OptimizerConfig>(&json!({})).unwrap(), OptimizerConfig::adamw());
    let odd = OptimizerConfig {
        settings: [("type".to_owned(), json!("x"))].into_iter().collect(),
        ..OptimizerConfig::adamw()
    };
    assert_eq!(serde_json::to_string(&odd).unwrap(), r#"{"type":"adamw"}"#);
    let dimuon = DimuonParams::with_learning_rate(0.5);
    let body = serde_json::to_value(dimuon).unwrap();
    assert_eq!(read::<DimuonParams>(&body).unwrap(), dimuon, "it reads what it writes");
}

#[test]
fn empty_query_parameters_are_left_out() {
    let storage = rest::StorageUsageRequest::default().project_id(Some(String::new()));
    assert_eq!(storage.target().unwrap(), "/api/v1/billing/usage/checkpoints/current");
    let error = codec::query::decode::<rest::ListSessions>("limit=many").unwrap_err();
    assert_eq!((error.kind(), error.path()), (DecodeErrorKind::Value, "query"));
}

#[test]
fn secrets_do_not_print() {
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
    assert!(String::from_utf8_lossy(&body).contains("tml-hidden"), "but they are sent");
    holder.base_url = "https://me:hidden@h/p?key=hidden".to_owned();
    assert!(!format!("{holder:?}").contains("hidden") && format!("{holder:?}").contains("h/p"));
}

#[test]
fn addresses_that_need_no_credential_do_not_print() {
    let signed = "https://files.example/hidden/a.bin?X-Signature=hidden";
    let urls: rest::ExternalWeightsUrls =
        read(&json!({ "urls": { "a.bin": signed }, "expires": "2026-01-01T00:00:00Z" })).unwrap();
    let shown = format!("{urls:?}");
    assert!(shown.contains("a.bin") && shown.contains("https://files.example"), "{shown}");
    assert!(!shown.contains("hidden"), "{shown}");
    assert_eq!(urls.urls["a.bin"], signed, "but they are there");

    let trace: rest::TraceExport = read(&json!({ "status": "ready", "url": signed })).unwrap();
    let shown = format!("{trace:?}");
    assert!(shown.contains("files.example") && !shown.contains("hidden"), "{shown}");

    let location = "https://pictures.example/cat.png?sig=hidden".to_owned();
    let picture =
        InputChunk::ImageAssetPointer { format: ImageFormat::Png, location, expected_tokens: None };
    let request = SampleRequest::new(ModelInput::default().chunk(picture), SamplingParams::new());
    let shown = format!("{request:?}");
    assert!(shown.contains("pictures.example/cat.png") && !shown.contains("hidden"), "{shown}");
}

#[test]
fn requests_that_no_server_could_understand_are_refused_before_sending() {
    let field = |error: Result<RequestBody, InvalidInput>| error.unwrap_err().field().to_owned();
    let nan = SampleRequest::new([1], SamplingParams::new().temperature(f64::NAN));
    assert_eq!(field(nan.body()), "sampling_params.temperature");

    let mut create = CreateModel {
        session_id: "s".into(),
        model_seq_id: 0,
        base_model: "m".to_owned(),
        user_metadata: None,
        lora_config: Some(LoraConfig::with_rank(0)),
        optimizer_config: OptimizerConfig::default(),
    };
    assert_eq!(field(create.body()), "lora_config.rank");
    let none = LoraConfig {
        train_attn: false,
        train_mlp: false,
        train_unembed: false,
        ..LoraConfig::default()
    };
    create.lora_config = Some(none);
    assert_eq!(field(create.body()), "lora_config.train_attn");

    let mut session = CreateSamplingSession {
        session_id: "s".into(),
        sampling_session_seq_id: 0,
        base_model: None,
        model_path: None,
    };
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

    let mut train = ForwardBackward::new(
        "m",
        vec![
            Datum::builder(ModelInput::from_tokens([1]).chunk(InputChunk::ImageAssetPointer {
                format: ImageFormat::Png,
                location: "https://example.invalid/a.png".to_owned(),
                expected_tokens: Some(1),
            }))
            .build()
            .unwrap(),
        ],
        LossFn::CrossEntropy,
    );
    assert_eq!(field(train.body()), "data[0].model_input[1]");
    let spans = vec![ProvenanceSpan::prompt("q", u64::MAX, 1)];
    let datum = Datum::builder([1]).provenance(spans.clone(), spans).build().unwrap();
    train.data = vec![datum];
    assert_eq!(field(train.body()), "data[0].provenance");
    let image = InputChunk::Image {
        data: Bytes::new(),
        format: ImageFormat::Png,
        expected_tokens: Some(u32::MAX),
    };
    train.data = vec![Datum::builder(ModelInput::default().chunk(image)).build().unwrap()];
    assert_eq!(field(train.body()), "data[0].model_input[0]");
    train.data.clear();
    train.seq_id = Some(Seq::new(1 << 31));
    assert_eq!(field(train.body()), "seq_id");
    assert_eq!(train.validate().unwrap_err().field(), "seq_id", "check says what body would");
}
