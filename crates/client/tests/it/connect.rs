//! Connecting: settings, credentials, tokens, redirects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use base64::Engine as _;
use serde_json::{Value, json};
use tinkex::rest::{AuditLogRequest, ListSessions};
use tinkex::testing::{FakeServer, RecordedCall, Reply, Route};
use tinkex::{Env, ErrorKind, Lane, ServiceClient};
use tokio::time::{Duration, Instant, sleep};

use crate::scripted_server::ScriptedServer;

const CONFIG: &str = "POST /api/v1/client/config";
const DYNAMIC: &str = "POST /api/v1/client/dynamic_config";
const TOKEN: &str = "POST /api/v1/auth/token";
const LIST: &str = "GET /api/v1/sessions";

fn no_sessions() -> Value {
    json!({"sessions": []})
}

/// Returns a token that expires in `seconds_left` seconds.
fn jwt(seconds_left: u64) -> String {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let claims = json!({"exp": now + seconds_left, "sub": "u", "org_id": "o", "email": "a@b.c"});
    let payload = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(claims.to_string());
    format!("eyJh.{payload}.s")
}

/// Creates a script that starts with the configuration and the exchange of the key for `token`.
fn exchanging(token: &str) -> ScriptedServer {
    ScriptedServer::new()
        .respond(CONFIG, 200, json!({"pjwt_auth_enabled": true}))
        .respond(TOKEN, 200, json!({"jwt": token}))
        .respond(DYNAMIC, 200, json!({}))
}

async fn list(client: &ServiceClient) -> tinkex::Result<Vec<String>> {
    let found = client.rest().list_sessions(&ListSessions::default()).await?;
    Ok(found.sessions.iter().map(ToString::to_string).collect())
}

/// Returns the credential of each request.
fn keys(fake: &ScriptedServer) -> Vec<String> {
    let key = |call: &RecordedCall| call.header("x-api-key").unwrap().to_owned();
    fake.received().iter().map(key).collect()
}

fn header_names(call: &RecordedCall) -> Vec<&str> {
    let mut names: Vec<_> = call.headers.keys().map(|name| name.as_str()).collect();
    names.sort_unstable();
    names
}

#[tokio::test(start_paused = true)]
async fn a_server_without_dynamic_settings_is_not_asked_for_them_again() {
    let fake = FakeServer::new();
    let fake = fake.on_call(Route::DynamicConfig, |_| Reply::status(404));
    let sampler = fake.builder().build().unwrap().create_sampling_client("base").await.unwrap();
    sleep(Duration::from_secs(24 * 3_600)).await;
    // The first request is part of the start of the session.
    assert_eq!(fake.calls_to(Route::DynamicConfig).len(), 2);
    drop(sampler);
}

/// Covers Q2.
#[tokio::test(start_paused = true)]
async fn settings_of_one_client_do_not_reach_another() {
    let one = ScriptedServer::started().respond(LIST, 200, no_sessions());
    let other = ScriptedServer::new();
    let other = other
        .respond(&CONFIG.replace("/api", "/pre/api"), 200, json!({}))
        .respond(&DYNAMIC.replace("/api", "/pre/api"), 200, json!({}))
        .respond(&LIST.replace("/api", "/pre/api"), 200, no_sessions());
    let env = [("TINKER_API_KEY", "tml-from-env"), ("TINKER_BASE_URL", "https://env.test/pre/")];
    let from_env = ServiceClient::builder().env(Env::from_pairs(env)).http(other.clone());
    let from_env = from_env.header("X-Mine", "1").header("User-Agent", "me").build().unwrap();
    list(&from_env).await.unwrap();
    list(&one.client()).await.unwrap();

    let a = one.last();
    let b = other.last();
    assert_eq!(a.header("x-api-key"), Some("tml-test-key-0123456789"));
    assert_eq!(b.header("x-api-key"), Some("tml-from-env"));
    assert_eq!((a.header("x-mine"), b.header("x-mine")), (None, Some("1")));
    assert_eq!(b.header("user-agent"), Some("me"), "the caller's headers replace the defaults");
    assert!(b.url.starts_with("https://env.test/pre/api/v1/sessions?"));
}

#[tokio::test(start_paused = true)]
async fn the_connection_is_opened_once_and_a_failure_is_not_cached() {
    let fake = ScriptedServer::new().respond(CONFIG, 401, json!({"detail": "who?"}));
    let client = fake.client();
    let error = list(&client).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Auth);
    assert!(error.hint().unwrap().as_str().contains("TINKER_API_KEY"));
    assert!(!error.is_missing_credential(), "the credential exists but is rejected");

    let fake = fake.respond(CONFIG, 200, json!({})).respond(DYNAMIC, 404, Value::Null);
    let fake = fake.respond(LIST, 200, no_sessions()).respond(LIST, 200, no_sessions());
    let rest = client.rest();
    let list = ListSessions::default();
    let (a, b) = tokio::join!(rest.list_sessions(&list), rest.list_sessions(&list));
    a.and(b).unwrap();
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn a_server_without_configuration_gets_the_defaults() {
    let fake = ScriptedServer::new()
        .respond(CONFIG, 404, Value::Null)
        .respond(DYNAMIC, 404, Value::Null)
        .respond(LIST, 200, no_sessions());
    list(&fake.client()).await.unwrap();
    fake.finish();
}

#[test]
fn a_client_without_a_credential_cannot_be_built() {
    let home = tempfile::tempdir().unwrap();
    let env = Env::from_pairs([("HOME", home.path().to_str().unwrap())]);
    let error = ServiceClient::builder().env(env).http(ScriptedServer::new()).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Auth);
    assert!(error.hint().is_some() && error.is_missing_credential());
}

/// Covers R-JWT.
#[tokio::test(start_paused = true)]
async fn keys_are_exchanged_for_tokens_if_the_server_requires_it() {
    let token = jwt(3600);
    let fake = exchanging(&token).respond(LIST, 200, no_sessions());
    let client = fake.client();
    list(&client).await.unwrap();
    let key = "tml-test-key-0123456789";
    assert_eq!(keys(&fake), [key, key, &token, &token]);
    let lanes: Vec<_> = fake.received().iter().map(|received| received.lane).collect();
    assert_eq!(lanes, [Lane::Config, Lane::Auth, Lane::Session, Lane::Train]);
    let whoami = client.whoami().await.unwrap();
    assert_eq!((whoami.user_urn.as_str(), whoami.org_urn.as_str()), ("u", "tml:organization:o"));
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn a_failed_exchange_is_not_reported_as_a_lost_connection() {
    let fake = ScriptedServer::new()
        .respond(CONFIG, 200, json!({"pjwt_auth_enabled": true}))
        .respond(TOKEN, 403, json!({"detail": "not you"}));
    let error = list(&fake.client()).await.unwrap_err();
    assert_eq!((error.kind(), error.status()), (ErrorKind::Permission, Some(403)));
    fake.finish();
}

/// A token is renewed in the background, five minutes before it expires.
#[tokio::test(start_paused = true)]
async fn tokens_are_renewed_before_they_expire() {
    let old = jwt(3600);
    let new = jwt(7200);
    let fake = exchanging(&old)
        .respond(LIST, 200, no_sessions())
        .respond(TOKEN, 200, json!({"jwt": new}))
        .respond(LIST, 200, no_sessions());
    let started = SystemTime::now();
    let start = Instant::now();
    let client = fake.builder().wall_clock(move || started + start.elapsed()).build().unwrap();
    list(&client).await.unwrap();
    sleep(Duration::from_secs(3310)).await;
    list(&client).await.unwrap();
    assert_eq!(fake.last().header("x-api-key"), Some(&*new));
    fake.finish();
}

/// The clock of timers stops while a computer is suspended; the wall clock does not.
#[tokio::test(start_paused = true)]
async fn a_token_that_expired_during_suspend_is_renewed_at_once_after_resume() {
    let old = jwt(3600);
    let new = jwt(20_000);
    let fake = exchanging(&old)
        .respond(LIST, 200, no_sessions())
        .respond(TOKEN, 200, json!({"jwt": new}))
        .respond(LIST, 200, no_sessions());
    let suspended = Arc::new(AtomicU64::new(0));
    let started = SystemTime::now();
    let seconds = Arc::clone(&suspended);
    let now = move || started + Duration::from_secs(seconds.load(Ordering::Relaxed));
    let client = fake.builder().wall_clock(now).build().unwrap();
    list(&client).await.unwrap();
    sleep(Duration::from_secs(100)).await;
    suspended.store(2 * 3600, Ordering::Relaxed);
    // Far below the 3300 s that the renewal would sleep for.
    sleep(Duration::from_secs(11)).await;
    assert_eq!(fake.last().lane, Lane::Auth, "renewed without a request that needs the token");
    list(&client).await.unwrap();
    assert_eq!(fake.last().header("x-api-key"), Some(&*new));
    fake.finish();
}

/// Covers R-JWT.
#[tokio::test(start_paused = true)]
async fn a_rejected_token_is_exchanged_once_more_and_the_request_is_sent_again() {
    let old = jwt(3600);
    let new = jwt(7200);
    let fake = exchanging(&old)
        .respond(LIST, 401, json!({"detail": "revoked"}))
        .respond(TOKEN, 200, json!({"jwt": new}))
        .respond(LIST, 200, no_sessions())
        // A second 401 in a row is not about the token.
        .respond(LIST, 401, json!({"detail": "revoked"}))
        .respond(TOKEN, 200, json!({"jwt": old}))
        .respond(LIST, 401, json!({"detail": "still no"}));
    let client = fake.client();
    list(&client).await.unwrap();
    assert_eq!(fake.last().header("x-api-key"), Some(&*new));
    let error = list(&client).await.unwrap_err();
    assert_eq!((error.kind(), error.status()), (ErrorKind::Auth, Some(401)));
    assert!(error.to_string().contains("still no"), "{error}");
    fake.finish();
}

/// Covers R-JWT.
///
/// Without paused time, which would end the command's timeout at once.
#[cfg(unix)]
#[tokio::test]
async fn the_output_of_a_credential_command_is_exchanged_for_a_token() {
    let token = jwt(3600);
    let command_key = "tml-from-command";
    let fake = exchanging(&token).respond(LIST, 200, no_sessions());
    let env = Env::from_pairs([("TINKER_CREDENTIAL_CMD", "printf tml-from-command")]);
    let builder = ServiceClient::builder().env(env).base_url("http://server.test");
    let client = builder.without_telemetry().http(fake.clone()).build().unwrap();
    list(&client).await.unwrap();
    assert_eq!(keys(&fake), [command_key, command_key, &token, &token]);
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn a_rejected_key_is_reported_without_another_request() {
    let fake = ScriptedServer::started().respond(LIST, 401, json!({"detail": "no"}));
    let error = list(&fake.client()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Auth, 1));
    fake.finish();
}

/// Otherwise a token with a lifetime below five minutes, or a local clock that is ahead, would
/// cause an endless series of exchanges.
#[tokio::test(start_paused = true)]
async fn short_lived_tokens_are_renewed_at_most_once_a_minute() {
    let mut fake = exchanging(&jwt(200)).respond(LIST, 200, no_sessions());
    for _ in 0..5 {
        fake = fake.respond(TOKEN, 200, json!({"jwt": jwt(200)}));
    }
    let client = fake.client();
    list(&client).await.unwrap();
    sleep(Duration::from_secs(150)).await;
    let exchanges = fake.received().iter().filter(|received| received.lane == Lane::Auth).count();
    assert_eq!(exchanges, 3, "the first exchange, then one per minute");
}

#[tokio::test(start_paused = true)]
async fn the_target_of_an_invalid_redirect_is_not_quoted() {
    let signed = format!("https://storage.test/f?sig=hidden{}", "x".repeat(70_000));
    let fake =
        ScriptedServer::started().respond_with(LIST, 307, &[("location", &signed)], Value::Null);
    let error = list(&fake.client()).await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hidden"), "{} bytes", error.to_string().len());
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn endless_redirects_and_unencrypted_targets_are_refused_without_a_retry() {
    let to_itself = [("location", "/api/v1/audit")];
    let mut fake = ScriptedServer::started();
    for _ in 0..=10 {
        fake = fake.respond_with("GET /api/v1/audit", 302, &to_itself, Value::Null);
    }
    let error = fake.client().admin().get_audit_log(&AuditLogRequest::default()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Rejected, 1));
    assert!(error.to_string().contains("redirects more than 10 times"), "{error}");
    fake.finish();

    let to_plain_http = [("location", "http://storage.test/f?sig=hidden")];
    let fake = ScriptedServer::started().respond_with(LIST, 307, &to_plain_http, Value::Null);
    let encrypted = fake.builder().base_url("https://server.test");
    let client = encrypted.build().unwrap();
    let error = list(&client).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Rejected, 1));
    assert!(error.to_string().contains("from https to an unencrypted connection"), "{error}");
    assert!(!format!("{error:?}").contains("hidden"), "{error:?}");
    fake.finish();
}

/// Covers X5, X6.
#[tokio::test(start_paused = true)]
async fn secrets_do_not_follow_a_redirect_to_another_server() {
    let log = json!({"entries": []});
    let fake = ScriptedServer::started()
        .respond_with("GET /api/v1/audit", 302, &[("location", "/moved?x=1")], Value::Null)
        .respond_with(
            "GET /moved",
            307,
            &[("location", "https://storage.test/f?sig=1")],
            Value::Null,
        )
        .respond("GET /f", 200, log);
    let env =
        [("CLOUDFLARE_ACCESS_CLIENT_SECRET", "hidden"), ("CLOUDFLARE_ACCESS_CLIENT_ID", "id")];
    let client = fake.builder().env(Env::from_pairs(env)).header("x-mine", "hidden").build();
    let client = client.unwrap();
    client.admin().get_audit_log(&AuditLogRequest::default()).await.unwrap();
    let received = fake.received();
    let [same_origin, other_origin] = &received[3..] else { panic!("two redirects") };
    assert_eq!(same_origin.header("x-api-key"), Some("tml-test-key-0123456789"), "the same server");
    assert_eq!(same_origin.header("cf-access-client-secret"), Some("hidden"));
    assert_eq!(other_origin.url, "https://storage.test/f?sig=1");
    assert_eq!(header_names(other_origin), ["accept", "user-agent"]);
    assert!(!format!("{client:?}").contains("hidden"));
    assert!(!format!("{:?}", same_origin.headers).contains("hidden"));
    fake.finish();
}

#[tokio::test(start_paused = true)]
async fn bodies_do_not_follow_a_redirect_to_another_server() {
    const COPY: &str = "POST /api/v1/copy_weights";
    let to_other_server = [("location", "https://elsewhere.test/x")];
    let copy = || {
        let source = "tinker://r/weights/a";
        tinkex::CopyCheckpoint::new(source).into_project("p").source_token("tml-other")
    };
    let fake = ScriptedServer::started().respond_with(COPY, 307, &to_other_server, Value::Null);
    let error = fake.client().rest().copy_weights(copy()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Rejected, 1));
    fake.finish();

    // A redirect that turns the request into a GET carries no data.
    let fake = ScriptedServer::started()
        .respond_with(COPY, 303, &to_other_server, Value::Null)
        .respond("GET /x", 200, json!({"tinker_path": "tinker://c/weights/a"}));
    fake.client().rest().copy_weights(copy()).await.unwrap();
    let redirected = fake.last();
    assert!(redirected.body.is_empty());
    assert_eq!(header_names(&redirected), ["accept", "user-agent"]);
    fake.finish();
}

/// Lookups and sessions of one service share its configuration, its transport and its token.
#[tokio::test(start_paused = true)]
async fn a_program_that_looks_up_and_trains_connects_once() {
    let token = jwt(3600);
    let fake = exchanging(&token)
        .respond(LIST, 200, no_sessions())
        .respond("POST /api/v1/create_session", 200, json!({"session_id": "s"}))
        .respond(
            "POST /api/v1/create_sampling_session",
            200,
            json!({"sampling_session_id": "s:sample:0"}),
        )
        .respond(LIST, 200, no_sessions());
    let client = fake.client();
    list(&client).await.unwrap();
    client.clone().create_sampling_client("base").await.unwrap();
    list(&client).await.unwrap();
    fake.finish();
}
