//! [`Browser`]: a client for `chromedriver`, which speaks JSON over HTTP (W3C WebDriver).

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use base64::Engine as _;
use serde_json::{Value, json};

use crate::harness::http_client;

/// Maximum time in milliseconds for which a condition is waited for, in the browser.
const WAIT: u32 = 60_000;

/// A headless browser. Dropping it ends its processes.
pub(super) struct Browser {
    driver: Child,
    client: reqwest::Client,
    /// URL of the session.
    session: String,
    _profile: tempfile::TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Ends the browser, which would outlive its driver, also after a failed test.
        let address = self.session.strip_prefix("http://").and_then(|url| url.split_once('/'));
        if let Some((host, path)) = address
            && let Ok(mut stream) = TcpStream::connect(host)
        {
            let request =
                format!("DELETE /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
            let _ = stream.write_all(request.as_bytes());
            let _ = stream.read_to_end(&mut Vec::new());
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

impl Browser {
    /// Starts a browser with a window of `width` × `height` pixels.
    pub(super) async fn start(width: u32, height: u32) -> Self {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver cannot be started");
        let output = BufReader::new(driver.stdout.take().unwrap());
        let mut lines = output.lines().map_while(Result::ok);
        let port = lines.find_map(|line| {
            let (_, port) = line.split_once("successfully on port ")?;
            port.trim_end_matches('.').parse::<u16>().ok()
        });
        let port = port.expect("chromedriver printed no port");
        let profile = tempfile::tempdir().unwrap();
        let arguments = [
            "--headless=new".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-gpu".to_owned(),
            "--disable-quic".to_owned(),
            "--no-first-run".to_owned(),
            "--disable-background-networking".to_owned(),
            "--disable-component-update".to_owned(),
            "--disable-sync".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--hide-scrollbars".to_owned(),
            format!("--user-data-dir={}", profile.path().display()),
            format!("--window-size={width},{height}"),
        ];
        let capabilities = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "timeouts": {"script": WAIT + 5_000},
        }}});
        let client = http_client();
        let base = format!("http://127.0.0.1:{port}/session");
        let created = send(&client, &base, capabilities).await;
        let id = created["sessionId"].as_str().unwrap();
        let browser = Self { driver, client, session: format!("{base}/{id}"), _profile: profile };
        browser.resize(width, height).await;
        browser
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        send(&self.client, &format!("{}{path}", self.session), body).await
    }

    /// Opens a URL.
    pub(super) async fn open(&self, url: &str) {
        self.post("/url", json!({ "url": url })).await;
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
        self.post("/goog/cdp/execute", command).await;
    }

    /// Runs a script, the body of an async function, and returns its value.
    pub(super) async fn run(&self, script: &str) -> Value {
        let script = format!("return (async () => {{ {script} }})()");
        self.post("/execute/sync", json!({"script": script, "args": []})).await
    }

    /// Waits until a script returns a true value.
    pub(super) async fn wait(&self, script: &str) {
        let waiting = format!(
            "const end = Date.now() + {WAIT}; \
             for (;;) {{ let found; try {{ found = await (async () => {{ {script} }})(); }} catch {{}} \
             if (found) return true; if (Date.now() > end) return false; \
             await new Promise(done => setTimeout(done, 20)); }}"
        );
        if self.run(&waiting).await != true {
            let text = self.run("return location.href + '\\n' + document.body.innerText").await;
            panic!("not found: {script}\n{}", text.as_str().unwrap_or_default());
        }
    }

    /// Waits until the first element of a selector that contains `text` exists.
    pub(super) async fn wait_text(&self, selector: &str, text: &str) {
        let (selector, text) = (json!(selector), json!(text));
        self.wait(&format!(
            "return [...document.querySelectorAll({selector})].some(e => e.textContent.includes({text}))"
        ))
        .await;
    }

    async fn element(&self, selector: &str) -> String {
        self.wait(&format!("return document.querySelector({}) !== null", json!(selector))).await;
        let found =
            self.post("/element", json!({"using": "css selector", "value": selector})).await;
        let id = found.as_object().and_then(|found| found.values().next()?.as_str());
        id.expect("the element has no id").to_owned()
    }

    pub(super) async fn click(&self, selector: &str) {
        let id = self.element(selector).await;
        self.post(&format!("/element/{id}/click"), json!({})).await;
    }

    pub(super) async fn type_into(&self, selector: &str, text: &str) {
        let id = self.element(selector).await;
        self.post(&format!("/element/{id}/value"), json!({ "text": text })).await;
    }

    /// Moves the pointer over an element.
    pub(super) async fn hover(&self, selector: &str) {
        let id = self.element(selector).await;
        let origin = json!({"element-6066-11e4-a52e-4f735466cecf": id});
        let step = json!({"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin});
        let mouse = json!({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"},
                           "actions": [step]});
        self.post("/actions", json!({ "actions": [mouse] })).await;
    }

    /// Returns the longest time in milliseconds between 30 frames, each after the script `change`.
    pub(super) async fn frame_time(&self, change: &str) -> Value {
        let script = format!(
            "let [last, longest] = [performance.now(), 0]; for (let n = 0; n < 30; n++) {{ \
             (() => {{ {change} }})(); const now = await new Promise(requestAnimationFrame); \
             longest = Math.max(longest, now - last); last = now; }} return Math.round(longest);"
        );
        self.run(&script).await
    }

    /// Runs axe-core and returns the violations.
    pub(super) async fn axe(&self, source: &str) -> Value {
        let loaded = self.run("return typeof axe !== 'undefined'").await;
        if loaded != true {
            self.post(
                "/execute/sync",
                json!({"script": format!("{source}; window.axe = axe;"), "args": []}),
            )
            .await;
        }
        let script = "const found = await axe.run(document, {resultTypes: ['violations']}); \
                      return found.violations.map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n => \
                      n.html.slice(0, 160) + ' ' + (n.any[0]?.message ?? '')).join(' | '))";
        self.run(script).await
    }

    /// Returns a PNG of the page.
    pub(super) async fn screenshot(&self) -> Vec<u8> {
        let response =
            self.client.get(format!("{}/screenshot", self.session)).send().await.unwrap();
        let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        let text = body["value"].as_str().unwrap();
        base64::engine::general_purpose::STANDARD.decode(text).unwrap()
    }

    /// Checks that the browser has logged no error but those that contain one of `expected`, and
    /// has sent requests to `url` only.
    pub(super) async fn assert_clean(&self, url: &str, expected: &[&str]) {
        let logged = self.post("/se/log", json!({"type": "browser"})).await;
        for entry in logged.as_array().into_iter().flatten() {
            let message = entry["message"].as_str().unwrap_or_default();
            let known = expected.iter().any(|part| message.contains(part));
            assert!(known || entry["level"] == "INFO" || entry["level"] == "DEBUG", "{message}");
        }
        let logged = self.post("/se/log", json!({"type": "performance"})).await;
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

    /// Ends the browser.
    pub(super) async fn close(self) {
        let _ = self.client.delete(&self.session).send().await;
    }
}

/// Sends a command and returns its value.
async fn send(client: &reqwest::Client, url: &str, body: Value) -> Value {
    let response = client.post(url).body(body.to_string()).send().await.unwrap();
    let status = response.status();
    let mut body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert!(status.is_success(), "{url}: {body}");
    body["value"].take()
}
