//! Fair shares of users and sessions.

use serde_json::{Value, json};

use crate::harness::{Http, TestServer};

/// Submits a request for `samples` samples of `tokens` tokens.
async fn submit(http: &Http, sampler: &str, seq: usize, samples: usize, tokens: usize) -> Value {
    let request = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, seq + 8]}]},
        "sampling_params": {"max_tokens": tokens, "stop": [], "seed": seq}, "num_samples": samples,
        "sampling_session_id": sampler, "seq_id": seq,
    });
    let (status, future) = http.post("/asample", request).await;
    assert_eq!(status, 200, "{future}");
    future
}

/// The KV cache has memory for a few of the samples of the batch, which would take minutes.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_sample_overtakes_the_queued_samples_of_another_session() {
    let test_server = TestServer::with(|options| options.limits.kv_cache_bytes = 400_000).await;
    let http = test_server.http();
    let batch = http.sampler(&http.session().await).await;
    let chat = http.sampler(&http.session().await).await;
    for seq in 0..60 {
        submit(&http, &batch, seq, 16, 240).await;
    }
    let answer = submit(&http, &chat, 0, 1, 4).await;
    assert_eq!(http.sampled(&answer).await.len(), 4);
    let waiting = http.metrics().await["queued"];
    assert!(waiting > 30, "{waiting} requests of the batch are not finished");
}
