//! Images of the documentation.

use std::path::{Path, PathBuf};

use tinkex::{AdamParams, Datum, LossFn, SaveOptions, TrainingClient};
use tinkex_recipes::rl::{Completion, Rl};
use tinkex_server::BUILT_IN;

use super::access::open_view;
use super::webdriver::Browser;
use super::{KeyServer, complete, run_hash, service};
use crate::harness::setting;

/// Returns the folder for screenshots, if `cargo xtask browser --screenshots` asks for them.
fn screenshots() -> Option<PathBuf> {
    setting("TINKEX_SCREENSHOTS").map(PathBuf::from)
}

/// Returns the examples of `tinkex quickstart`.
async fn examples(test: &KeyServer) -> Vec<Datum> {
    let service = service(&test.url());
    let base = service.create_sampling_client(BUILT_IN).await.unwrap();
    let chat = base.tokenizer().await.unwrap().chat().unwrap();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/data/pirate.jsonl");
    let text = std::fs::read_to_string(file).unwrap();
    chat.read_jsonl(text.as_bytes()).map(|line| line.unwrap()).collect()
}

/// Trains with a learning rate that falls to zero.
async fn train(model: &TrainingClient, data: &[Datum], rate: f64, steps: u32, done: u32) {
    for step in 0..done {
        let batch = data.iter().cycle().skip(8 * step as usize).take(8).cloned().collect();
        let left = 1.0 - f64::from(step) / f64::from(steps);
        let adam = AdamParams::with_learning_rate(rate * left);
        model.step(batch, LossFn::CrossEntropy, adam).await.unwrap();
    }
}

/// Trains by reinforcement learning, so that the log of samples has advantages.
async fn reinforce(test: &KeyServer) {
    let service = service(&test.url());
    let base = service.create_sampling_client(BUILT_IN).await.unwrap();
    let reward = |completion: &Completion| completion.text.matches("golden").count() == 1;
    let rl = Rl::new(BUILT_IN)
        .tokenizer(base.tokenizer().await.unwrap())
        .prompts(["Once upon a time there was a", "In the garden stood a"])
        .reward(reward)
        .groups_per_batch(2)
        .group_size(4)
        .max_tokens(24)
        .learning_rate(4e-3)
        .steps(12);
    let mut run = rl.start(&service).await.unwrap();
    while let Some(report) = run.next().await {
        report.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "writes the images of the documentation; `cargo xtask browser --screenshots` runs it"]
async fn screenshots_of_all_views() {
    let Some(folder) = screenshots() else { return };
    std::fs::create_dir_all(&folder).unwrap();
    let test = KeyServer::start().await;
    let data = examples(&test).await;
    reinforce(&test).await;
    let mut runs = Vec::new();
    for (name, rate, steps, done) in
        [("pirate", 5e-3, 60, 60), ("pirate-slow", 1e-3, 60, 60), ("pirate-short", 3e-3, 30, 18)]
    {
        let model = test.model(name).await;
        train(&model, &data, rate, steps, done).await;
        runs.push(model);
    }
    runs[0].save_state("step-60").await.unwrap();
    let kept = SaveOptions::new("preview").ttl(std::time::Duration::from_secs(86_400));
    runs[0].save_weights_for_sampler(kept).await.unwrap();
    runs[0].save_weights_for_sampler("final").await.unwrap();
    for prompt in ["Once upon a time", "The cow says", "A cat and a dog"] {
        complete(&test.url(), prompt).await;
    }
    let browser = Browser::start(1280, 860).await;
    browser.open(&test.server.dashboard_url()).await;
    browser.wait_text(".rows", "pirate").await;
    let run = run_hash(&runs[0]);
    let id = |run: &TrainingClient| run.model_id().as_str().replace(':', "%3A");
    let views = [
        ("runs", "#/runs".to_owned()),
        ("run", run.clone()),
        ("compare", format!("#/compare?runs={}%2C{}", id(&runs[0]), id(&runs[1]))),
        ("requests", format!("{run}?tab=requests")),
        ("checkpoints", format!("{run}?tab=checkpoints")),
        ("settings", format!("{run}?tab=settings")),
        ("samples", "#/samples".to_owned()),
        ("rollouts", "#/samples?only=rewarded".to_owned()),
        ("playground", "#/playground".to_owned()),
        ("server", "#/server".to_owned()),
    ];
    for (size, theme) in [("", "light"), ("", "dark"), ("-phone", "light")] {
        browser.resize(if size.is_empty() { 1280 } else { 390 }, 860).await;
        browser
            .run(&format!(
                "if (document.documentElement.dataset.theme !== '{theme}') {{ \
                 document.documentElement.dataset.theme = '{theme}'; \
                 dispatchEvent(new Event('resize')) }}"
            ))
            .await;
        for (name, view) in &views {
            browser.go("#/server").await;
            open_view(&browser, view).await;
            show_details(&browser, name).await;
            let drawn = "await new Promise(requestAnimationFrame); \
                         return new Promise(done => setTimeout(() => done(true), 300))";
            browser.run(drawn).await;
            let file = format!("dashboard-{name}-{theme}{size}.png");
            std::fs::write(folder.join(file), browser.screenshot().await).unwrap();
        }
    }
}

/// Does in a view what a reader would do: asks a question, points at a token or at a curve.
async fn show_details(browser: &Browser, view: &str) {
    match view {
        "playground" => {
            let question = "How many legs does a cow have?";
            browser.type_into("#message", question).await;
            browser.click(".composer button.primary").await;
            let done = "return document.querySelectorAll('.message.assistant .token').length > 2 \
                        && !document.querySelector('.composer button.primary').disabled";
            browser.wait("the end of an answer", done).await;
        }
        "samples" => browser.hover(".completion .token.scored:nth-child(6)").await,
        "run" | "compare" => browser.hover(".chart canvas").await,
        _ => {}
    }
}
