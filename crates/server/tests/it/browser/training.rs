//! Runs and their curves.

use tinkex_runs::{MethodSettings, RunFolder, RunRecord, RunSettings, SftSettings};
use tinkex_server::{FolderDashboard, Server};

use super::webdriver::Browser;
use super::{KeyServer, options, points, run_hash, train};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn a_curve_grows_while_a_run_is_trained() {
    let test = KeyServer::start().await;
    let browser = test.browser().await;
    let model = test.model("pirate").await;
    train(&model, 2).await;
    browser.wait_text(".rows", "pirate").await;
    browser.wait_text(".rows .status", "training").await;
    browser.click(".rows .name a").await;
    browser.wait("two points", &points("loss per token", "points === 2")).await;
    // Every number of points is recorded: the curve must grow in several parts.
    let script = points("loss per token", "points");
    browser
        .run(&format!(
            "window.counts = new Set(); setInterval(() => counts.add((() => {{{script}}})()), 5)"
        ))
        .await;
    let training = train(&model, 40);
    let watching = async {
        let some = points("loss per token", "points >= 4 && points < 42");
        browser.wait("a part of the points", &some).await;
    };
    tokio::join!(training, watching);
    browser.wait("all points", &points("loss per token", "points === 42")).await;
    let counts = browser.run("return counts.size").await;
    assert!(counts.as_u64() > Some(2), "the number of points had {counts} values");
    let charts =
        "return [...document.querySelectorAll('.chart figcaption')].map(c => c.textContent)";
    let charts = browser.run(charts).await.to_string();
    for chart in ["loss per token", "learning rate", "gradient norm", "tokens/s"] {
        assert!(charts.contains(chart), "{chart}: {charts}");
    }
    // The values under the crosshair are the values that the API returns.
    let shown = browser
        .run(
            "const id = decodeURIComponent(location.hash.split('/').at(-1)); \
             const curve = (await (await fetch('/ui/api/metrics?id=' + id)).json()) \
                 .metrics['loss per token']; \
             const canvas = document.querySelector('.chart canvas'); \
             canvas.focus(); canvas.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home'})); \
             await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame); \
             const legend = document.querySelector('.chart .legend').textContent; \
             return legend.includes('raw ' + Number(curve.value[0].toPrecision(3))) \
                 && legend.includes('step 1') || legend",
        )
        .await;
    assert_eq!(shown, true);
    browser.assert_clean(&test.url(), &[]).await;
}

/// Script that returns the number of pixels of the first chart that have each of the colours of the
/// first three runs.
const PIXELS: &str = "const c = document.querySelector('.chart canvas'); \
    const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height); \
    return [[0x0b, 0x6b, 0xcb], [0xc4, 0x53, 0x0a], [0x00, 0x79, 0x5c]].map(([r, g, b]) => { \
        let count = 0; for (let n = 0; n < data.length; n += 4) if (Math.abs(data[n] - r) \
            + Math.abs(data[n + 1] - g) + Math.abs(data[n + 2] - b) < 12 && data[n + 3] > 250) \
            count += 1; \
        return count; })";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn two_runs_are_drawn_over_each_other() {
    let test = KeyServer::start().await;
    let first = test.model("pirate").await;
    let second = test.model("<b>second</b>").await;
    train(&first, 12).await;
    train(&second, 4).await;
    let browser = test.browser().await;
    let two = "return document.querySelectorAll('.rows input').length === 2";
    browser.wait("two runs", two).await;
    browser.run("document.documentElement.dataset.theme = 'light'").await;
    for index in [0, 1] {
        browser.run(&format!("document.querySelectorAll('.rows input')[{index}].click()")).await;
    }
    browser.wait_text("button.primary", "Compare (2)").await;
    browser.click("button.primary").await;
    let entries =
        "return document.querySelector('.chart').querySelectorAll('.legend .entry').length === 2";
    browser.wait("two entries in the legend of a chart", entries).await;
    browser.wait_text(".runs-legend", "<b>second</b>").await;
    let markup = browser.run("return document.querySelectorAll('.runs-legend b').length").await;
    assert_eq!(markup, 0, "a name is text");
    let pixels = browser.run(PIXELS).await;
    assert!(pixels[0].as_u64() > Some(20) && pixels[1].as_u64() > Some(20), "{pixels}");
    assert_eq!(pixels[2], 0, "there is no third run");
    browser.assert_clean(&test.url(), &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn the_page_reconnects_after_a_restart_and_loses_nothing() {
    let test = KeyServer::start().await;
    let url = test.url();
    let model = test.model("pirate").await;
    train(&model, 5).await;
    let browser = test.browser().await;
    browser.go(&run_hash(&model)).await;
    browser.wait("five points", &points("loss per token", "points === 5")).await;
    browser.wait_text("#live", "live").await;
    let KeyServer { server, data } = test;
    let address = server.address();
    server.stop().await;
    let lost = "return document.querySelector('#live').dataset.state === 'reconnecting'";
    browser.wait("a lost connection", lost).await;
    let mut again = options(data.path());
    again.address = address;
    let server = Server::start(again).await.unwrap();
    train(&model, 3).await;
    let live = "return document.querySelector('#live').dataset.state === 'live'";
    browser.wait("a new connection", live).await;
    browser.wait("eight points", &points("loss per token", "points === 8")).await;
    let reloaded = "return performance.getEntriesByType('navigation').length";
    assert_eq!(browser.run(reloaded).await, 1, "the page was not loaded again");
    browser.assert_clean(&url, &["ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY"]).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn run_folders_are_followed() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("math-run");
    let settings = RunSettings::new("tiny", MethodSettings::Sft(SftSettings::default()));
    RunFolder::new(&folder, RunRecord::new("math", settings)).unwrap().store().unwrap();
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
    browser.wait("three points", &points("loss", "points === 3")).await;
    let file = std::fs::OpenOptions::new().append(true).open(&metrics).unwrap();
    std::io::Write::write_all(&mut &file, b"{\"step\":4,\"loss\":0.5}\n").unwrap();
    browser.wait("four points", &points("loss", "points === 4")).await;
    browser.assert_clean(url.split("/?").next().unwrap(), &[]).await;
}
