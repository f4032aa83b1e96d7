//! Comparison with the server of llama.cpp's Python bindings on the same GGUF file.
//!
//! The model is so small that the servers need most of the time, not the arithmetic.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::streams::{stream, stream_all};
use crate::{Server, golden, golden_gguf};

/// Name of the model in requests.
const NAME: &str = "gguf";
/// Number of requests that are sent one after the other, and at once.
const REQUESTS: (u32, u32) = (30, 16);
/// Time for llama.cpp's server to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Writes the recorded model as a GGUF file whose first tokens are single characters.
fn write_gguf(path: &Path) {
    let names = ('!'..='~').map(String::from).chain((0..).map(|i| format!("t{i}")));
    golden_gguf::write(&golden(), path, names, None);
}

/// Returns a request for 64 tokens.
fn request(seed: u32) -> Value {
    json!({
        "model": NAME, "prompt": "abc", "max_tokens": 64, "temperature": 1.0, "seed": seed,
        "stream": true,
    })
}

/// Measures a server and prints a row.
async fn measure(name: &str, address: &str) {
    stream(address, &request(0)).await;
    let mut first = Vec::new();
    let mut seconds = 0.0;
    let mut events = 0;
    for seed in 0..REQUESTS.0 {
        let times = stream(address, &request(seed)).await;
        first.push(times.first_event);
        seconds += times.end;
        events += times.events;
    }
    first.sort_by(f64::total_cmp);
    let start = Instant::now();
    let at_once = stream_all(address, (0..REQUESTS.1).map(request).collect()).await;
    let together: u32 = at_once.iter().map(|times| times.events).sum();
    println!(
        "| {name} | {:.1} ms | {:.0} | {:.0} |",
        1e3 * first[first.len() / 2],
        f64::from(events) / seconds,
        f64::from(together) / start.elapsed().as_secs_f64()
    );
}

/// Compares both servers. `python` has `llama-cpp-python[server]`.
pub(crate) async fn compare(python: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    write_gguf(&file);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let child = Command::new(python)
        .args(["-m", "llama_cpp.server", "--n_ctx", "256", "--interrupt_requests", "false"])
        .args(["--host", "127.0.0.1", "--port", &port.to_string(), "--model_alias", NAME])
        .arg("--model")
        .arg(&file)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let llama = Server { child, address: format!("127.0.0.1:{port}") };
    let start = Instant::now();
    while tokio::net::TcpStream::connect(&llama.address).await.is_err() {
        assert!(start.elapsed() < START_TIMEOUT, "the server of llama.cpp does not start");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let data = tempfile::tempdir().unwrap();
    let (ours, _) = Server::start(data.path(), &format!("{NAME}={}", file.display()));
    println!("\n| server, same GGUF file | first token | events /s, one stream | 16 streams |");
    println!("|---|---|---|---|");
    measure("tinkex-server", &ours.address).await;
    measure("llama-cpp-python", &llama.address).await;
}
