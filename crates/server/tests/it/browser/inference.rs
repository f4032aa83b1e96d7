//! Samples and the playground.

use serde_json::json;
use tinkex::{AdamParams, LossFn, TrainingClient};
use tinkex_server::BUILT_IN;

use super::{KeyServer, complete, service};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn a_sample_with_markup_is_text_and_its_tokens_are_shaded() {
    let test = KeyServer::start().await;
    let browser = test.browser().await;
    browser.go("#/samples").await;
    browser.wait_text(".samples-list", "No samples yet").await;
    let markup = "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>";
    complete(&test.url(), markup).await;
    browser.wait_text(".samples-list", markup).await;
    let scored = "return document.querySelectorAll('.completion .token.scored').length > 3";
    browser.wait("shaded tokens", scored).await;
    let parsed = "return document.querySelectorAll('.sample script, .sample img').length";
    assert_eq!(browser.run(parsed).await, 0);
    assert_eq!(browser.run("return window.hacked === undefined").await, true);
    // The less probable a token, the stronger its colour.
    let ordered = "const { samples } = await (await fetch('/ui/api/samples')).json(); \
        const { logprobs } = samples[0].completions[0]; \
        const alpha = (e) => Number(getComputedStyle(e).backgroundColor.match(/[\\d.]+/g)[3] ?? 1); \
        const shades = [...document.querySelectorAll('.completion .token')].map(alpha); \
        const order = shades.map((_, n) => n).sort((a, b) => logprobs[b] - logprobs[a]); \
        return shades.length === logprobs.length && new Set(shades).size > 3 \
            && order.every((n, k) => k === 0 || shades[n] >= shades[order[k - 1]] - 0.01)";
    assert_eq!(browser.run(ordered).await, true);
    browser.hover(".completion .token.scored").await;
    browser.wait_text("#tip", "log-probability").await;
    let alternatives = "return document.querySelectorAll('#tip .alternatives tr').length >= 3";
    browser.wait("the alternatives of a token", alternatives).await;
    // Search in the text.
    complete(&test.url(), "Once upon a time").await;
    browser.type_into("input[type=search]", "UPON A").await;
    let found = "return document.querySelectorAll('.sample').length === 1 \
                 && document.querySelector('.sample .prompt').textContent === 'Once upon a time'";
    browser.wait("the sample that was searched for", found).await;
    browser.assert_clean(&test.url(), &[]).await;
}

/// Teaches a model an answer that takes longer than a frame of the browser.
async fn teach_long_answer(test: &KeyServer, model: &TrainingClient) {
    let base = service(&test.url()).create_sampling_client(BUILT_IN).await.unwrap();
    let chat = base.tokenizer().await.unwrap().chat().unwrap();
    let answer = "moo, ".repeat(60);
    let line = json!({"messages": [{"role": "user", "content": "What does a cow say?"},
                                   {"role": "assistant", "content": answer}]});
    let example = chat.read_jsonl(line.to_string().as_bytes()).next().unwrap().unwrap();
    for _ in 0..20 {
        let adam = AdamParams::with_learning_rate(1e-2);
        model.step(vec![example.clone()], LossFn::CrossEntropy, adam).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs chromium and chromedriver; `cargo xtask browser` runs it"]
async fn answers_stream_into_the_playground() {
    let test = KeyServer::start().await;
    let model = test.model("cow").await;
    teach_long_answer(&test, &model).await;
    let path = model.save_weights_for_sampler("final").await.unwrap().to_string();
    let browser = test.browser().await;
    let model = path.replace(':', "%3A").replace('/', "%2F");
    browser.go(&format!("#/playground?t=0&max=300&model={model}")).await;
    let chosen =
        format!("return document.querySelector('.conversation select')?.value === '{path}'");
    browser.wait("the model of the address", &chosen).await;
    browser.wait_text(".conversation select", "cow / final").await;
    // Every number of shown tokens is recorded: the answer must appear in several parts.
    browser
        .run(
            "window.counts = new Set(); new MutationObserver(() => counts.add( \
             document.querySelectorAll('.message.assistant .token').length)) \
             .observe(document.querySelector('.columns'), {childList: true, subtree: true})",
        )
        .await;
    browser.type_into("#message", "What does a cow say?").await;
    browser.click(".composer button.primary").await;
    let shown = "return document.querySelectorAll('.message.assistant .token').length > 2";
    browser.wait("tokens of an answer", shown).await;
    let done = "return !document.querySelector('.composer button.primary').disabled";
    browser.wait("the end of the answer", done).await;
    let error = browser.run("return document.querySelector('.message .error')?.textContent").await;
    assert!(error.is_null(), "{error}");
    let counts = browser.run("return [...counts].sort((a, b) => a - b)").await;
    let part = counts.as_array().unwrap().iter().rev().nth(1).and_then(serde_json::Value::as_u64);
    assert!(part > Some(0), "the answer appeared at once: {counts}");
    // Two models answer the same message.
    browser.click("#compare-toggle").await;
    browser.type_into("#message", "And a dog?").await;
    browser.click(".composer button.primary").await;
    let both = "return [...document.querySelectorAll('.conversation')].filter(c => \
                c.querySelector('.message.assistant:last-child .token')).length === 2";
    browser.wait("an answer of each model", both).await;
    browser.wait("the end of both answers", done).await;
    // The answers are in the log of samples.
    browser.go("#/samples").await;
    browser.wait_text(".samples-list .prompt", "And a dog?").await;
    browser.assert_clean(&test.url(), &[]).await;
}
