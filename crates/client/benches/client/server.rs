//! Benchmark server: HTTP/1.1 on loopback with prepared responses, at minimal cost.
//!
//! It implements the part of the protocol that both clients need, with the configuration of the
//! hosted service (`{}`). A sample returns the first token of its prompt, so that a lost or swapped
//! result is detected. The path prefix `/hold/MS` delays results by that many milliseconds, as a
//! model would.
//!
//! The server prints its port on the first line. For every line of input it prints its resource
//! usage so far. It ends at the end of its input.

use std::io::{self, BufRead as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tinkex::{LossOutputs, SampleResponse, SampledSequence, StopReason};
use tinkex_wire::{ForwardBackwardOutput, LossRecord};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::Outcome;
use crate::usage::Stopwatch;
use crate::work::{DATUM_TOKENS, DATUMS, SAMPLED_TOKENS};

const JSON: &str = "application/json";
const PROTO: &str = "application/x-protobuf";
/// Maximum number of connections, as of the local server. Further ones wait until a client closes
/// another one.
const MAX_CONNECTIONS: usize = 4_096;
const SESSION: &str = "00000000-0000-4000-8000-000000000001";

pub(crate) fn run() -> Outcome<()> {
    // Single-threaded: the other cores are for the client.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?.port());
        let server = Arc::new(Server::new()?);
        let counted = Arc::clone(&server);
        std::thread::spawn(move || {
            for _ in io::stdin().lock().lines() {
                counted.started.report(counted.requests.load(Ordering::Relaxed));
            }
            std::process::exit(0);
        });
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            let permit = Arc::clone(&permits).acquire_owned().await?;
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let server = Arc::clone(&server);
            connections.spawn(async move {
                let served = connection(stream, server).await;
                drop(permit);
                served
            });
            while connections.try_join_next().is_some() {}
        }
    })
}

/// Serves a connection until the client closes it.
async fn connection(mut stream: TcpStream, server: Arc<Server>) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(8 * 1024);
    loop {
        let Some(request) = read(&mut stream, &mut buffer).await? else { return Ok(()) };
        server.requests.fetch_add(1, Ordering::Relaxed);
        let (hold, response) = server.respond(&request);
        if !hold.is_zero() {
            tokio::time::sleep(hold).await;
        }
        stream.write_all(&response).await?;
        let end = request.end;
        buffer.drain(..end);
    }
}

/// A request, borrowed from the read buffer.
struct Request<'a> {
    path: &'a str,
    body: &'a [u8],
    end: usize,
}

/// Reads a complete request; `None` if the connection ends first.
async fn read<'a>(
    stream: &mut TcpStream,
    buffer: &'a mut Vec<u8>,
) -> io::Result<Option<Request<'a>>> {
    let head = loop {
        if let Some(at) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            break at;
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let length = content_length(&buffer[..head]);
    let start = head + 4;
    let end = head + 4 + length;
    buffer.reserve(end.saturating_sub(buffer.len()));
    while buffer.len() < end {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    let line = buffer[..head].split(|byte| *byte == b'\r').next().unwrap_or_default();
    let path = std::str::from_utf8(line).ok().and_then(|line| line.split(' ').nth(1));
    Ok(Some(Request { path: path.unwrap_or_default(), body: &buffer[start..end], end }))
}

fn content_length(head: &[u8]) -> usize {
    const NAME: &[u8] = b"content-length:";
    let value = head.split(|byte| *byte == b'\n').find_map(|line| {
        let (name, value) = line.split_at_checked(NAME.len())?;
        name.eq_ignore_ascii_case(NAME).then_some(value)
    });
    let text = value.and_then(|value| std::str::from_utf8(value).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or_default()
}

struct Server {
    started: Stopwatch,
    requests: AtomicU32,
    /// Response with the result of a sample.
    sample: Vec<u8>,
    /// Offset of the first sampled token in `sample`.
    token_at: usize,
    /// Response with the result of a forward and backward pass.
    pass: Bytes,
    not_found: Bytes,
}

impl Server {
    fn new() -> Outcome<Self> {
        // A value that occurs nowhere else in the response.
        const MARK: u32 = 0x7A7B_7C7D;
        let tokens: Vec<u32> = std::iter::once(MARK).chain(1..SAMPLED_TOKENS).collect();
        let sequence = SampledSequence::default()
            .stop_reason(StopReason::Length)
            .logprobs(Some(vec![-0.5; tokens.len()].into()))
            .tokens(tokens);
        let sample = SampleResponse::default().sequences(vec![sequence]);
        let sample = http("200 OK", PROTO, &sample.to_proto());
        let mark = MARK.to_le_bytes();
        let token_at = sample.windows(4).position(|four| four == mark).ok_or("no mark")?;
        let logprobs = vec![-0.5_f32; DATUMS * DATUM_TOKENS];
        let record = LossRecord::new(DATUMS).field("logprobs", logprobs, [DATUM_TOKENS; DATUMS])?;
        let pass = ForwardBackwardOutput::default()
            .loss_fn_outputs(LossOutputs::from(record))
            .metrics([("loss:sum".to_owned(), 1.0)].into());
        Ok(Self {
            started: Stopwatch::start(),
            requests: AtomicU32::new(0),
            sample,
            token_at,
            pass: http("200 OK", PROTO, &pass.to_proto()).into(),
            not_found: http("404 Not Found", JSON, b"{\"detail\":\"no such route\"}").into(),
        })
    }

    /// Returns the response and the delay before it is sent.
    fn respond(&self, request: &Request<'_>) -> (Duration, Bytes) {
        let Some((prefix, route)) = request.path.split_once("/api/v1/") else {
            return (Duration::ZERO, self.not_found.clone());
        };
        let hold = prefix.strip_prefix("/hold/").and_then(|ms| ms.parse().ok());
        let json =
            |text: &str| (Duration::ZERO, Bytes::from(http("200 OK", JSON, text.as_bytes())));
        match route {
            "asample" => {
                let n = number(request.body, b"\"tokens\":[");
                json(&format!(r#"{{"request_id":"s-{n}","sample_sequence_ids":["q-{n}"]}}"#))
            }
            "retrieve_future" => {
                (Duration::from_millis(hold.unwrap_or_default()), self.result(request.body))
            }
            "forward_backward" => json(r#"{"request_id":"f-0"}"#),
            "optim_step" => json(r#"{"request_id":"o-0"}"#),
            "create_model" => json(r#"{"request_id":"m-0"}"#),
            "client/config" | "client/dynamic_config" => json("{}"),
            "create_session" => {
                json(&format!(r#"{{"session_id":"{SESSION}","type":"create_session"}}"#))
            }
            "create_sampling_session" => json(&format!(
                r#"{{"sampling_session_id":"{SESSION}:sample:0","type":"create_sampling_session"}}"#
            )),
            "session_heartbeat" => json(r#"{"type":"session_heartbeat"}"#),
            "telemetry" => json(r#"{"status":"accepted"}"#),
            _ if route.ends_with("/finish") => json("{}"),
            _ => (Duration::ZERO, self.not_found.clone()),
        }
    }

    /// Returns the result of a request; the first letter of its id is its kind.
    fn result(&self, poll: &[u8]) -> Bytes {
        const ID: &[u8] = b"\"request_id\":\"";
        let json = |text: &str| Bytes::from(http("200 OK", JSON, text.as_bytes()));
        match after(poll, ID).and_then(|id| id.first()) {
            Some(b's') => {
                let mut response = self.sample.clone();
                let token = number(poll, b"\"s-").to_le_bytes();
                response[self.token_at..self.token_at + token.len()].copy_from_slice(&token);
                response.into()
            }
            Some(b'f') => self.pass.clone(),
            Some(b'o') => json(r#"{"metrics":{},"type":"optim_step"}"#),
            Some(b'm') => {
                json(&format!(r#"{{"model_id":"{SESSION}:train:0","type":"create_model"}}"#))
            }
            _ => self.not_found.clone(),
        }
    }
}

/// Returns an HTTP response with a body of the media type `kind`.
fn http(status: &str, kind: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

/// Returns the text that follows `name`.
fn after<'a>(body: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let at = body.windows(name.len()).position(|part| part == name)?;
    Some(&body[at + name.len()..])
}

/// Returns the number that follows `name`; 0 if there is none.
fn number(body: &[u8], name: &[u8]) -> u32 {
    let digits = after(body, name).unwrap_or_default().iter().take_while(|b| b.is_ascii_digit());
    digits.fold(0, |n, digit| n * 10 + u32::from(digit - b'0'))
}
