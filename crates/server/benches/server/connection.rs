//! A minimal HTTP client: keep-alive connections that send one request at a time.

use futures_util::future::join_all;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

/// A keep-alive connection that sends one request at a time.
pub(crate) struct Connection {
    address: String,
    stream: Mutex<Option<BufReader<TcpStream>>>,
}

impl Connection {
    pub(crate) fn new(address: &str) -> Self {
        Self { address: address.to_owned(), stream: Mutex::new(None) }
    }

    /// Sends a request and returns the body of the response. Panics if the status is not 200.
    pub(crate) async fn call(&self, method: &str, path: &str, body: &[u8]) -> Vec<u8> {
        let mut stream = self.stream.lock().await;
        if stream.is_none() {
            let opened = TcpStream::connect(&self.address).await.unwrap();
            opened.set_nodelay(true).unwrap();
            *stream = Some(BufReader::new(opened));
        }
        let stream = stream.as_mut().unwrap();
        let host = &self.address;
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length}\r\n\r\n");
        let mut request = head.into_bytes();
        request.extend_from_slice(body);
        stream.write_all(&request).await.unwrap();
        let mut status = String::new();
        let mut length = 0;
        stream.read_line(&mut status).await.unwrap();
        let mut line = String::new();
        loop {
            line.clear();
            stream.read_line(&mut line).await.unwrap();
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut response = vec![0; length];
        stream.read_exact(&mut response).await.unwrap();
        assert!(status.contains(" 200 "), "{path}: {status}{}", String::from_utf8_lossy(&response));
        response
    }

    /// Sends a JSON request to an API route and returns the JSON response.
    pub(crate) async fn json(&self, path: &str, request: &Value) -> Value {
        let response =
            self.call("POST", &format!("/api/v1{path}"), request.to_string().as_bytes()).await;
        serde_json::from_slice(&response).unwrap()
    }
}

/// A set of connections.
pub(crate) struct Pool {
    pub(crate) connections: Vec<Connection>,
}

impl Pool {
    pub(crate) fn new(address: &str, count: usize) -> Self {
        Self { connections: (0..count).map(|_| Connection::new(address)).collect() }
    }

    /// Opens all connections.
    pub(crate) async fn open(&self) {
        join_all(self.connections.iter().map(|c| c.call("GET", "/api/v1/healthz", b""))).await;
    }
}
