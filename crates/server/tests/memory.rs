//! Memory of the server, measured with a counting allocator.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

#[expect(dead_code, reason = "shared with the other tests")]
#[path = "it/harness.rs"]
mod harness;

use peak_alloc::PeakAlloc;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::TestServer;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Number of concurrent polls. The responses are held by the kernel, whose memory for them is limited.
const POLLS: usize = 20;

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_polls_of_a_result_share_one_read() {
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
