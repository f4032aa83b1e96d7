//! Sessions: opened once, kept alive, ended.

use serde_json::{Value, json};
use tinkex::{Env, FinishReason, JsonObject};
use tokio::time::{Duration, sleep};

use crate::stage::{Stage, cases};

/// Covers T4.3.1, T4.3.3.
#[tokio::test(start_paused = true)]
async fn a_session_is_opened_by_the_first_who_needs_it_and_shared() {
    let stage = Stage::new(json!({}));
    let metadata: JsonObject = [("k".to_owned(), json!("v"))].into_iter().collect();
    let env = Env::from_pairs([("TINKER_TAGS", "b,a,,b"), ("TINKER_PROJECT_ID", "p")]);
    let builder = stage.builder().env(env).user_metadata(metadata).display_name("mine");
    let service = builder.build().unwrap();
    assert!(stage.calls("/create_session").is_empty(), "nobody needs one yet");
    let create = || service.create_lora_training_client("base").rank(16).seed(7).create();
    let (a, b) = tokio::join!(create(), create());
    a.and(b).unwrap();
    let opened = stage.calls("/create_session");
    assert_eq!(opened.len(), 1);
    assert_eq!(
        opened[0].json(),
        json!({
            "tags": ["b", "a"], "user_metadata": {"k": "v"}, "sdk_version": "0.36.0",
            "project_id": "p", "display_name": "mine", "type": "create_session",
        })
    );
    let models: Vec<Value> = stage.calls("/create_model").iter().map(|c| c.json()).collect();
    let mut numbers: Vec<_> =
        models.iter().map(|model| model["model_seq_id"].as_u64().unwrap()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1]);
    assert_eq!(models[0]["lora_config"]["rank"], 16);

    service.finish(FinishReason::Success, Some("done".to_owned())).await.unwrap();
    let finish = stage.calls("/finish").pop().unwrap().json();
    assert_eq!(finish, json!({"reason": {"type": "success"}, "detail": "done"}));
}

/// Covers T4.3.2, X14.
#[tokio::test(start_paused = true)]
async fn heartbeats_come_as_in_the_reference() {
    for case in cases("heartbeat.json") {
        if case["failure_latency"] != 0.0 {
            // A slow failure is a time-out of the HTTP layer, which the stage does not play.
            continue;
        }
        let stage = Stage::new(json!({}));
        let outcomes: Vec<Value> = case["outcomes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|outcome| if outcome == "ok" { json!({}) } else { outcome.clone() })
            .collect();
        let count = outcomes.len();
        stage.heartbeats(outcomes);
        let start = tokio::time::Instant::now();
        let model = stage.model().await;
        sleep(Duration::from_secs(10 * count as u64 + 5)).await;
        let beats: Vec<f64> = stage
            .calls("/session_heartbeat")
            .iter()
            .map(|call| (call.at - start).as_secs_f64())
            .collect();
        assert_eq!(json!(beats), case["sent_at"], "{}", case["id"]);
        drop(model);
        sleep(Duration::from_secs(60)).await;
        assert_eq!(
            stage.calls("/session_heartbeat").len(),
            beats.len(),
            "it ended with its client"
        );
    }
}
