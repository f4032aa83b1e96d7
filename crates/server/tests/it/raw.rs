//! Minimal HTTP client that sends raw bytes, to send requests that HTTP libraries refuse to send.

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// Connection that is reopened after the server has closed it.
pub(crate) struct Raw {
    address: String,
    stream: Option<BufReader<TcpStream>>,
}

/// A response.
#[derive(Debug)]
pub(crate) struct RawResponse {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

impl Raw {
    pub(crate) fn new(url: &str) -> Self {
        Self { address: url.strip_prefix("http://").unwrap().to_owned(), stream: None }
    }

    /// Sends bytes unchanged.
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        if self.stream.is_none() {
            let stream = TcpStream::connect(&self.address).await.unwrap();
            self.stream = Some(BufReader::new(stream));
        }
        // The server may have responded and closed the connection already; `read` returns that
        // response.
        let _ = self.stream.as_mut().unwrap().write_all(bytes).await;
    }

    /// Reads a response; `None` if the server closed the connection without one.
    pub(crate) async fn read(&mut self) -> Option<RawResponse> {
        let response = self.try_read().await;
        if !matches!(&response, Some((_, true))) {
            self.stream = None;
        }
        response.map(|(response, _)| response)
    }

    async fn try_read(&mut self) -> Option<(RawResponse, bool)> {
        let stream = self.stream.as_mut()?;
        let mut line = String::new();
        stream.read_line(&mut line).await.ok().filter(|n| *n > 0)?;
        let status = line.split(' ').nth(1)?.parse().ok()?;
        let mut length = 0;
        let mut open = true;
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await.ok()?;
            let line = line.trim().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            open &= line != "connection: close";
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.ok()?;
        Some((RawResponse { status, body }, open))
    }

    /// Sends a request with exactly this path, and reads the response.
    pub(crate) async fn call(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(String, String)],
        body: &[u8],
    ) -> Option<RawResponse> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.address);
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
        let bytes = [head.as_bytes(), body].concat();
        let fresh = self.stream.is_none();
        self.write(&bytes).await;
        match self.read().await {
            // The server may have closed the idle connection; retry on a new one.
            None if !fresh => {
                self.write(&bytes).await;
                self.read().await
            }
            response => response,
        }
    }
}
