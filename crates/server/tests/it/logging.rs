//! Log events of the program.

use serde_json::{Value, json};

use crate::child_server::{ChildOptions, start};
use crate::harness::{Http, MODEL, create_model, golden};
use crate::process::SERVE;

const KEY: &str = "tml-secret-key";
const WRONG_KEY: &str = "tml-wrong-key";

#[tokio::test(flavor = "multi_thread")]
async fn json_events_have_the_ids_of_a_request_and_no_keys() {
    let data = tempfile::tempdir().unwrap();
    let log_file = data.path().join("log");
    let options = ChildOptions {
        data_dir: data.path().join("data"),
        threads: 1,
        models: vec![(MODEL.to_owned(), golden("qwen3"))],
        api_key: Some(KEY.to_owned()),
        log: Some("debug".to_owned()),
        ..ChildOptions::default()
    };
    let mut command = options.command(&SERVE);
    command.stderr(std::fs::File::create(&log_file).unwrap());
    let (mut child, url) = start(command);
    let http = Http::new(&url);
    let post = async |path: &str, key: &str, body: Value| {
        let path = format!("/api/v1{path}");
        let headers = [("x-api-key", key)];
        http.send("POST", &path, &headers, body.to_string().into_bytes()).await
    };
    let create = json!({"tags": [], "sdk_version": "0.36.0"});
    assert_eq!(post("/create_session", WRONG_KEY, create.clone()).await.0, 401);
    let (_, session) = post("/create_session", KEY, create).await;
    let session = session["session_id"].as_str().unwrap();
    let (_, submitted) = post("/create_model", KEY, create_model(session, 0)).await;
    loop {
        let poll = json!({"request_id": submitted["request_id"]});
        let (status, result) = post("/retrieve_future", KEY, poll).await;
        assert_eq!(status, 200, "{result}");
        if result["type"] != "try_again" {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();

    let log = std::fs::read_to_string(&log_file).unwrap();
    assert!(!log.contains(KEY) && !log.contains(WRONG_KEY), "{log}");
    let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let find = |message: &str| events.iter().find(|event| event["message"] == message);
    let finished = find("request finished").expect(&log);
    assert_eq!(
        (&finished["level"], &finished["target"]),
        (&json!("INFO"), &json!("tinkex_server::request"))
    );
    assert_eq!(finished["operation"], "create_model");
    assert_eq!(finished["span"]["request_id"], submitted["request_id"]);
    assert_eq!(finished["span"]["model_id"], format!("{session}:train:0"));
    assert_eq!(finished["span"]["session_id"], session);
    let rejected = find("request rejected").expect(&log);
    assert_eq!((&rejected["level"], &rejected["status"]), (&json!("DEBUG"), &json!(401)));
}
