//! All requests of the REST and admin clients, compared with the requests of the Python SDK.

use std::path::Path;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use serde_json::{Value, json};
use tinkex::rest::{
    AccessScope, AuditLogRequest, ListSessions, ListTrainingRuns, ListUserCheckpoints,
    SearchSessions, StorageUsageRequest,
};
use tinkex::{CopyCheckpoint, RestClient, ServiceClient, TinkerPath};
use tinkex_wire::rest::TraceStatus;

use crate::scripted_server::ScriptedServer;

/// Reads a recorded request and its response.
fn recorded(name: &str) -> (Value, Value) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wire");
    let read = |side: &str| {
        let text = std::fs::read(folder.join(format!("{name}.{side}.json"))).unwrap();
        serde_json::from_slice(&text).unwrap()
    };
    (read("request"), read("response"))
}

/// Responds with the recorded response and compares the request with the recorded one.
async fn replay<T>(name: &str, call: impl AsyncFnOnce(ServiceClient) -> tinkex::Result<T>) -> T {
    let (request, response) = recorded(name);
    let path = request["path"].as_str().unwrap();
    let method = request["method"].as_str().unwrap();
    let target = format!("{method} {}", path.split('?').next().unwrap());
    let status = u16::try_from(response["status"].as_u64().unwrap()).unwrap();
    let fake = ScriptedServer::started().respond(&target, status, response["body"].clone());
    let result = call(fake.client()).await.unwrap_or_else(|error| panic!("{name}: {error}"));
    let sent = fake.last();
    assert_eq!(sent.url, format!("http://server.test{path}"), "{name}");
    assert_eq!(sent.method, method, "{name}");
    assert_eq!(sent.json(), request["body"], "{name}");
    for header in ["accept", "content-type", "x-sdk-version", "x-sdk-method"] {
        let expected = request["headers"][header].as_str();
        assert_eq!(sent.header(header), expected, "{name}: {header}");
    }
    let seconds = sent.timeout.as_secs().to_string();
    assert_eq!(sent.header("x-stainless-read-timeout"), Some(&*seconds), "{name}");
    assert_eq!(request["headers"]["x-stainless-read-timeout"], seconds, "{name}");
    fake.finish();
    result
}

const RUN: &str = "11111111-2222-4333-8444-555555555555:train:0";
const SESSION: &str = "11111111-2222-4333-8444-555555555555";

fn path(kind: &str, name: &str) -> TinkerPath {
    format!("tinker://{RUN}/{kind}/{name}").parse().unwrap()
}

/// Covers R-OLD.
#[tokio::test(start_paused = true)]
async fn run_and_sampler_requests_match_the_python_sdk() {
    replay("list_training_runs", async |service| {
        service.rest().list_training_runs(&ListTrainingRuns::default()).await
    })
    .await;
    replay("list_training_runs_project", async |service| {
        let list = ListTrainingRuns::default()
            .limit(50)
            .offset(50)
            .access_scope(AccessScope::Accessible)
            .project_id("p 1");
        service.rest().list_training_runs(&list).await
    })
    .await;
    replay("get_training_run", async |service| {
        service.rest().get_training_run(RUN, AccessScope::Owned).await
    })
    .await;
    let run = replay("get_training_run_by_tinker_path", async |service| {
        let path = path("weights", "ck1");
        service.rest().get_training_run_by_path(&path, AccessScope::Accessible).await
    })
    .await;
    assert_eq!(run.base_model, "Qwen/Qwen3-8B");
    replay("get_sampler", async |service| {
        service.rest().get_sampler(format!("{SESSION}:sample:0")).await
    })
    .await;
    let models =
        replay("get_server_capabilities", async |service| service.server_capabilities().await)
            .await;
    assert_eq!(models.supported_models.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn checkpoint_requests_match_the_python_sdk() {
    let weights = path("weights", "ck1");
    replay("list_checkpoints", async |s| s.rest().list_checkpoints(RUN).await).await;
    replay("list_user_checkpoints", async |service| {
        service.rest().list_user_checkpoints(&ListUserCheckpoints::default()).await
    })
    .await;
    replay("delete_checkpoint", async |s| s.rest().delete_checkpoint(&weights).await).await;
    replay("publish_checkpoint", async |s| s.rest().publish_checkpoint(&weights).await).await;
    replay("unpublish_checkpoint", async |s| s.rest().unpublish_checkpoint(&weights).await).await;
    replay("set_checkpoint_ttl", async |s| {
        s.rest().set_checkpoint_ttl(&weights, Some(Duration::from_secs(86400))).await
    })
    .await;
    replay("set_checkpoint_ttl_remove", async |s| {
        s.rest().set_checkpoint_ttl(&weights, None).await
    })
    .await;
    let urls = replay("external_weights_urls", async |s| {
        s.rest().get_external_weights_urls(path("external_weights", "e1")).await
    })
    .await;
    assert_eq!(urls.urls["adapter_config.json"], "https://example.invalid/1");
    replay("weights_info", async |s| s.rest().get_weights_info(&weights).await).await;
    replay("copy_weights_minimal", async |service| {
        let copy = CopyCheckpoint::new(weights.clone()).into_project("proj-archive");
        service.rest().copy_weights(copy).await
    })
    .await;
    replay("copy_weights", async |service| {
        let copy = CopyCheckpoint::new(weights.clone()).into_project("proj-archive");
        service.rest().copy_weights(copy.ttl(Duration::from_secs(3600)).source_token("t")).await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn session_requests_match_the_python_sdk() {
    replay("list_sessions", async |service| {
        service.rest().list_sessions(&ListSessions::default()).await
    })
    .await;
    replay("get_session", async |service| {
        service.rest().get_session(SESSION, AccessScope::Owned).await
    })
    .await;
    replay("search_sessions_default", async |service| {
        service.rest().search_sessions(&SearchSessions::default()).await
    })
    .await;
    replay("assign_session_project", async |service| {
        service.rest().assign_session_project(SESSION, "proj-2").await
    })
    .await;
    let url =
        replay("trace_export", async |service| service.rest().export_session_trace(SESSION).await)
            .await;
    assert_eq!(url, "https://example.invalid/t.pftrace");
}

#[tokio::test(start_paused = true)]
async fn usage_and_audit_requests_match_the_python_sdk() {
    replay("billing_usage", async |service| {
        let from = "2026-07-13T00:00:00Z".parse()?;
        let to = "2026-07-14T00:00:00Z".parse()?;
        service.admin().get_billing_usage(from, to).await
    })
    .await;
    replay("checkpoint_storage", async |service| {
        let query = StorageUsageRequest::default().project_id(Some("p1".to_owned()));
        service.admin().get_checkpoint_storage(&query).await
    })
    .await;
    replay("audit_default", async |service| {
        service.admin().get_audit_log(&AuditLogRequest::default()).await
    })
    .await;
    replay("audit", async |service| {
        let query = AuditLogRequest::default().day(Some("2025-01-15".to_owned()));
        service.admin().get_audit_log(&query).await
    })
    .await;
}

fn checkpoint(n: u64) -> Value {
    json!({
        "checkpoint_id": format!("weights/{n}"), "checkpoint_type": "training",
        "time": "2026-01-02T03:04:05Z", "tinker_path": format!("tinker://r/weights/{n}"),
    })
}

#[tokio::test(start_paused = true)]
async fn long_lists_are_streamed_across_pages() {
    let page = |items: std::ops::Range<u64>| {
        let cursor = json!({"offset": items.start, "limit": 1000, "total_count": 1500});
        json!({"checkpoints": items.map(checkpoint).collect::<Value>(), "cursor": cursor})
    };
    let fake = ScriptedServer::started()
        .respond("GET /api/v1/checkpoints", 200, page(0..1000))
        .respond("GET /api/v1/checkpoints", 200, page(1000..1500));
    let rest = fake.client().rest();
    let all: Vec<_> = rest.user_checkpoints().try_collect().await.unwrap();
    assert_eq!(all.len(), 1500);
    assert_eq!(all[1499].tinker_path, "tinker://r/weights/1499");
    assert!(fake.last().url.ends_with("limit=1000&offset=1000"));
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn a_search_continues_from_its_cursor() {
    let session = |id: &str| {
        json!({
            "session_id": id, "created_at": "2026-01-02T03:04:05Z", "owner": "o",
            "project_id": "p", "checkpoints_count": 0,
        })
    };
    let cursor = json!({"last_created_at": "2026-01-02T03:04:05Z", "last_session_id": "a"});
    let fake = ScriptedServer::started()
        .respond(
            "POST /api/v1/sessions/search",
            200,
            json!({"sessions": [session("a")], "next_cursor": cursor}),
        )
        .respond("POST /api/v1/sessions/search", 200, json!({"sessions": [session("b")]}));
    let rest: RestClient = fake.client().rest();
    let found: Vec<_> = rest.sessions_found(SearchSessions::default()).try_collect().await.unwrap();
    assert_eq!(found.iter().map(|s| s.session_id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(fake.last().json()["cursor"], cursor);
    fake.finish();
}

/// Covers R-OLD.
#[tokio::test(start_paused = true)]
async fn a_trace_export_waits_until_the_trace_is_ready() {
    let export = format!("GET /api/v1/sessions/{SESSION}/trace_export");
    let fake = ScriptedServer::started()
        .respond(&export, 200, json!({"status": TraceStatus::Pending}))
        .respond(&export, 200, json!({"status": TraceStatus::Pending}))
        .respond(&export, 200, json!({"status": TraceStatus::Failed, "error": "too old"}));
    let error = fake.client().rest().export_session_trace(SESSION).await.unwrap_err();
    assert!(error.to_string().contains("too old"), "{error}");
    let received = fake.received();
    assert_eq!((received[4].at - received[3].at).as_secs(), 5);
    fake.finish();
}
