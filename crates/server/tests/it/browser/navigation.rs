//! The address of the page: Back, Forward, parameters, and runs that are deleted.

use serde_json::json;
use tinkex::TrainingClient;
use tinkex_server::Server;

use super::webdriver::Browser;
use super::{KEY, KeyServer, options, points, run_hash, train};
use crate::harness::http_client;

/// Waits until the tab with a name is selected.
async fn wait_tab(browser: &Browser, name: &str) {
    browser.wait_text(".tabs [aria-selected=true]", name).await;
}

/// Clicks the button of a tab.
async fn click_tab(browser: &Browser, name: &str) {
    let click = format!(
        "[...document.querySelectorAll('.tabs button')].find(b => b.textContent === {}).click()",
        json!(name)
    );
    browser.run(&click).await;
    wait_tab(browser, name).await;
}

/// Script that returns whether the vertical axis is logarithmic.
const IS_LOG: &str = "return [...document.querySelectorAll('.segmented [aria-pressed=true]')].some(b => \
     b.textContent === 'log')";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn back_and_forward_restore_tabs_and_parameters() {
    let test = KeyServer::start().await;
    let first = test.model("pirate").await;
    train(&first, 3).await;
    train(&test.model("other").await, 1).await;
    let browser = test.browser().await;
    // The list: a search and a selection.
    browser.type_into("input[type=search]", "pir").await;
    browser.wait_text(".toolbar", "1 of 2").await;
    browser.run("document.querySelector('.rows input').click()").await;
    browser.wait("the selection", "return location.hash.includes('sel=')").await;
    browser.click(".rows .name a").await;
    browser.wait("three points", &points("loss per token", "points === 3")).await;
    // The options of the charts survive another tab.
    browser.run("document.querySelectorAll('.segmented')[1].lastElementChild.click()").await;
    browser.wait("the logarithmic axis", IS_LOG).await;
    click_tab(&browser, "Requests").await;
    browser.run("document.querySelector('.controls select').value = '10 min'").await;
    browser
        .run("document.querySelector('.controls select').dispatchEvent(new Event('change'))")
        .await;
    browser.wait("the range", "return location.hash.includes('range=10')").await;
    click_tab(&browser, "Charts").await;
    browser.wait("the logarithmic axis", IS_LOG).await;
    click_tab(&browser, "Settings").await;
    browser.run("history.back()").await;
    wait_tab(&browser, "Charts").await;
    browser.wait("the logarithmic axis", IS_LOG).await;
    browser.run("history.back()").await;
    wait_tab(&browser, "Requests").await;
    let range = "return document.querySelector('.controls select')?.value === '10 min'";
    browser.wait("the range", range).await;
    browser.run("history.forward()").await;
    wait_tab(&browser, "Charts").await;
    // An address that is opened shows the same.
    let url = browser.run("return location.href").await;
    browser.open("about:blank").await;
    browser.open(url.as_str().unwrap()).await;
    wait_tab(&browser, "Charts").await;
    browser.wait("the logarithmic axis", IS_LOG).await;
    browser.assert_clean(&test.url(), &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn the_list_keeps_its_search_and_other_links_keep_the_view() {
    let test = KeyServer::start().await;
    train(&test.model("pirate").await, 1).await;
    train(&test.model("other").await, 1).await;
    let browser = test.browser().await;
    browser.type_into("input[type=search]", "pir").await;
    browser.wait_text(".toolbar", "1 of 2").await;
    browser.run("document.querySelector('.rows input').click()").await;
    browser.wait("the selection", "return location.hash.includes('sel=')").await;
    browser.click(".rows .name a").await;
    browser.wait_text(".run-header h1", "pirate").await;
    // The link that skips the navigation stays in the view.
    browser.run("document.querySelector('#skip').click()").await;
    let focused = "return document.activeElement.id === 'main' \
                   && document.querySelector('.run-header') !== null";
    browser.wait("the focus in the content", focused).await;
    browser.click(".crumbs a").await;
    browser.wait_text(".toolbar", "1 of 2").await;
    let kept = "return document.querySelector('input[type=search]').value === 'pir' \
                && document.querySelector('.rows input').checked";
    browser.wait("the search and the selection", kept).await;
    // Views that were opened by an address of their own know the names of all runs.
    browser.go("#/samples").await;
    browser.wait_text(".toolbar select", "other").await;
    // A view that does not exist is the list.
    browser.go("#/nothing").await;
    browser.wait_text(".rows", "other").await;
    browser.go("#/runs/100%").await;
    browser.wait_text("main", "This run does not exist").await;
    browser.assert_clean(&test.url(), &["404"]).await;
}

/// Ends the session of a run, which must not be in use, and deletes the run.
async fn delete(test: &KeyServer, model: TrainingClient) {
    let id = model.model_id().as_str().to_owned();
    drop(model);
    let api = format!("{}/api/v1", test.url());
    let session = id.split(':').next().unwrap();
    let details = json!({"reason": {"type": "success"}, "detail": null});
    let finish = http_client().post(format!("{api}/sessions/{session}/finish"));
    let finish = finish.header("content-type", "application/json").body(details.to_string());
    let delete = http_client().delete(format!("{api}/training_runs/{id}"));
    for request in [finish, delete] {
        let response = request.header("x-api-key", KEY).send().await.unwrap();
        let status = response.status();
        assert_eq!(status, 200, "{}", response.text().await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn a_deleted_run_disappears_from_every_view() {
    let test = KeyServer::start().await;
    let kept = test.model("pirate").await;
    train(&kept, 2).await;
    let deleted = test.model("<i>gone</i>").await;
    train(&deleted, 2).await;
    let id = |model: &TrainingClient| model.model_id().as_str().replace(':', "%3A");
    let compare = format!("#/compare?runs={}%2C{}", id(&kept), id(&deleted));
    let gone = run_hash(&deleted);
    let browser = test.browser().await;
    browser.go(&compare).await;
    browser.wait_text(".runs-legend", "<i>gone</i>").await;
    browser.go(&gone).await;
    browser.wait("two points", &points("loss per token", "points === 2")).await;
    delete(&test, deleted).await;
    browser.wait_text("main", "This run does not exist").await;
    browser.go("#/runs").await;
    browser.wait_text(".rows", "pirate").await;
    let rows = "return document.querySelectorAll('.rows .row').length === 1";
    browser.wait("one run", rows).await;
    // The other run of a comparison is still drawn.
    browser.go(&compare).await;
    browser.wait_text(".runs-legend", "deleted").await;
    browser.wait("two points", "return document.querySelector('.chart canvas')").await;
    browser.open(&test.url()).await;
    browser.go(&gone).await;
    browser.wait_text("main", "This run does not exist").await;
    browser.assert_clean(&test.url(), &["404"]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn a_page_whose_session_has_ended_asks_for_the_key() {
    let test = KeyServer::start().await;
    let model = test.model("pirate").await;
    train(&model, 1).await;
    let url = test.url();
    let browser = test.browser().await;
    browser.go(&run_hash(&model)).await;
    browser.wait("one point", &points("loss per token", "points === 1")).await;
    drop(model);
    let KeyServer { server, data } = test;
    let address = server.address();
    server.stop().await;
    let lost = "return document.querySelector('#live').dataset.state === 'reconnecting'";
    browser.wait("a lost connection", lost).await;
    let mut again = options(data.path()).api_key("tml-another-0123456789");
    again.address = address;
    let server = Server::start(again).await.unwrap();
    browser.wait_text("main", "Enter the API key").await;
    // Another address does not hide the form.
    browser.go("#/runs").await;
    browser.wait_text("main", "Enter the API key").await;
    browser.type_into("#key", "tml-another-0123456789").await;
    browser.click("button[type=submit]").await;
    browser.wait_text(".rows", "pirate").await;
    browser.wait_text("#live", "live").await;
    browser.assert_clean(&url, &["401", "ERR_"]).await;
    server.stop().await;
}
