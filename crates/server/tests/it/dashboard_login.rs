//! Login to the dashboard: sessions end on the server, codes need the key, attempts are limited.

use serde_json::json;
use tinkex_server::Server;

use crate::harness::{TestServer, http_client, options};

const KEY: &str = "tml-secret";
const RUNS: &str = "/ui/api/runs";

/// Returns a server with a key.
async fn key_server() -> TestServer {
    TestServer::with(|options| *options = options.clone().api_key(KEY)).await
}

/// Sends a login with a key, as the page does.
async fn log_in(url: &str, key: &str, headers: &[(&str, &str)]) -> reqwest::Response {
    log_in_with(&http_client(), url, key, headers).await
}

async fn log_in_with(
    client: &reqwest::Client,
    url: &str,
    key: &str,
    headers: &[(&str, &str)],
) -> reqwest::Response {
    let body = json!({"key": key}).to_string();
    let mut request = client.post(format!("{url}/ui/api/login")).header("origin", url).body(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.unwrap()
}

/// Logs in and returns the cookie.
async fn session(url: &str) -> String {
    let response = log_in(url, KEY, &[]).await;
    assert_eq!(response.status(), 200);
    cookie(&response)
}

fn cookie(response: &reqwest::Response) -> String {
    let header = response.headers()["set-cookie"].to_str().unwrap();
    header.split(';').next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn logging_out_ends_the_session_on_the_server() {
    let test_server = key_server().await;
    let url = test_server.server.base_url();
    let http = test_server.http();
    let ends = session(&url).await;
    let stays = session(&url).await;
    let events = http_client().get(format!("{url}/ui/api/events")).header("cookie", &ends);
    let mut events = events.send().await.unwrap();
    assert_eq!(events.status(), 200);
    let own = ("origin", url.as_str());
    let sent = [("cookie", ends.as_str()), own];
    assert_eq!(http.send("POST", "/ui/api/logout", &sent, vec![]).await.0, 200);
    // A copy of the cookie is useless, also for the stream that was open and for inference.
    assert_eq!(http.send("GET", RUNS, &sent, vec![]).await.0, 401);
    assert_eq!(http.send("GET", "/v1/models", &sent, vec![]).await.0, 401);
    while events.chunk().await.unwrap().is_some() {}
    let other = [("cookie", stays.as_str()), own];
    assert_eq!(http.send("GET", RUNS, &other, vec![]).await.0, 200, "the other browser");
    // Both states are durable.
    let TestServer { server, data } = test_server;
    drop(server);
    let server = Server::start(options(data.path()).api_key(KEY)).await.unwrap();
    let http = crate::harness::Http::new(&server.base_url());
    // The port, and with it the name of the cookie, may have changed.
    let renamed = |cookie: &str| {
        let token = cookie.split_once('=').unwrap().1;
        format!("tinkex_session_{}={token}", server.address().port())
    };
    assert_eq!(http.send("GET", RUNS, &[("cookie", &renamed(&ends))], vec![]).await.0, 401);
    assert_eq!(http.send("GET", RUNS, &[("cookie", &renamed(&stays))], vec![]).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_end_when_the_key_changes() {
    let test_server = key_server().await;
    let token = session(&test_server.server.base_url()).await;
    let token = token.split_once('=').unwrap().1.to_owned();
    let TestServer { server, data } = test_server;
    server.stop().await;
    let server = Server::start(options(data.path()).api_key("tml-another")).await.unwrap();
    let cookie = format!("tinkex_session_{}={token}", server.address().port());
    let http = crate::harness::Http::new(&server.base_url());
    assert_eq!(http.send("GET", RUNS, &[("cookie", &cookie)], vec![]).await.0, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_code_needs_the_key() {
    let test_server = key_server().await;
    let url = test_server.server.base_url();
    let http = test_server.http();
    let cookie = session(&url).await;
    let own = ("origin", url.as_str());
    for (headers, status) in [
        (vec![own], 401),
        (vec![own, ("x-api-key", "tml-wrong")], 401),
        (vec![own, ("cookie", cookie.as_str())], 403),
        (vec![("x-api-key", KEY)], 200),
    ] {
        let (sent, body) = http.send("POST", "/ui/api/code", &headers, vec![]).await;
        assert_eq!(sent, status, "{headers:?} {body}");
        assert_eq!(body["code"].is_string(), status == 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_logins_are_limited_by_address() {
    let test_server = TestServer::with(|options| {
        *options = options.clone().api_key(KEY);
        options.trusted_proxies = vec!["127.0.0.1".parse().unwrap()];
    })
    .await;
    let url = test_server.server.base_url();
    let attacker = [("x-forwarded-for", "192.0.2.1"), ("x-forwarded-proto", "https")];
    let honest = [("x-forwarded-for", "192.0.2.2"), ("x-forwarded-proto", "https")];
    let mut accepted = 0;
    let refused = loop {
        let response = log_in(&url, "tml-wrong", &attacker).await;
        match response.status().as_u16() {
            401 => accepted += 1,
            _ => break response,
        }
    };
    assert!(accepted >= 10, "{accepted}");
    assert_eq!(refused.status(), 429);
    let seconds = refused.headers()["retry-after"].to_str().unwrap();
    assert!((1..=3).contains(&seconds.parse::<u64>().unwrap()), "{seconds}");
    let body = refused.text().await.unwrap();
    assert!(body.contains("too many failed logins"), "{body}");
    let right = log_in(&url, KEY, &attacker).await;
    assert_eq!(right.status(), 429, "the response does not reveal whether the key is right");
    let allowed = log_in(&url, KEY, &honest).await;
    assert_eq!(allowed.status(), 200);
    let set = allowed.headers()["set-cookie"].to_str().unwrap();
    assert!(set.contains("; Secure"), "the proxy has TLS: {set}");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_logins_are_limited_in_total_and_headers_of_strangers_are_ignored() {
    let test_server = key_server().await;
    let url = test_server.server.base_url();
    let client = http_client();
    let secure = [("x-forwarded-proto", "https")];
    let response = log_in_with(&client, &url, KEY, &secure).await;
    let cookie = response.headers()["set-cookie"].to_str().unwrap();
    assert!(!cookie.contains("Secure"), "{cookie}");
    let mut accepted = 0;
    // A client that changes its headers does not become another client.
    loop {
        let claimed = format!("192.0.2.{}", accepted % 250);
        let headers = [("x-forwarded-for", claimed.as_str())];
        let response = log_in_with(&client, &url, "tml-wrong", &headers).await;
        if response.status() == 429 {
            break;
        }
        assert_eq!(response.status(), 401);
        accepted += 1;
    }
    assert!(accepted >= 200, "{accepted}");
    // The API does not need a login.
    let http = test_server.http();
    assert_eq!(http.send("GET", RUNS, &[("x-api-key", KEY)], vec![]).await.0, 200);
}

/// Revocation and rotation of a key end its sessions, their streams and its codes.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_streams_and_codes_end_with_their_key() {
    let test_server = key_server().await;
    let url = test_server.server.base_url();
    let http = test_server.http();
    let administrator = [("x-api-key", KEY)];
    let created = json!({"name": "alice", "role": "user"}).to_string().into_bytes();
    let (status, created) = http.send("POST", "/api/v1/keys", &administrator, created).await;
    assert_eq!(status, 200, "{created}");
    let mut key = created["key"].as_str().unwrap().to_owned();
    let own = session(&url).await;
    for (method, path) in [("POST", "/api/v1/keys/alice/rotate"), ("DELETE", "/api/v1/keys/alice")]
    {
        let login = log_in(&url, &key, &[]).await;
        assert_eq!(login.status(), 200);
        let cookie = cookie(&login);
        let (_, code) = http.send("POST", "/ui/api/code", &[("x-api-key", &key)], vec![]).await;
        let code = code["code"].as_str().unwrap();
        let events = http_client().get(format!("{url}/ui/api/events")).header("cookie", &cookie);
        let mut events = events.send().await.unwrap();
        assert_eq!(events.status(), 200);
        let (status, ended) = http.send(method, path, &administrator, vec![]).await;
        assert_eq!(status, 200, "{ended}");
        assert_eq!(http.send("GET", RUNS, &[("cookie", &cookie)], vec![]).await.0, 401);
        while events.chunk().await.is_ok_and(|chunk| chunk.is_some()) {}
        let redirect = reqwest::redirect::Policy::none();
        let browser = reqwest::Client::builder().no_proxy().redirect(redirect).build().unwrap();
        let opened = browser.get(format!("{url}/?code={code}")).send().await.unwrap();
        assert_eq!(opened.status(), 303);
        assert!(!opened.headers().contains_key("set-cookie"), "{method}");
        assert_eq!(log_in(&url, &key, &[]).await.status(), 401);
        key = ended["key"].as_str().unwrap_or_default().to_owned();
    }
    let sent = [("cookie", own.as_str())];
    assert_eq!(http.send("GET", RUNS, &sent, vec![]).await.0, 200, "sessions of other keys remain");
}
