//! HTTP as bytes, for what no library would send.

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// One connection, opened again when the server closed it.
pub(crate) struct Raw {
    address: String,
    stream: Option<BufReader<TcpStream>>,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

impl Raw {
    pub(crate) fn new(url: &str) -> Self {
        Self { address: url.strip_prefix("http://").unwrap().to_owned(), stream: None }
    }

    /// Sends bytes as they are.
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        if self.stream.is_none() {
            let stream = TcpStream::connect(&self.address).await.unwrap();
            self.stream = Some(BufReader::new(stream));
        }
        // A server that has said no already may have closed it; the reply tells.
        let _ = self.stream.as_mut().unwrap().write_all(bytes).await;
    }

    /// Reads a reply; none if the server closed the connection without one.
    pub(crate) async fn read(&mut self) -> Option<Reply> {
        let reply = self.try_read().await;
        if !matches!(&reply, Some((_, true))) {
            self.stream = None;
        }
        reply.map(|(reply, _)| reply)
    }

    async fn try_read(&mut self) -> Option<(Reply, bool)> {
        let stream = self.stream.as_mut()?;
        let mut line = String::new();
        stream.read_line(&mut line).await.ok().filter(|n| *n > 0)?;
        let status = line.split(' ').nth(1)?.parse().ok()?;
        let (mut length, mut open) = (0, true);
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
        Some((Reply { status, body }, open))
    }

    /// Makes a call with exactly this path.
    pub(crate) async fn call(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(String, String)],
        body: &[u8],
    ) -> Option<Reply> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.address);
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
        let bytes = [head.as_bytes(), body].concat();
        let fresh = self.stream.is_none();
        self.write(&bytes).await;
        match self.read().await {
            // An idle connection may have been closed in between.
            None if !fresh => {
                self.write(&bytes).await;
                self.read().await
            }
            reply => reply,
        }
    }
}
