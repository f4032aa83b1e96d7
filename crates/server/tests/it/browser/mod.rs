//! The dashboard in headless Chromium, driven by `chromedriver`. `cargo xtask browser` runs these
//! tests: they need the two programs.

mod webdriver;

use std::path::PathBuf;

use serde_json::json;
use tinkex::{AdamParams, Datum, LossFn, TrainingClient};
use tinkex_server::{BUILT_IN, FolderDashboard, Server, ServerOptions};

use self::webdriver::Browser;
use crate::harness::{http_client, setting};

const KEY: &str = "tml-browser-0123456789";

/// A server with the built-in model and a key.
struct KeyServer {
    server: Server,
    data: tempfile::TempDir,
}

fn options(data: &std::path::Path) -> ServerOptions {
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
        let create = service.create_lora_training_client(BUILT_IN).rank(4).seed(5);
        create.user_metadata(metadata).create().await.unwrap()
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

/// Script that returns the number of points of a chart, from its description; 0 without the chart.
const POINTS: &str = "const c = [...document.querySelectorAll('.chart canvas')].map(c => \
    c.getAttribute('aria-label') ?? '').find(l => l.startsWith('loss per token.'));\
    return Number(c?.match(/(\\d+) points/)?.[1] ?? 0);";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn login_runs_curves_samples_and_restart() {
    let test = KeyServer::start().await;
    let url = test.url();
    let browser = Browser::start(1280, 800).await;

    // A wrong key is refused, the right one opens the empty list.
    browser.open(&url).await;
    browser.type_into("#key", "tml-wrong").await;
    browser.click("button[type=submit]").await;
    browser.wait_text("#login-error", "not the key").await;
    browser.run("document.querySelector('#key').value = ''").await;
    browser.type_into("#key", KEY).await;
    browser.click("button[type=submit]").await;
    browser.wait_text("main", "tinkex quickstart --local").await;

    // A run appears, and its curve grows while it is trained.
    let model = test.model("pirate").await;
    train(&model, 2).await;
    browser.wait_text(".rows", "pirate").await;
    browser.click(".rows .name a").await;
    browser.wait(&format!("return (() => {{{POINTS}}})() >= 2")).await;
    train(&model, 3).await;
    browser.wait(&format!("return (() => {{{POINTS}}})() === 5")).await;
    assert_eq!(
        browser.run("return document.querySelectorAll('.chart .legend b').length > 3").await,
        true
    );

    // Two runs over each other.
    let other = test.model("<b>second</b>").await;
    train(&other, 2).await;
    browser.go("#/runs").await;
    browser.wait("return document.querySelectorAll('.rows input').length === 2").await;
    for index in [0, 1] {
        browser.run(&format!("document.querySelectorAll('.rows input')[{index}].click()")).await;
    }
    browser.wait_text("button.primary", "Compare (2)").await;
    browser.click("button.primary").await;
    browser
        .wait("return document.querySelector('.chart').querySelectorAll('.entry').length === 2")
        .await;
    browser.wait_text(".runs-legend", "<b>second</b>").await;

    // A sample with markup is text, and its tokens are shaded.
    complete(&url, "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>").await;
    browser.go("#/samples").await;
    browser.wait_text(".samples-list", "<script>window.hacked = 1</script>").await;
    browser.wait("return document.querySelectorAll('.completion .token.scored').length > 3").await;
    assert_eq!(
        browser.run("return document.querySelectorAll('.sample script, .sample img').length").await,
        0
    );
    assert_eq!(browser.run("return window.hacked === undefined").await, true);
    browser.hover(".completion .token.scored").await;
    browser.wait_text("#tip", "log-probability").await;

    // An answer streams into the playground, with shaded tokens.
    browser.go(&format!("#/playground?model={}", BUILT_IN.replace('/', "%2F"))).await;
    browser.wait("return document.querySelector('.conversation select')?.value.length > 0").await;
    browser.type_into("#message", "What does a cow say?").await;
    browser.click(".composer button.primary").await;
    browser.wait("return document.querySelectorAll('.message.assistant .token').length > 2").await;
    browser.wait("return !document.querySelector('.composer button.primary').disabled").await;
    assert_eq!(
        browser.run("return document.querySelector('.message .error') === null").await,
        true
    );

    browser.go("#/server").await;
    browser.wait_text(".tiles", "Engine load").await;
    browser.assert_clean(&url, &["401"]).await;

    // The page reconnects after a restart and loses nothing.
    browser.go(&format!("#/runs/{}", model.model_id().as_str().replace(':', "%3A"))).await;
    browser.wait(&format!("return (() => {{{POINTS}}})() === 5")).await;
    let KeyServer { server, data } = test;
    let address = server.address();
    server.stop().await;
    browser.wait("return document.querySelector('#live').dataset.state !== 'live'").await;
    let mut again = options(data.path());
    again.address = address;
    let server = Server::start(again).await.unwrap();
    train(&model, 1).await;
    browser.wait("return document.querySelector('#live').dataset.state === 'live'").await;
    browser.wait(&format!("return (() => {{{POINTS}}})() === 6")).await;
    browser.assert_clean(&url, &["401", "ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY"]).await;
    browser.close().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn a_printed_url_logs_in_once_and_every_view_is_accessible() {
    let test = KeyServer::start().await;
    let model = test.model("pirate").await;
    train(&model, 30).await;
    complete(&test.url(), "Once upon a time").await;
    model.save_weights_for_sampler("final").await.unwrap();
    let browser = Browser::start(1280, 800).await;
    browser.open(&test.server.dashboard_url()).await;
    browser.wait_text(".rows", "pirate").await;
    assert_eq!(browser.run("return location.search + location.pathname").await, "/");
    let run = format!("#/runs/{}", model.model_id().as_str().replace(':', "%3A"));
    let views = [
        "#/runs".to_owned(),
        run.clone(),
        format!("{run}?tab=checkpoints"),
        format!("{run}?tab=requests"),
        format!("{run}?tab=settings"),
        "#/samples".to_owned(),
        "#/playground".to_owned(),
        "#/server".to_owned(),
    ];
    let axe = setting("TINKEX_AXE").map(|path| std::fs::read_to_string(path).unwrap());
    for view in &views {
        browser.go(view).await;
        browser.wait("return !document.querySelector('.loading')").await;
        for theme in ["light", "dark"] {
            browser.run(&format!("document.documentElement.dataset.theme = '{theme}'")).await;
            let Some(axe) = &axe else { continue };
            let violations = browser.axe(axe).await;
            assert_eq!(violations, json!([]), "{view} {theme}");
        }
        let wide = "return document.documentElement.scrollWidth > innerWidth + 1";
        assert_eq!(browser.run(wide).await, false, "{view} is wider than the window");
    }
    // Nothing is wider than a phone.
    browser.resize(390, 800).await;
    for view in &views {
        browser.go(view).await;
        browser.wait("return !document.querySelector('.loading')").await;
        let wide = "return document.documentElement.scrollWidth - innerWidth";
        let excess = browser.run(wide).await;
        assert!(excess.as_i64() <= Some(1), "{view}: {excess}");
    }
    browser.assert_clean(&test.url(), &[]).await;
    browser.close().await;
}

/// Writes `count` runs, the first of which has `points` steps, into the database of a server that
/// is not running.
fn write_runs(data: &std::path::Path, count: u32, points: u32) {
    let connection = rusqlite::Connection::open(data.join("metadata.sqlite")).unwrap();
    let sql = format!(
        "WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {count})
         INSERT INTO runs (id, last_used, last_seq, record)
         SELECT id || n, last_used, last_seq, json_set(record, '$.id', id || n, '$.user_metadata',
             json_object('name', 'run ' || n)) FROM runs, n;
         INSERT INTO metric_series (id, run, kind, names)
         SELECT 1000, id, 'forward_backward', '[\"loss:sum\",\"weight:sum\"]' FROM runs
             WHERE id LIKE '%:train:01'
         UNION ALL SELECT 1001, id, 'optim_step', '[\"learning_rate\"]' FROM runs
             WHERE id LIKE '%:train:01';
         WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {points})
         INSERT INTO metric_points (series, seq, finished_at, queued, computed, tokens, metrics)
         SELECT 1000 + part, 2 * n + part, 1700000000000000 + n * 10000, 10, 1000, 100 * (1 - part),
             CASE part WHEN 0 THEN X'0000000000001440000000000000F03F' ELSE X'FCA9F1D24D62503F' END
             FROM n, (SELECT 0 AS part UNION ALL SELECT 1) ORDER BY n, part;"
    );
    connection.execute_batch(&sql).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn many_runs_and_a_long_run_are_fast() {
    let KeyServer { server, data } = KeyServer::start().await;
    let service = service(&server.base_url());
    service.create_lora_training_client(BUILT_IN).rank(4).create().await.unwrap();
    server.stop().await;
    write_runs(data.path(), 1_000, 100_000);
    let server = Server::start(options(data.path())).await.unwrap();
    let browser = Browser::start(1280, 800).await;
    browser.open(&server.dashboard_url()).await;
    browser.wait("return document.querySelectorAll('.rows .row').length > 10").await;
    // The first page reads the history; a reload shows what every later one takes.
    let start = std::time::Instant::now();
    browser.open(&server.base_url()).await;
    browser.wait("return document.querySelectorAll('.rows .row').length > 10").await;
    let list = start.elapsed();
    assert_eq!(
        browser.run("return document.querySelectorAll('.rows .row').length < 200").await,
        true
    );
    browser.run("scrollTo(0, 20000)").await;
    browser.wait("return [...document.querySelectorAll('.rows .row')].some(r => r.textContent.includes('run 5'))").await;
    let frames = browser.frame_time("scrollBy(0, 60)").await;
    let long = browser
        .run("return (await (await fetch('/ui/api/runs')).json()).runs.find(r => r.steps > 9)?.id")
        .await;
    let long = long.as_str().unwrap().replace(':', "%3A");
    let start = std::time::Instant::now();
    browser.go(&format!("#/runs/{long}")).await;
    browser.wait(&format!("return (() => {{{POINTS}}})() > 1000")).await;
    let run = start.elapsed();
    let zoom = browser.frame_time(
        "window.n = (window.n ?? 0) + 5; const c = document.querySelector('.chart canvas'); \
         const b = c.getBoundingClientRect(); c.dispatchEvent(new PointerEvent('pointermove', \
         {clientX: b.left + 60 + window.n % 200, clientY: b.top + 50}))",
    );
    let zoom = zoom.await;
    println!(
        "list of 1,001 runs in {list:?}, run of 100,000 steps in {run:?}, slowest frame while \
              scrolling {frames} ms, while hovering {zoom} ms"
    );
    // Generous: this is a debug build, on a machine that may be busy.
    assert!(list.as_secs() < 5 && run.as_secs() < 10, "{list:?} {run:?}");
    assert!(frames.as_f64() < Some(500.0) && zoom.as_f64() < Some(500.0), "{frames} {zoom}");
    browser.assert_clean(&server.base_url(), &[]).await;
    browser.close().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn run_folders_are_followed() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("math-run");
    std::fs::create_dir(&folder).unwrap();
    let state = r#"{"settings":{"model":"tiny","rank":4,"steps":9},"finished":false,"saved":[]}"#;
    std::fs::write(folder.join("run.json"), state).unwrap();
    let metrics = folder.join("metrics.jsonl");
    let lines = |count: u32| -> String {
        let line = |step| format!("{{\"step\":{step},\"loss\":{}}}\n", 3.0 / f64::from(step));
        (1..=count).map(line).collect()
    };
    std::fs::write(&metrics, lines(3)).unwrap();
    let address = ([127, 0, 0, 1], 0).into();
    let dashboard = FolderDashboard::start(vec![root.path().to_owned()], address).await.unwrap();
    let browser = Browser::start(1280, 800).await;
    let url = dashboard.url();
    browser.open(&url).await;
    browser.wait_text(".rows", "math-run").await;
    assert_eq!(browser.run("return document.querySelectorAll('nav a').length").await, 1);
    browser.click(".rows .name a").await;
    let points = POINTS.replace("loss per token.", "loss.");
    browser.wait(&format!("return (() => {{{points}}})() === 3")).await;
    let file = std::fs::OpenOptions::new().append(true).open(&metrics).unwrap();
    std::io::Write::write_all(&mut &file, b"{\"step\":4,\"loss\":0.5}\n").unwrap();
    browser.wait(&format!("return (() => {{{points}}})() === 4")).await;
    browser.assert_clean(url.split("/?").next().unwrap(), &[]).await;
    browser.close().await;
}

/// Returns the folder for screenshots, if `cargo xtask browser --screenshots` asks for them.
fn screenshots() -> Option<PathBuf> {
    setting("TINKEX_SCREENSHOTS").map(PathBuf::from)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "writes the images of the documentation; `cargo xtask browser --screenshots` runs it"]
async fn screenshots_of_all_views() {
    let Some(folder) = screenshots() else { return };
    std::fs::create_dir_all(&folder).unwrap();
    let test = KeyServer::start().await;
    let mut runs = Vec::new();
    for (name, rate, steps) in
        [("pirate", 3e-3, 60_u32), ("pirate-slow", 6e-4, 60), ("haiku", 1e-3, 25)]
    {
        let model = test.model(name).await;
        for step in 0..steps {
            let size = 2 + step % 3;
            let sentence = [5 + step % 7, 6, 7, 8, 9, 10, 11 + step % 5, 12];
            let batch = vec![
                Datum::completion(sentence, [8, 9 + step % 4, 10, 11]).unwrap();
                usize::try_from(size).unwrap()
            ];
            let adam = AdamParams::with_learning_rate(rate);
            model.step(batch, LossFn::CrossEntropy, adam).await.unwrap();
        }
        runs.push(model);
    }
    runs[0].save_weights_for_sampler("final").await.unwrap();
    runs[0].save_state("step-60").await.unwrap();
    for prompt in ["Once upon a time", "The cow says", "A cat and a dog"] {
        complete(&test.url(), prompt).await;
    }
    let ids: Vec<String> =
        runs.iter().map(|run| run.model_id().as_str().replace(':', "%3A")).collect();
    let browser = Browser::start(1280, 860).await;
    browser.open(&test.server.dashboard_url()).await;
    browser.wait_text(".rows", "pirate").await;
    let run = format!("#/runs/{}", ids[0]);
    let compare = format!("#/compare?runs={}%2C{}", ids[0], ids[1]);
    let views = [
        ("runs", "#/runs".to_owned()),
        ("run", run.clone()),
        ("compare", compare),
        ("requests", format!("{run}?tab=requests")),
        ("checkpoints", format!("{run}?tab=checkpoints")),
        ("samples", "#/samples".to_owned()),
        ("playground", "#/playground".to_owned()),
        ("server", "#/server".to_owned()),
    ];
    for (size, theme) in [("", "light"), ("", "dark"), ("-phone", "light")] {
        browser.resize(if size.is_empty() { 1280 } else { 390 }, 860).await;
        for (name, view) in &views {
            browser.go("#/server").await;
            browser.go(view).await;
            browser.run(&format!("document.documentElement.dataset.theme = '{theme}'; dispatchEvent(new Event('resize'))")).await;
            browser.wait("return !document.querySelector('.loading')").await;
            if *name == "playground" {
                browser.type_into("#message", "What does a cow say?").await;
                browser.click(".composer button.primary").await;
                browser.wait("return document.querySelectorAll('.message.assistant .token').length > 2 && !document.querySelector('.composer button.primary').disabled").await;
            }
            browser.wait("return new Promise(done => setTimeout(() => done(true), 400))").await;
            let file = format!("dashboard-{name}-{theme}{size}.png");
            std::fs::write(folder.join(file), browser.screenshot().await).unwrap();
        }
    }
    browser.close().await;
}
