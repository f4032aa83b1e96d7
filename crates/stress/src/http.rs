//! [`HttpClient`]: a minimal HTTP client, which also sends what HTTP libraries refuse to send.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::ReadHalf;

/// Client of one server with one API key. Keeps idle connections for later requests.
pub(crate) struct HttpClient {
    address: String,
    key: Option<String>,
    idle: Mutex<Vec<TcpStream>>,
}

/// A response.
#[derive(Debug)]
pub(crate) struct HttpResponse {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    /// Value of the header `retry-after` or `retry-after-ms`.
    pub(crate) retry_after: Option<Duration>,
    keeps_connection: bool,
}

impl HttpResponse {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub(crate) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

impl HttpClient {
    pub(crate) fn new(address: &str, key: Option<&str>) -> Self {
        let key = key.map(str::to_owned);
        Self { address: address.to_owned(), key, idle: Mutex::default() }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Opens a connection that the client does not keep.
    ///
    /// # Errors
    /// If the server cannot be reached within 10 s.
    pub(crate) async fn connect(&self) -> Result<TcpStream, String> {
        let connecting = TcpStream::connect(&self.address);
        let connected = tokio::time::timeout(Duration::from_secs(10), connecting).await;
        let stream = connected.map_err(|_| "no connection within 10 s".to_owned())?;
        let stream = stream.map_err(|error| format!("cannot connect: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        Ok(stream)
    }

    /// Returns the head of a request with the API key and the origin of the server's own pages.
    pub(crate) fn head(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        length: usize,
    ) -> String {
        let address = &self.address;
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\n");
        if let Some(key) = &self.key {
            head += &format!("x-api-key: {key}\r\n");
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head + &format!("content-length: {length}\r\n\r\n")
    }

    /// Sends a request and reads the response, within `timeout`.
    ///
    /// # Errors
    /// If there is no complete response in time.
    pub(crate) async fn call(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        timeout: Duration,
    ) -> Result<HttpResponse, String> {
        let head = self.head(method, path, headers, body.len());
        let exchange = async {
            let idle = self.idle.lock().pop();
            if let Some(mut stream) = idle {
                match exchange(&mut stream, head.as_bytes(), body).await {
                    Ok(response) => return Ok((response, stream)),
                    // The server may have closed the idle connection; send the request again.
                    Err(_) => drop(stream),
                }
            }
            let mut stream = self.connect().await?;
            let response = exchange(&mut stream, head.as_bytes(), body).await?;
            Ok((response, stream))
        };
        match tokio::time::timeout(timeout, exchange).await {
            Ok(Ok((response, stream))) => {
                if response.keeps_connection {
                    self.idle.lock().push(stream);
                }
                Ok(response)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(format!("{path}: no response within {timeout:.1?}")),
        }
    }

    /// Sends a JSON request.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub(crate) async fn post(
        &self,
        path: &str,
        body: &Value,
        timeout: Duration,
    ) -> Result<HttpResponse, String> {
        let headers = [("content-type", "application/json")];
        self.call("POST", path, &headers, body.to_string().as_bytes(), timeout).await
    }

    /// Sends a JSON request that must succeed. Repeats it while the server is busy (429 or 503).
    ///
    /// # Errors
    /// If there is no successful response within `timeout`.
    pub(crate) async fn succeed(
        &self,
        path: &str,
        body: &Value,
        timeout: Duration,
    ) -> Result<HttpResponse, String> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let response = self.post(path, body, left).await?;
            if response.is_success() {
                return Ok(response);
            }
            let wait = response.retry_after.unwrap_or(Duration::from_millis(50));
            let is_busy = matches!(response.status, 429 | 503);
            if !is_busy || Instant::now() + wait >= end {
                let text = String::from_utf8_lossy(&response.body);
                let text: String = text.chars().take(200).collect();
                return Err(format!("{path}: status {}: {text}", response.status));
            }
            tokio::time::sleep(wait).await;
        }
    }
}

/// Sends a request over a connection and reads the response. The server may respond before it has
/// read the whole body.
async fn exchange(
    stream: &mut TcpStream,
    head: &[u8],
    body: &[u8],
) -> Result<HttpResponse, String> {
    let (reader, mut writer) = stream.split();
    let mut reader = BufReader::new(reader);
    let mut sent = false;
    let mut response = {
        let write = async {
            writer.write_all(head).await?;
            writer.write_all(body).await
        };
        let mut write = std::pin::pin!(write);
        let mut read = std::pin::pin!(read_response(&mut reader));
        loop {
            tokio::select! {
                biased;
                response = &mut read => break response,
                written = &mut write, if !sent => {
                    // After a failed write, the response of the server may still arrive.
                    sent = true;
                    let _ = written;
                }
            }
        }
    }?;
    response.keeps_connection &= sent;
    Ok(response)
}

async fn read_response(reader: &mut BufReader<ReadHalf<'_>>) -> Result<HttpResponse, String> {
    let closed = || "connection closed without a response".to_owned();
    let failed = |error: std::io::Error| format!("connection failed: {error}");
    let mut line = String::new();
    if reader.read_line(&mut line).await.map_err(failed)? == 0 {
        return Err(closed());
    }
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| format!("not a response: {line}"))?;
    let mut length = 0;
    let mut chunked = false;
    let mut keeps_connection = true;
    let mut retry_after = None;
    loop {
        line.clear();
        if reader.read_line(&mut line).await.map_err(failed)? == 0 {
            return Err(closed());
        }
        let header = line.trim().to_ascii_lowercase();
        let Some((name, value)) = header.split_once(':') else { break };
        let value = value.trim();
        match name {
            "content-length" => {
                length = value.parse().map_err(|_| format!("bad header: {line}"))?;
            }
            "transfer-encoding" => chunked = value == "chunked",
            "connection" => keeps_connection = value != "close",
            "retry-after-ms" => retry_after = value.parse().ok().map(Duration::from_millis),
            "retry-after" if retry_after.is_none() => {
                retry_after = value.parse().ok().map(Duration::from_secs);
            }
            _ => {}
        }
    }
    let mut body = Vec::new();
    if chunked {
        loop {
            line.clear();
            reader.read_line(&mut line).await.map_err(failed)?;
            let size = usize::from_str_radix(line.trim(), 16).map_err(|_| closed())?;
            let at = body.len();
            // Each chunk ends with a line break.
            body.resize(at + size + 2, 0);
            reader.read_exact(&mut body[at..]).await.map_err(failed)?;
            body.truncate(at + size);
            if size == 0 {
                break;
            }
        }
    } else {
        body.resize(length, 0);
        reader.read_exact(&mut body).await.map_err(failed)?;
    }
    Ok(HttpResponse { status, body, retry_after, keeps_connection })
}
