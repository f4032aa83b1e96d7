//! [`TcpServer`]: a [`ScriptedServer`] on a TCP port, for tests that start the program.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use bytes::Bytes;
use http::Request;

use crate::scripted_server::ScriptedServer;

/// Server on a free port. It runs until the test process ends.
pub(crate) struct TcpServer {
    pub(crate) script: ScriptedServer,
    port: u16,
    stalled: Arc<(Mutex<bool>, Condvar)>,
}

impl TcpServer {
    /// Starts a server with the script `replies`, whose URLs are changed to this server's port.
    ///
    /// With `stall_after`, every body stops after that many bytes until [`resume`](Self::resume).
    pub(crate) fn start(replies: &str, stall_after: Option<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let replies = replies.replace("127.0.0.1:18765", &format!("127.0.0.1:{port}"));
        let script = ScriptedServer::new(&replies, None);
        let stalled = Arc::new((Mutex::new(stall_after.is_some()), Condvar::new()));
        let server = Self { script: script.clone(), port, stalled: Arc::clone(&stalled) };
        thread::spawn(move || {
            for stream in listener.incoming() {
                let script = script.clone();
                let stalled = Arc::clone(&stalled);
                thread::spawn(move || {
                    // The client may close the connection at any time.
                    let _ = serve(
                        &stream.unwrap(),
                        &script,
                        stall_after.unwrap_or(usize::MAX),
                        &stalled,
                    );
                });
            }
        });
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}{}", self.port, self.script.prefix())
    }

    /// Sends the rest of stalled bodies, and later bodies without a stall.
    pub(crate) fn resume(&self) {
        *self.stalled.0.lock().unwrap() = false;
        self.stalled.1.notify_all();
    }
}

fn serve(
    stream: &TcpStream,
    script: &ScriptedServer,
    stall_after: usize,
    stalled: &(Mutex<bool>, Condvar),
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut parts = line.split_whitespace();
    let (Some(method), Some(target)) = (parts.next(), parts.next()) else { return Ok(()) };
    let mut request = Request::builder().method(method).uri(target);
    let mut length = 0;
    let mut range = None;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "range" => {
                let from = value.trim_start_matches("bytes=").trim_end_matches('-');
                range = from.parse::<usize>().ok();
            }
            _ => {}
        }
        request = request.header(name, value);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let response = script.respond(&request.body(Bytes::from(body)).unwrap());
    let total = response.body.len();
    let (status, body) = match range.filter(|from| *from < total && response.status == 200) {
        Some(from) => (206, response.body.slice(from..)),
        None => (response.status, response.body.clone()),
    };
    let mut out = stream.try_clone()?;
    let mut head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\netag: \"one\"\r\n");
    head += &format!("content-length: {}\r\naccept-ranges: bytes\r\n", body.len());
    if status == 206 {
        let from = total - body.len();
        head += &format!("content-range: bytes {from}-{}/{total}\r\n", total - 1);
    }
    for (name, value) in &response.headers {
        head += &format!("{name}: {value}\r\n");
    }
    out.write_all(format!("{head}\r\n").as_bytes())?;
    let first = stall_after.min(body.len());
    out.write_all(&body[..first])?;
    out.flush()?;
    if first < body.len() {
        let mut stalling = stalled.0.lock().unwrap();
        while *stalling {
            stalling = stalled.1.wait(stalling).unwrap();
        }
    }
    out.write_all(&body[first..])
}
