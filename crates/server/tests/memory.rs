//! Memory of the server, measured with a counting allocator.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

#[expect(dead_code, reason = "shared with the other tests")]
#[path = "it/harness.rs"]
mod harness;

use peak_alloc::PeakAlloc;
use serde_json::json;
use tinkex_server::BUILT_IN;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::TestServer;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The allocator counts for the whole process: only one test may allocate at a time.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Number of concurrent polls. The responses are held by the kernel, whose memory for them is limited.
const POLLS: usize = 20;

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_polls_of_a_result_share_one_read() {
    let _guard = ONE_AT_A_TIME.lock().await;
    // The result is not kept in memory.
    let test_server = TestServer::with(|options| options.limits.result_bytes = 0).await;
    let http = test_server.http();
    let sampler = http.sampler(&http.session().await).await;
    let request = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "seq_id": 0,
        "sampling_params": {"max_tokens": 2, "stop": [], "seed": 1}, "num_samples": 2_000,
        "topk_sample_logprobs": 100, "sampling_session_id": sampler,
    });
    let (status, future) = http.post("/asample", request).await;
    assert_eq!(status, 200, "{future}");
    let size = http.proto_result(&future).await.len();
    assert!(size > 2 << 20, "{size} bytes");

    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    let body = json!({"request_id": future["request_id"]}).to_string();
    let address = test_server.server.address();
    let head = format!(
        "POST /api/v1/retrieve_future HTTP/1.1\r\nhost: {address}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut connections = Vec::new();
    for _ in 0..POLLS {
        let mut connection = TcpStream::connect(address).await.unwrap();
        connection.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        connections.push(connection);
    }
    // Read the start of each response: the server now holds the rest of all of them.
    for connection in &mut connections {
        let mut start = [0; 15];
        connection.read_exact(&mut start).await.unwrap();
        assert_eq!(&start, b"HTTP/1.1 200 OK");
    }
    let used = ALLOCATOR.peak_usage().saturating_sub(before);
    println!("{POLLS} polls of a result of {size} bytes: {used} bytes at the peak");
    // One copy, and the buffers of the connections.
    assert!(used < 2 * size + POLLS * (64 << 10), "{used} bytes");
}

/// The tokenizer alone would need more than a hundred bytes per byte of these prompts.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_of_many_megabytes_is_refused_within_bounded_memory() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let text = "word ".repeat((16 << 20) / 5);
    let message = json!([{"role": "user", "content": text}]);
    for (path, body, param) in [
        ("/v1/completions", json!({"model": BUILT_IN, "prompt": text}), "prompt"),
        ("/v1/completions", json!({"model": BUILT_IN, "prompt": ["a", text]}), "prompt"),
        ("/v1/chat/completions", json!({"model": BUILT_IN, "messages": message}), "messages"),
        (
            "/v1/messages",
            json!({"model": BUILT_IN, "messages": message, "max_tokens": 1}),
            "messages",
        ),
        ("/v1/messages/count_tokens", json!({"model": BUILT_IN, "messages": message}), "messages"),
    ] {
        let body = body.to_string().into_bytes();
        let size = body.len();
        // Read the tokenizer, and compute the size of its longest token.
        let short = json!({"model": BUILT_IN, "prompt": "a", "messages": [{"role": "user", "content": "a"}]});
        let _ = http.send("POST", path, &[], short.to_string().into_bytes()).await;
        ALLOCATOR.reset_peak_usage();
        let before = ALLOCATOR.current_usage();
        let (status, error) = http.send("POST", path, &[], body).await;
        let used = ALLOCATOR.peak_usage().saturating_sub(before);
        println!("{path}: {size} bytes in the body, {used} bytes at the peak");
        assert_eq!(status, 400, "{path}: {error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{param}: ")), "{path}: {message}");
        assert!(message.contains("exceed the model's context window of 2048 tokens"), "{message}");
        // Copies of the text: the client's, the received, and the parsed ones.
        assert!(used < 10 * size, "{path}: {used} bytes");
    }
}
