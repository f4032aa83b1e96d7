//! Responses that a server builds: their JSON form, and that a client decodes the same value.

use std::fmt::Debug;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tinkex_wire::rest::*;
use tinkex_wire::*;

const SESSION: &str = "s";
const TIME: &str = "2026-01-02T03:04:05Z";

fn time() -> Timestamp {
    TIME.parse().unwrap()
}

/// Asserts that a value has this JSON form, except for nulls, and that it is decoded again.
#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "a literal is easier to read")]
fn encodes<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T, expected: Value) {
    let encoded = serde_json::to_value(value).unwrap();
    assert_eq!(without_nulls(encoded.clone()), expected);
    assert_eq!(&serde_json::from_value::<T>(encoded).unwrap(), value);
}

/// As [`encodes`], for a complete response.
#[track_caller]
fn responds<T: ApiResponse + Serialize + DeserializeOwned + PartialEq + Debug>(
    value: &T,
    expected: Value,
) {
    encodes(value, expected);
    let body = Bytes::from(serde_json::to_vec(value).unwrap());
    assert_eq!(&T::from_body(&body).unwrap(), value);
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name, without_nulls(value)))
            .collect(),
        Value::Array(items) => items.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

#[test]
fn sessions_and_models_are_created() {
    responds(
        &SessionCreated::new(SESSION.into()).warning_message(Some("old".to_owned())),
        json!({"type": "create_session", "session_id": "s", "warning_message": "old"}),
    );
    let model = SupportedModel::default().model_name(Some("m".to_owned())).trainable(Some(true));
    responds(
        &ServerCapabilities::new(vec![model]),
        json!({"supported_models": [{"model_name": "m", "trainable": true}]}),
    );
    encodes(
        &ModelCreated::new("s:train:0".into()),
        json!({"type": "create_model", "model_id": "s:train:0"}),
    );
    let data = ModelData::default().model_name(Some("m".to_owned()));
    responds(
        &ModelInfo::new("s:train:0".into(), data, OptimizerConfig::default())
            .is_lora(Some(true))
            .lora_rank(Some(8)),
        json!({
            "type": "get_info", "model_id": "s:train:0", "model_name": "m", "is_lora": true,
            "lora_rank": 8, "model_data": {"model_name": "m"},
            "optimizer_config": OptimizerConfig::default(),
        }),
    );
    responds(
        &SamplingSessionCreated::new("s:sample:0".into()),
        json!({"type": "create_sampling_session", "sampling_session_id": "s:sample:0"}),
    );
    responds(
        &SamplingSessionJoined::new(3),
        json!({"type": "join_sampling_session", "client_counter": 3}),
    );
    encodes(
        &JoinSamplingSession::new("s:sample:0".into()),
        json!({"type": "join_sampling_session", "sampling_session_id": "s:sample:0"}),
    );
}

#[test]
fn saved_weights_are_described() {
    let path = "tinker://s:train:0/weights/a";
    encodes(&WeightsSaved::new(path), json!({"type": "save_weights", "path": path}));
    encodes(
        &SamplerWeightsSaved::named(path),
        json!({"type": "save_weights_for_sampler", "path": path}),
    );
    encodes(
        &SamplerWeightsSaved::ephemeral("s:sample:1".into()),
        json!({"type": "save_weights_for_sampler", "sampling_session_id": "s:sample:1"}),
    );
    encodes(
        &ExternalWeightsSaved::new(path, 7),
        json!({"type": "save_weights_external", "path": path, "size_bytes": 7}),
    );
    responds(&WeightsCopied::new(path), json!({"tinker_path": path}));
    let full = WeightsInfo::new("m", OptimizerConfig::default());
    let optimizer = json!(OptimizerConfig::default());
    responds(&full, json!({"base_model": "m", "is_lora": false, "optimizer_config": optimizer}));
    let lora = LoraConfig::with_rank(4).train_mlp(false);
    responds(
        &full.lora(lora),
        json!({
            "base_model": "m", "is_lora": true, "lora_rank": 4, "train_unembed": true,
            "train_mlp": false, "train_attn": true, "optimizer_config": optimizer,
        }),
    );
}

#[test]
fn runs_checkpoints_and_samplers_are_listed() {
    let path: TinkerPath = "tinker://s:train:0/sampler_weights/a".parse().unwrap();
    let checkpoint = Checkpoint::new(&path, time()).size_bytes(Some(5)).public(true);
    let described = json!({
        "checkpoint_id": "sampler_weights/a", "checkpoint_type": "sampler", "time": TIME,
        "tinker_path": path.to_string(), "size_bytes": 5, "public": true,
    });
    encodes(&checkpoint, described.clone());
    let cursor = Cursor::new(0, 20, 1);
    responds(
        &CheckpointPage::new(vec![checkpoint.clone()], Some(cursor)),
        json!({
            "checkpoints": [described], "cursor": {"offset": 0, "limit": 20, "total_count": 1},
        }),
    );
    let run = TrainingRun::new("s:train:0".into(), "m", "owner", time())
        .lora_rank(Some(8))
        .last_sampler_checkpoint(Some(checkpoint));
    responds(&run, {
        let mut expected = without_nulls(serde_json::to_value(&run).unwrap());
        // The fields that the constructor and the setters determine.
        for (field, value) in [
            ("training_run_id", json!("s:train:0")),
            ("base_model", json!("m")),
            ("model_owner", json!("owner")),
            ("last_request_time", json!(TIME)),
            ("lora_rank", json!(8)),
            ("last_sampler_checkpoint", described),
        ] {
            expected[field] = value;
        }
        expected
    });
    let page = TrainingRunPage::new(vec![run.clone()], cursor);
    let listed = serde_json::to_value(&page).unwrap();
    assert_eq!(listed["training_runs"][0], serde_json::to_value(&run).unwrap());
    responds(&page, without_nulls(listed));
    responds(
        &SamplerInfo::new("s:sample:0".into(), "m").model_path(Some(path.to_string())),
        json!({"sampler_id": "s:sample:0", "base_model": "m", "model_path": path.to_string()}),
    );
    responds(&SessionPage::new(vec![SESSION.into()]), json!({"sessions": ["s"]}));
    let urls = [("a.bin".to_owned(), "https://files.test/a".to_owned())].into();
    responds(
        &ExternalWeightsUrls::new(urls, time()),
        json!({"urls": {"a.bin": "https://files.test/a"}, "expires": TIME}),
    );
}

#[test]
fn accounts_searches_and_usage_are_described() {
    responds(
        &ApiKeyInfo::new(1, "k", ApiKeyDetails::new("org", "a@b.test")).note("n"),
        json!({
            "key_id": 1, "name": "k", "note": "n",
            "details": {"org_details": {"name": "org"}, "user_details": {"email": "a@b.test"}},
        }),
    );
    let found = SessionSummary::new(SESSION.into(), time(), "owner", "p").checkpoints_count(2);
    let next = SearchCursor::new(time(), SESSION.into());
    responds(
        &SessionSearchPage::new(vec![found], Some(next)),
        json!({
            "sessions": [{
                "session_id": "s", "created_at": TIME, "owner": "owner", "project_id": "p",
                "checkpoints_count": 2,
            }],
            "next_cursor": {"last_created_at": TIME, "last_session_id": "s"},
        }),
    );
    for (reason, name) in [
        (FinishReason::Success, "success"),
        (FinishReason::Errored, "errored"),
        (FinishReason::Interrupted, "interrupted"),
    ] {
        let filter = serde_json::to_value(FinishReasonFilter::from(reason)).unwrap();
        assert!(filter.to_string().contains(name), "{filter}");
    }
    let event = UsageEvent::new(time(), time(), UsageKind::Training { token_count: 9 })
        .base_model(Some("m".to_owned()))
        .estimated_cost_usd(Some(0.5));
    responds(
        &BillingUsage::new(vec![event], [(SESSION.into(), UsageSession::default())].into()),
        json!({
            "data": [{
                "bucket_start": TIME, "bucket_end": TIME, "base_model": "m",
                "estimated_cost_usd": 0.5,
                "event_info": {"type": "training", "token_count": 9},
            }],
            "sessions": {"s": {}},
        }),
    );
}

#[test]
fn futures_are_announced() {
    let finished = CompletedFuture::Finished {
        request_id: "r".into(),
        response_payload_uncompressed_size: Some(8),
    };
    responds(
        &FuturesRetrieved::new(vec![finished], 4),
        json!({
            "completions": [{
                "state": "finished", "request_id": "r", "response_payload_uncompressed_size": 8,
            }],
            "cursor": 4,
        }),
    );
    let waiting = QueueStatus::new(QueueState::PausedCapacity, Some("busy".to_owned()));
    let (content_type, body) = PollResponse::TryAgain(waiting.clone()).encode(&"r".into());
    let decoded = PollResponse::decode(content_type, &body).unwrap();
    assert_eq!(decoded, PollResponse::TryAgain(waiting));
}

/// A negative stop id keeps its bits, as in a prompt, so that the server can name it.
#[test]
fn negative_stop_ids_are_decoded() {
    let decode = |text: &str| serde_json::from_str::<StopCondition>(text);
    assert_eq!(decode("[3, -1]").unwrap(), StopCondition::Tokens(vec![3, u32::MAX]));
    assert_eq!(decode("[4294967295]").unwrap(), StopCondition::Tokens(vec![u32::MAX]));
    for invalid in ["[4294967296]", "[-2147483649]", "[1.5]", "7"] {
        let error = decode(invalid).unwrap_err().to_string();
        assert!(error.contains("a list of token ids"), "{invalid}: {error}");
    }
}

#[test]
fn arguments_are_converted_without_loss() {
    for (setting, expected) in [
        (LossSetting::from(0.5_f32), LossSetting::Number(0.5)),
        (LossSetting::from(-2_i32), LossSetting::Number(-2.0)),
        (LossSetting::from(7_u32), LossSetting::Number(7.0)),
        (LossSetting::from(true), LossSetting::Number(1.0)),
        (LossSetting::from("x".to_owned()), LossSetting::Text("x".to_owned())),
    ] {
        assert_eq!(setting, expected);
    }
    assert_eq!(LossFn::from("ppo".to_owned()), LossFn::Ppo);
    let stop = |stop: StopCondition| serde_json::to_value(stop).unwrap();
    assert_eq!(stop("a".to_owned().into()), json!("a"));
    assert_eq!(stop(vec!["a", "b"].into()), json!(["a", "b"]));
    assert_eq!(stop(vec!["a".to_owned()].into()), json!(["a"]));
    assert_eq!(stop(vec![1_u32, 2].into()), json!([1, 2]));
    let tokens = [Tokens::from(&[1_u32, 2]), Tokens::from(&[1_u32, 2][..])];
    assert_eq!(tokens[0], tokens[1]);
    assert_eq!(Vec::<u32>::from(tokens[0].clone()), [1, 2]);
    assert_eq!(tokens[0].as_ref(), [1, 2]);
}
