//! The same server on a real port, for the real program.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use bytes::Bytes;
use http::Request;

use crate::scripted_server::ScriptedServer;

/// A server on a free port, until the tests end.
pub(crate) struct TcpServer {
    pub(crate) script: ScriptedServer,
    port: u16,
    stalled: Arc<(Mutex<bool>, Condvar)>,
}

impl TcpServer {
    /// Answers as `replies` says, whose addresses become those of this server. If `stall_after` is
    /// given, a body stops after so many bytes, until [`go_on`](Self::go_on).
    pub(crate) fn start(replies: &str, stall_after: Option<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let replies = replies.replace("127.0.0.1:18765", &format!("127.0.0.1:{port}"));
        let script = ScriptedServer::new(&replies, None);
        let stalled = Arc::new((Mutex::new(stall_after.is_some()), Condvar::new()));
        let server = Self { script: script.clone(), port, stalled: Arc::clone(&stalled) };
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (script, stalled) = (script.clone(), Arc::clone(&stalled));
                thread::spawn(move || {
                    // A client that goes away is none of ours.
                    let _ = answer(
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

    /// Lets bodies come whole from now on.
    pub(crate) fn go_on(&self) {
        *self.stalled.0.lock().unwrap() = false;
        self.stalled.1.notify_all();
    }
}

fn answer(
    stream: &TcpStream,
    script: &ScriptedServer,
    stall_after: usize,
    stalled: &(Mutex<bool>, Condvar),
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (Some(method), Some(target)) = (words.next(), words.next()) else { return Ok(()) };
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
    let answer = script.answer(&request.body(Bytes::from(body)).unwrap());
    let whole = answer.body.len();
    let (status, body) = match range.filter(|from| *from < whole && answer.status == 200) {
        Some(from) => (206, answer.body.slice(from..)),
        None => (answer.status, answer.body.clone()),
    };
    let mut out = stream.try_clone()?;
    let mut head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\netag: \"one\"\r\n");
    head += &format!("content-length: {}\r\naccept-ranges: bytes\r\n", body.len());
    if status == 206 {
        let from = whole - body.len();
        head += &format!("content-range: bytes {from}-{}/{whole}\r\n", whole - 1);
    }
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    out.write_all(format!("{head}\r\n").as_bytes())?;
    let first = stall_after.min(body.len());
    out.write_all(&body[..first])?;
    out.flush()?;
    if first < body.len() {
        let mut waits = stalled.0.lock().unwrap();
        while *waits {
            waits = stalled.1.wait(waits).unwrap();
        }
    }
    out.write_all(&body[first..])
}
