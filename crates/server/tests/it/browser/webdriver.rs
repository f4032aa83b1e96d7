//! [`Browser`]: a client for `chromedriver`, which speaks JSON over HTTP (W3C WebDriver).

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use serde_json::{Value, json};

use super::limit::{self, TestLimit};
use crate::harness::http_client;

/// Maximum time in milliseconds for which a condition is waited for, in the browser.
const WAIT: u32 = 30_000;
/// Maximum time for a response of the driver. Longer than [`WAIT`], during which it responds to
/// nothing.
const RESPONSE: Duration = Duration::from_secs(45);
/// Maximum time for the start of the browser: the first one on a machine reads it from the disk.
const START: Duration = Duration::from_secs(60);

/// A headless browser. Dropping it ends its processes.
pub(super) struct Browser {
    driver: Child,
    client: reqwest::Client,
    /// URL of the session.
    session: String,
    /// Process id of the browser.
    process: u64,
    _profile: tempfile::TempDir,
    _limit: TestLimit,
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Not with a request to the driver: it keeps the connection open after its response, and it
        // does not respond while a command is running, as after a failed test.
        limit::kill(self.process);
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// Starts `chromedriver` and returns it with its port.
async fn start_driver(home: &std::path::Path) -> (Child, u16) {
    let mut driver = Command::new("chromedriver")
        .arg("--port=0")
        // The home folder of a CI user may not exist.
        .env("HOME", home)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("chromedriver cannot be started");
    let output = BufReader::new(driver.stdout.take().unwrap());
    let find_port = move || {
        let mut lines = output.lines().map_while(Result::ok);
        lines.find_map(|line| {
            let (_, port) = line.split_once("successfully on port ")?;
            port.trim_end_matches('.').parse::<u16>().ok()
        })
    };
    let port = tokio::time::timeout(START, tokio::task::spawn_blocking(find_port)).await;
    let port = port.expect("chromedriver did not start in time").unwrap();
    (driver, port.expect("chromedriver printed no port"))
}

impl Browser {
    /// Starts a browser with a window of `width` × `height` pixels.
    pub(super) async fn start(width: u32, height: u32) -> Self {
        let limit = TestLimit::start();
        let profile = tempfile::tempdir().unwrap();
        let (driver, port) = start_driver(profile.path()).await;
        limit.watch(u64::from(driver.id()));
        let arguments = [
            "--headless=new".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-gpu".to_owned(),
            "--disable-quic".to_owned(),
            "--no-first-run".to_owned(),
            "--disable-background-networking".to_owned(),
            "--disable-component-update".to_owned(),
            "--disable-sync".to_owned(),
            "--disable-crash-reporter".to_owned(),
            "--disable-breakpad".to_owned(),
            "--no-proxy-server".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--hide-scrollbars".to_owned(),
            format!("--user-data-dir={}", profile.path().display()),
            format!("--window-size={width},{height}"),
        ];
        let capabilities = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "timeouts": {"script": WAIT + 5_000, "pageLoad": WAIT},
        }}});
        let client = http_client();
        let base = format!("http://127.0.0.1:{port}/session");
        let created = send(&client, START, &base, "start of the browser", capabilities).await;
        let id = created["sessionId"].as_str().unwrap();
        let process = created["capabilities"]["goog:processID"].as_u64().unwrap();
        limit.watch(process);
        let session = format!("{base}/{id}");
        let browser = Self { driver, client, session, process, _profile: profile, _limit: limit };
        browser.resize(width, height).await;
        browser
    }

    /// Sends a command. `what` names it in the message of a failure.
    async fn post(&self, what: &str, path: &str, body: Value) -> Value {
        let url = format!("{}{path}", self.session);
        send(&self.client, RESPONSE, &url, what, body).await
    }

    /// Opens a URL.
    pub(super) async fn open(&self, url: &str) {
        self.post(url, "/url", json!({ "url": url })).await;
    }

    /// Changes the part of the address after `#`.
    pub(super) async fn go(&self, hash: &str) {
        self.run(&format!("location.hash = {}", json!(hash))).await;
    }

    /// Sets the size of the page.
    pub(super) async fn resize(&self, width: u32, height: u32) {
        let params =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        let command = json!({"cmd": "Emulation.setDeviceMetricsOverride", "params": params});
        self.post("resize", "/goog/cdp/execute", command).await;
    }

    /// Runs a script, the body of an async function, and returns its value.
    pub(super) async fn run(&self, script: &str) -> Value {
        self.run_named(script, script).await
    }

    async fn run_named(&self, what: &str, script: &str) -> Value {
        let script = format!("return (async () => {{ {script} }})()");
        self.post(what, "/execute/sync", json!({"script": script, "args": []})).await
    }

    /// Waits until a script returns a true value. `what` names the condition in the message of a
    /// failure.
    pub(super) async fn wait(&self, what: &str, script: &str) {
        let waiting = format!(
            "const end = Date.now() + {WAIT}; \
             for (;;) {{ let found; try {{ found = await (async () => {{ {script} }})(); }} catch {{}} \
             if (found) return true; if (Date.now() > end) return false; \
             await new Promise(done => setTimeout(done, 10)); }}"
        );
        if self.run_named(what, &waiting).await != true {
            let text = self.run("return location.href + '\\n' + document.body.innerText").await;
            let text = text.as_str().unwrap_or_default();
            panic!("waited {WAIT} ms for {what}: {script}\nthe page is {text}");
        }
    }

    /// Waits until an element of a selector contains `text`.
    pub(super) async fn wait_text(&self, selector: &str, text: &str) {
        let what = format!("{text:?} in {selector}");
        let selector = json!(selector);
        let text = json!(text);
        let script = format!(
            "return [...document.querySelectorAll({selector})].some(e => e.textContent.includes({text}))"
        );
        self.wait(&what, &script).await;
    }

    async fn element(&self, selector: &str) -> String {
        let script = format!("return document.querySelector({}) !== null", json!(selector));
        self.wait(selector, &script).await;
        let query = json!({"using": "css selector", "value": selector});
        let found = self.post(selector, "/element", query).await;
        let id = found.as_object().and_then(|found| found.values().next()?.as_str());
        id.expect("the element has no id").to_owned()
    }

    pub(super) async fn click(&self, selector: &str) {
        let id = self.element(selector).await;
        let what = format!("click on {selector}");
        self.post(&what, &format!("/element/{id}/click"), json!({})).await;
    }

    pub(super) async fn type_into(&self, selector: &str, text: &str) {
        let id = self.element(selector).await;
        let what = format!("text for {selector}");
        self.post(&what, &format!("/element/{id}/value"), json!({ "text": text })).await;
    }

    /// Moves the pointer over an element.
    pub(super) async fn hover(&self, selector: &str) {
        let id = self.element(selector).await;
        let origin = json!({"element-6066-11e4-a52e-4f735466cecf": id});
        let step = json!({"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin});
        let mouse = json!({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"},
                           "actions": [step]});
        let what = format!("pointer over {selector}");
        self.post(&what, "/actions", json!({ "actions": [mouse] })).await;
    }

    /// Returns the median time in milliseconds between 30 frames, each after the script `change`.
    pub(super) async fn frame_time(&self, change: &str) -> f64 {
        let script = format!(
            "let last = performance.now(); const times = []; for (let n = 0; n < 30; n++) {{ \
             (() => {{ {change} }})(); const now = await new Promise(requestAnimationFrame); \
             times.push(now - last); last = now; }} \
             return times.sort((a, b) => a - b)[15]"
        );
        self.run(&script).await.as_f64().unwrap()
    }

    /// Runs axe-core and returns the violations.
    pub(super) async fn axe(&self, source: &str) -> Value {
        let loaded = self.run("return typeof axe !== 'undefined'").await;
        if loaded != true {
            let script = json!({"script": format!("{source}; window.axe = axe;"), "args": []});
            self.post("load of axe-core", "/execute/sync", script).await;
        }
        let script = "const found = await axe.run(document, {resultTypes: ['violations']}); \
                      return found.violations.map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n => \
                      n.html.slice(0, 160) + ' ' + (n.any[0]?.message ?? '')).join(' | '))";
        self.run_named("axe-core", script).await
    }

    /// Returns a PNG of the page.
    pub(super) async fn screenshot(&self) -> Vec<u8> {
        let request = self.client.get(format!("{}/screenshot", self.session)).timeout(RESPONSE);
        let response = request.send().await.unwrap();
        let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        let text = body["value"].as_str().unwrap();
        base64::engine::general_purpose::STANDARD.decode(text).unwrap()
    }

    /// Checks that the browser has logged no error but those that contain one of `expected`, and
    /// has sent requests to `url` only.
    pub(super) async fn assert_clean(&self, url: &str, expected: &[&str]) {
        let logged = self.post("log of the console", "/se/log", json!({"type": "browser"})).await;
        for entry in logged.as_array().into_iter().flatten() {
            let message = entry["message"].as_str().unwrap_or_default();
            let known = expected.iter().any(|part| message.contains(part));
            assert!(known || entry["level"] == "INFO" || entry["level"] == "DEBUG", "{message}");
        }
        let body = json!({"type": "performance"});
        let logged = self.post("log of requests", "/se/log", body).await;
        let mut own = 0;
        for entry in logged.as_array().into_iter().flatten() {
            let text = entry["message"].as_str().unwrap_or_default();
            let message: Value = serde_json::from_str(text).unwrap();
            let event = &message["message"];
            if event["method"] != "Network.requestWillBeSent" {
                continue;
            }
            let target = event["params"]["request"]["url"].as_str().unwrap_or_default();
            // The first tab of the browser itself has `chrome:` URLs.
            if target.starts_with("data:") || target.starts_with("chrome") {
                continue;
            }
            assert!(target.starts_with(url), "request to {target}");
            own += 1;
        }
        assert!(own > 0, "the browser has logged no request");
    }
}

/// Sends a command and returns its value. `what` names it in the message of a failure.
async fn send(
    client: &reqwest::Client,
    limit: Duration,
    url: &str,
    what: &str,
    body: Value,
) -> Value {
    limit::note(what);
    let sent = client.post(url).timeout(limit).body(body.to_string()).send().await;
    let response =
        sent.unwrap_or_else(|error| panic!("{what}: no response of the driver: {error}"));
    let status = response.status();
    let content = response.bytes().await;
    let content = content.unwrap_or_else(|error| panic!("{what}: incomplete response: {error}"));
    let mut body: Value = serde_json::from_slice(&content).unwrap();
    assert!(status.is_success(), "{what}: {body}");
    body["value"].take()
}
