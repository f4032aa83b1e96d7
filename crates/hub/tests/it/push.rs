//! Uploads of small and large files to a hub.

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex::{BaseUrl, Env, ErrorKind};
use tinkex_hub::{Commit, Hub};

use crate::scripted_server::ScriptedServer;

fn hub(fake: &ScriptedServer) -> Hub {
    let endpoint: BaseUrl = "http://server.test".parse().unwrap();
    Hub::from_env(&Env::empty()).unwrap().endpoint(endpoint).http(fake.clone())
}

const CREATE: &str = "POST /api/repos/create";
const BATCH: &str = "POST /me/x.git/info/lfs/objects/batch";

#[tokio::test(start_paused = true)]
async fn without_a_token_no_request_is_sent() {
    let error = hub(&ScriptedServer::new()).create_repo("me/x").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Auth);
    assert!(error.hint().unwrap().as_str().contains("HF_TOKEN"));
}

#[tokio::test(start_paused = true)]
async fn small_files_are_in_the_commit_and_large_files_are_uploaded_before() {
    let folder = TempDir::new().unwrap();
    let small = folder.path().join("a.json");
    let large = folder.path().join("w");
    std::fs::write(&small, "{}").unwrap();
    std::fs::write(&large, "0123456789").unwrap();
    let plan = json!({ "files": [
        { "path": "a.json", "uploadMode": "regular" },
        { "path": "w", "uploadMode": "lfs" },
        { "path": "junk", "uploadMode": "regular", "shouldIgnore": true },
    ] });
    let actions = json!({ "objects": [{ "actions": {
        "upload": { "href": "http://store.test/done", "header": {
            "chunk_size": "4", "1": "http://store.test/p1", "2": "http://store.test/p2",
            "3": "http://store.test/p3",
        } },
        "verify": { "href": "http://store.test/verify", "header": { "x-own": "1" } },
    } }] });
    let etag = [("etag", "\"t\"")];
    let fake = ScriptedServer::new()
        .respond(CREATE, 409, json!({ "error": "exists" }))
        .respond("POST /api/models/me/x/preupload/main", 200, plan)
        .respond(BATCH, 200, actions)
        .respond_with("PUT /p1", 200, &etag, Value::Null)
        .respond("PUT /p2", 503, Value::Null)
        .respond_with("PUT /p2", 200, &etag, Value::Null)
        .respond_with("PUT /p3", 200, &etag, Value::Null)
        .respond("POST /done", 200, json!({}))
        .respond("POST /verify", 200, json!({}))
        .respond("POST /api/models/me/x/commit/main", 200, json!({ "commitUrl": "http://c" }));
    let repo = hub(&fake).token("hf_secret").create_repo("me/x").await.unwrap();
    let commit = Commit::new("first").file("a.json", &small).file("w", &large).file("junk", &small);
    let done = repo.commit("main", &commit).await.unwrap();
    assert_eq!(done.commit_url.as_deref(), Some("http://c"));
    fake.finish();
    let received = fake.received();
    for request in &received {
        // Only the hub itself gets the token, not its storage.
        let to_hub = request.url.starts_with("http://server.test");
        let token = to_hub.then_some("Bearer hf_secret");
        assert_eq!(request.header("authorization"), token, "{}", request.url);
    }
    assert_eq!(received[0].json()["visibility"], "private");
    let parts: Vec<&[u8]> = [3, 5, 6].iter().map(|at| &received[*at].body[..]).collect();
    assert_eq!(parts, [&b"0123"[..], b"4567", b"89"]);
    let body = String::from_utf8(fake.last().body.to_vec()).unwrap();
    let lines: Vec<Value> = body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[1]["value"]["content"], "e30=");
    let sum = "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882";
    assert_eq!(lines[2]["value"]["oid"], sum);
}

#[tokio::test(start_paused = true)]
async fn a_name_without_namespace_belongs_to_the_account() {
    let fake = ScriptedServer::new()
        .respond(CREATE, 200, json!({}))
        .respond("GET /api/whoami-v2", 200, json!({ "name": "me" }))
        .respond("HEAD /me/x/resolve/v%2F1/README.md", 404, Value::Null);
    let repo = hub(&fake).token("hf_secret").create_repo("x").public(true).await.unwrap();
    assert_eq!(repo.id(), "me/x");
    assert_eq!(repo.read_text("v/1", "README.md").await.unwrap(), None);
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn an_error_status_has_a_hint_and_does_not_show_the_token() {
    let fake = ScriptedServer::new().respond(CREATE, 403, json!({ "error": "no" }));
    let error = hub(&fake).token("hf_secret").create_repo("me/x").await.unwrap_err();
    let shown = format!("{error} {error:?}");
    assert!(
        error.hint().unwrap().as_str().contains("write permission") && !shown.contains("secret"),
        "{shown}"
    );
}
