//! Many runs, and a run with many steps.

use std::path::Path;
use std::time::Instant;

use tinkex_server::{BUILT_IN, Server};

use super::webdriver::Browser;
use super::{KeyServer, options, points, service};

/// Number of steps of the long runs.
const STEPS: u32 = 100_000;
/// Number of long runs: each is opened once, because the server remembers the last runs it showed.
const LONG_RUNS: u32 = 3;

/// Writes `count` runs, the first of which are long, into the database of a server that is not
/// running.
fn write_runs(data: &Path, count: u32) {
    let connection = rusqlite::Connection::open(data.join("metadata.sqlite")).unwrap();
    let sql = format!(
        "WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {count})
         INSERT INTO runs (id, last_used, last_seq, record)
         SELECT id || n, last_used, last_seq, json_set(record, '$.id', id || n,
             '$.name', 'run ' || n) FROM runs, n;"
    );
    connection.execute_batch(&sql).unwrap();
    for run in 1..=LONG_RUNS {
        let series = 1_000 + 2 * run;
        let sql = format!(
            "INSERT INTO metric_series (id, run, kind, names)
             SELECT {series}, id, 'forward_backward', '[\"loss:sum\",\"weight:sum\",\"kl:mean\"]'
                 FROM runs WHERE id LIKE '%:train:0{run}'
             UNION ALL SELECT {series} + 1, id, 'optim_step',
                 '[\"learning_rate\",\"unclipped_grad_l2:mean\"]'
                 FROM runs WHERE id LIKE '%:train:0{run}';
             WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {STEPS})
             INSERT INTO metric_points
                 (series, seq, finished_at, queued, computed, tokens, metrics)
             SELECT {series} + part, 2 * n + part, 1700000000000000 + n * 10000, 10, 1000,
                 100 * (1 - part), CASE part
                     WHEN 0 THEN X'0000000000001440000000000000F03F000000000000F03F'
                     ELSE X'FCA9F1D24D62503F000000000000F03F' END
                 FROM n, (SELECT 0 AS part UNION ALL SELECT 1) ORDER BY n, part;"
        );
        connection.execute_batch(&sql).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn many_runs_and_long_runs_are_shown() {
    let KeyServer { server, data } = KeyServer::start().await;
    let service = service(&server.base_url());
    service.create_lora_training_client(tinkex::LoraOptions::new(BUILT_IN).rank(4)).await.unwrap();
    server.stop().await;
    write_runs(data.path(), 1_000);
    let server = Server::start(options(data.path())).await.unwrap();
    let browser = Browser::start(1280, 800).await;
    let rows = "return document.querySelectorAll('.rows .row').length > 10";
    // The first page reads the history of all runs.
    let start = Instant::now();
    browser.open(&server.dashboard_url()).await;
    browser.wait("rows of runs", rows).await;
    let first = start.elapsed();
    let mut lists = Vec::new();
    for _ in 0..3 {
        let start = Instant::now();
        browser.open(&server.base_url()).await;
        browser.wait("rows of runs", rows).await;
        lists.push(start.elapsed());
    }
    let count = browser.run("return document.querySelectorAll('.rows .row').length").await;
    assert!(count.as_u64() < Some(200), "{count} rows exist, though few are visible");
    browser.run("scrollTo(0, 20000)").await;
    let scrolled = "return [...document.querySelectorAll('.rows .row')] \
                    .some(r => r.textContent.includes('run 5'))";
    browser.wait("rows further down", scrolled).await;
    let scrolling = browser.frame_time("scrollBy(0, 60)").await;
    let long = "return (await (await fetch('/ui/api/runs')).json()).runs \
                .filter(r => r.steps > 9).map(r => r.id)";
    let long = browser.run(long).await;
    let mut runs = Vec::new();
    let mut requests = Vec::new();
    for id in long.as_array().unwrap() {
        let id = id.as_str().unwrap().replace(':', "%3A");
        let start = Instant::now();
        browser.go(&format!("#/runs/{id}")).await;
        browser.wait("the curve", &points("loss per token", "points > 500")).await;
        runs.push(start.elapsed());
        let request = "const found = performance.getEntriesByType('resource') \
                       .findLast(entry => entry.name.includes('/ui/api/metrics')); \
                       return [Math.round(found.responseStart - found.startTime), \
                           Math.round(found.duration), found.decodedBodySize]";
        requests.push(browser.run(request).await.to_string());
    }
    assert_eq!(requests.len(), 3);
    let hovering = browser
        .frame_time(
            "window.n = (window.n ?? 0) + 5; const c = document.querySelector('.chart canvas'); \
             const b = c.getBoundingClientRect(); c.dispatchEvent(new PointerEvent('pointermove', \
             {clientX: b.left + 60 + window.n % 200, clientY: b.top + 50}))",
        )
        .await;
    println!(
        "list of 1,001 runs: first {first:?}, then {lists:?}; runs of {STEPS} steps: {runs:?}; \
         their metrics (milliseconds to the first byte, to the last, bytes): {requests:?}; \
         median frame while scrolling {scrolling:.0} ms, while hovering {hovering:.0} ms"
    );
    // A part of the curve is shown with all of its points.
    let zoom = "const c = document.querySelector('.chart canvas'); \
        const b = c.getBoundingClientRect(); const send = (type, x) => c.dispatchEvent( \
        new PointerEvent(type, {clientX: b.left + x, clientY: b.top + 50, pointerId: 1, button: 0})); \
        c.setPointerCapture = () => {}; \
        send('pointerdown', 100); send('pointermove', 101); send('pointermove', 107); \
        send('pointerup', 107)";
    browser.run(zoom).await;
    let zoomed = "return [...document.querySelectorAll('.controls button')] \
                  .some(b => b.textContent === 'Reset zoom' && !b.hidden)";
    browser.wait("the button that resets the zoom", zoomed).await;
    browser.assert_clean(&server.base_url(), &[]).await;
    server.stop().await;
}
