//! The dashboard in headless Chromium, driven by `chromedriver`. `cargo xtask browser` runs these
//! tests: they need the two programs.

mod access;
mod inference;
mod limit;
mod navigation;
mod screenshots;
mod speed;
mod training;
mod webdriver;

use std::path::Path;

use serde_json::json;
use tinkex::{AdamParams, Datum, LoraOptions, LossFn, TrainingClient};
use tinkex_server::{BUILT_IN, Server, ServerOptions};

use self::webdriver::Browser;
use crate::harness::http_client;

const KEY: &str = "tml-browser-0123456789";

/// A server with the built-in model and a key.
struct KeyServer {
    server: Server,
    data: tempfile::TempDir,
}

fn options(data: &Path) -> ServerOptions {
    let mut options = ServerOptions::new(data).api_key(KEY);
    options.threads = 1;
    options
}

impl KeyServer {
    async fn start() -> Self {
        let data = tempfile::tempdir().unwrap();
        let server = Server::start(options(data.path())).await.unwrap();
        Self { server, data }
    }

    fn url(&self) -> String {
        self.server.base_url()
    }

    async fn model(&self, name: &str) -> TrainingClient {
        let service = service(&self.url());
        let metadata = [("name".to_owned(), json!(name))].into_iter().collect();
        // Other weights for every name: equal curves would hide each other.
        let seed = name.len() as u64;
        let options = LoraOptions::new(BUILT_IN).rank(4).seed(seed).user_metadata(metadata);
        service.create_lora_training_client(options).await.unwrap()
    }

    /// Starts a browser that is logged in.
    async fn browser(&self) -> Browser {
        let browser = Browser::start(1280, 800).await;
        browser.open(&self.server.dashboard_url()).await;
        browser.wait("the list of runs", "return document.querySelector('.view.runs h1')").await;
        browser
    }
}

fn service(url: &str) -> tinkex::ServiceClient {
    let builder = tinkex::ServiceClient::builder().env(tinkex::Env::empty());
    builder.base_url(url).api_key(KEY).build().unwrap()
}

async fn train(model: &TrainingClient, steps: u32) {
    for step in 0..steps {
        let batch = vec![Datum::completion([5, 6, 7], [8 + step % 3, 9, 10]).unwrap(); 2];
        let adam = AdamParams::with_learning_rate(1e-2);
        model.step(batch, LossFn::CrossEntropy, adam).await.unwrap();
    }
}

/// Sends a completion request whose prompt is `prompt`.
async fn complete(url: &str, prompt: &str) {
    let body = json!({"model": BUILT_IN, "prompt": prompt, "max_tokens": 24, "logprobs": 3});
    let request = http_client().post(format!("{url}/v1/completions")).header("x-api-key", KEY);
    let response = request.body(body.to_string()).send().await.unwrap();
    assert_eq!(response.status(), 200);
}

/// Returns the address of a run in the page.
fn run_hash(model: &TrainingClient) -> String {
    format!("#/runs/{}", model.model_id().as_str().replace(':', "%3A"))
}

/// Returns a script that evaluates `condition`, in which `points` is the number of points of the
/// chart with the title `chart`, from its description; 0 without the chart.
fn points(chart: &str, condition: &str) -> String {
    format!(
        "const label = [...document.querySelectorAll('.chart canvas')].map(c => \
         c.getAttribute('aria-label') ?? '').find(l => l.startsWith('{chart}.'));\
         const points = Number(label?.match(/(\\d+) points/)?.[1] ?? 0); return {condition};"
    )
}
