//! Limits on memory.

use crate::harness::TestServer;

#[tokio::test(flavor = "multi_thread")]
async fn metrics_state_the_memory_limits() {
    let test_server = TestServer::with(|options| options.limits.training_bytes = 123 << 20).await;
    let metrics = test_server.http().metrics().await;
    assert_eq!(metrics["limit_bytes{memory=\"training\"}"], 123 << 20);
    assert_eq!(metrics["limit_bytes{memory=\"kv_cache\"}"], 64 << 20);
}
