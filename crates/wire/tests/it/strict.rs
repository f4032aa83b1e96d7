//! Old servers and new ones: what may be missing, what may be left out, what is never lost.

use bytes::Bytes;
use serde_json::{Value, json};
use tinkex_wire::*;

fn read<T: serde::de::DeserializeOwned>(body: &Value) -> Result<T, DecodeError> {
    codec::json::decode(body.to_string().as_bytes())
}

fn lean<T: Call>(call: &T) -> Value {
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

    let beat = SessionHeartbeat { session_id: "s".into() };
    assert_eq!(lean(&beat), serde_json::to_value(beat).unwrap(), "nothing optional here");
}

#[test]
fn tickets_without_sequence_ids_are_tickets() {
    let ticket: Ticket = read(&json!({"request_id": "r"})).unwrap();
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
    let payload = Payload::Json(body.to_string().into());
    let response = SampleRequest::output(&payload).unwrap();
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
    let output = ForwardBackward::output(&Payload::Json(body.to_string().into())).unwrap();
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
    let outcome = |body: Value| Outcome::read("application/json", &body.to_string().into());
    assert_eq!(outcome(json!({"status": "pending"})), Ok(Outcome::TryAgain(Pending::default())));
    let done = outcome(json!({"status": "completed", "result": {"path": "tinker://r/weights/a"}}));
    let Ok(Outcome::Ready(payload)) = done else { panic!("{done:?}") };
    assert_eq!(SaveWeights::output(&payload).unwrap().path, "tinker://r/weights/a");
    let failed = |error: &str, category| {
        Ok(Outcome::Failed(RequestFailed { error: error.to_owned(), category }))
    };
    assert_eq!(
        outcome(json!({"status": "failed", "error": {"message": "no", "category": "USER"}})),
        failed("no", Category::User)
    );
    assert_eq!(
        outcome(json!({"status": "failed"})),
        failed("the server gave no reason", Category::Unknown)
    );
    assert_eq!(outcome(json!({"error": null})), failed("null", Category::Unknown));
    // Results that happen to use the same names for other things are results.
    for result in [json!({"status": 7, "type": []}), json!([1]), json!("x"), json!({})] {
        let body: Bytes = result.to_string().into();
        assert_eq!(outcome(result), Ok(Outcome::Ready(Payload::Json(body))));
    }
    assert!(Outcome::read("text/html", &"<html>".into()).is_err());
    assert!(Outcome::read("application/json", &"{\"a\":".into()).is_err());
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

    // Values that the protocol does not let through.
    let search = json!({"sessions": [{
        "session_id": "s", "created_at": 0, "owner": "o", "project_id": "p",
        "checkpoints_count": 0, "status": {"type": "sleeping"},
    }]});
    let error = rest::SessionsFound::from_body(&search.to_string().into()).unwrap_err();
    assert!(error.path().starts_with("sessions[0].status"), "{error}");
    assert!(
        read::<FuturesRetrieved>(
            &json!({"completions": [{"state": "lost", "request_id": "r"}], "cursor": 0})
        )
        .is_err()
    );
    assert!(read::<Health>(&json!({"status": "ill"})).is_err());
    assert!(read::<TelemetryReply>(&json!({"status": "refused"})).is_err());
}

#[test]
fn a_wrong_polled_result_is_an_error_with_its_place() {
    let payload = Payload::Json(json!({"type": "save_weights", "path": "p"}).to_string().into());
    let error = CreateModel::output(&payload).unwrap_err();
    assert_eq!(error.path(), "type");
    let error = CreateModel::output(&Payload::Proto(Bytes::new())).unwrap_err();
    assert_eq!(error.kind(), DecodeErrorKind::Json);
}

#[test]
fn secrets_do_not_print() {
    let mut load = LoadWeights::as_new_model("s".into(), 0, "tinker://r/weights/a");
    load.weights_access_token = Some("tml-hidden".into());
    assert!(!format!("{load:?}").contains("hidden"));
    let token = AuthToken { jwt: "eyJhidden".into() };
    assert!(!format!("{token:?}").contains("hidden"));
    let body = load.body().unwrap().bytes();
    assert!(String::from_utf8_lossy(&body).contains("tml-hidden"), "but they are sent");
}

#[test]
fn requests_that_no_server_could_understand_are_refused_before_sending() {
    let field = |error: Result<Body, InvalidInput>| error.unwrap_err().field().to_owned();
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
    load.model_seq_id = Some(0);
    assert_eq!(field(load.body()), "model_id");

    let path: TinkerPath = "tinker://r/weights/a".parse().unwrap();
    assert_eq!(field(rest::ExternalWeightsUrlsRequest { path }.body()), "tinker_path");

    let search = rest::SearchSessions { limit: 201, ..Default::default() };
    assert_eq!(field(search.body()), "limit");

    let mut train = ForwardBackward::new(
        "m",
        vec![
            Datum::builder(ModelInput::from_tokens([1]).chunk(Chunk::ImageAssetPointer {
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
    train.data.clear();
    train.seq_id = Some(Seq::new(1 << 31));
    assert_eq!(field(train.body()), "seq_id");
}
