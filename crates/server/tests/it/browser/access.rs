//! Login, and accessibility of all views.

use serde_json::json;

use super::webdriver::Browser;
use super::{KEY, KeyServer, complete, run_hash, train};
use crate::harness::setting;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn only_the_key_of_the_server_opens_the_page() {
    let test = KeyServer::start().await;
    let browser = Browser::start(1280, 800).await;
    browser.open(&test.url()).await;
    browser.type_into("#key", "tml-wrong").await;
    browser.click("button[type=submit]").await;
    browser.wait_text("#login-error", "not the key").await;
    let status = "return (await fetch('/ui/api/runs')).status";
    assert_eq!(browser.run(status).await, 401);
    browser.run("document.querySelector('#key').value = ''").await;
    browser.type_into("#key", KEY).await;
    browser.click("button[type=submit]").await;
    // The empty list says what to type.
    browser.wait_text("main", "tinkex quickstart --local").await;
    assert_eq!(browser.run(status).await, 200);
    assert_eq!(browser.run("return document.cookie").await, "", "scripts cannot read the session");
    browser.open(&test.url()).await;
    browser.wait_text("main", "tinkex quickstart --local").await;
    browser.assert_clean(&test.url(), &["401"]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn a_printed_url_logs_in_once() {
    let test = KeyServer::start().await;
    let url = test.server.dashboard_url();
    let browser = Browser::start(1280, 800).await;
    browser.open(&url).await;
    browser.wait_text("main", "tinkex quickstart --local").await;
    assert_eq!(browser.run("return location.search + location.pathname").await, "/");
    browser.assert_clean(&test.url(), &[]).await;
    drop(browser);
    let other = Browser::start(1280, 800).await;
    other.open(&url).await;
    other.wait_text("main", "Enter the API key").await;
    other.assert_clean(&test.url(), &["401"]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn every_view_is_accessible_and_fits_a_phone() {
    let test = KeyServer::start().await;
    let model = test.model("pirate").await;
    train(&model, 30).await;
    complete(&test.url(), "Once upon a time").await;
    model.save_weights_for_sampler("final").await.unwrap();
    let browser = test.browser().await;
    browser.wait_text(".rows", "pirate").await;
    let run = run_hash(&model);
    let views = [
        "#/runs".to_owned(),
        run.clone(),
        format!("{run}?tab=samples"),
        format!("{run}?tab=checkpoints"),
        format!("{run}?tab=requests"),
        format!("{run}?tab=settings"),
        "#/samples".to_owned(),
        "#/playground".to_owned(),
        "#/server".to_owned(),
    ];
    let axe = setting("TINKEX_AXE").map(|path| std::fs::read_to_string(path).unwrap());
    for view in &views {
        open_view(&browser, view).await;
        for theme in ["light", "dark"] {
            browser.run(&format!("document.documentElement.dataset.theme = '{theme}'")).await;
            let Some(axe) = &axe else { continue };
            // The strongest shade, whichever tokens were sampled.
            let shade = "for (const token of document.querySelectorAll('.token.scored')) \
                         token.style.setProperty('--s', '1')";
            browser.run(shade).await;
            let violations = browser.axe(axe).await;
            assert_eq!(violations, json!([]), "{view} {theme}");
        }
        assert_fits(&browser, view).await;
    }
    browser.resize(390, 800).await;
    for view in &views {
        open_view(&browser, view).await;
        assert_fits(&browser, view).await;
    }
    browser.assert_clean(&test.url(), &[]).await;
}

/// Opens a view and waits until it has loaded.
pub(super) async fn open_view(browser: &Browser, view: &str) {
    browser.go(view).await;
    let what = format!("the content of {view}");
    let loaded = "return document.querySelector('main .view')?.textContent.length > 20 \
                  && !document.querySelector('.loading')";
    browser.wait(&what, loaded).await;
}

/// Checks that nothing is wider than the window.
async fn assert_fits(browser: &Browser, view: &str) {
    let excess = browser.run("return document.documentElement.scrollWidth - innerWidth").await;
    assert!(excess.as_i64() <= Some(1), "{view} is wider than the window by {excess} pixels");
}
