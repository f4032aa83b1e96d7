//! [`StallingProxy`]: a proxy that holds back the end of every streamed response.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

/// Media type of a streamed response.
const EVENT_STREAM: &[u8] = b"text/event-stream";
/// End of a header block.
const END_OF_HEADERS: &[u8] = b"\r\n\r\n";
/// End of a server-sent event.
const END_OF_EVENT: &[u8] = b"\n\n";

/// Proxy in front of a server. It relays the first event of a streamed response and nothing after
/// it, so that a completion cannot end before the test stops it. Other responses are relayed whole.
///
/// The proxy runs until the test process ends.
pub(crate) struct StallingProxy {
    pub(crate) url: String,
}

impl StallingProxy {
    /// Starts a proxy in front of the server at `server`, a URL without a path.
    pub(crate) fn start(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = server.strip_prefix("http://").unwrap().to_owned();
        thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                let server = TcpStream::connect(&server).unwrap();
                let requests = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || relay_requests(requests.0, requests.1));
                thread::spawn(move || relay_responses(server, client));
            }
        });
        Self { url }
    }
}

/// Relays everything that the client sends, and closes the connection to the server at its end.
fn relay_requests(mut client: TcpStream, mut server: TcpStream) {
    // Either side may close its connection at any time.
    let _ = std::io::copy(&mut client, &mut server);
    let _ = server.shutdown(Shutdown::Both);
}

/// Relays responses up to the first event of a stream, then reads and discards the rest.
fn relay_responses(mut server: TcpStream, mut client: TcpStream) {
    let mut received = Vec::new();
    let mut relayed = 0;
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = server.read(&mut buffer) {
        received.extend_from_slice(&buffer[..count]);
        let end = end_of_first_event(&received).unwrap_or(received.len());
        if end > relayed {
            if client.write_all(&received[relayed..end]).is_err() {
                return;
            }
            relayed = end;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
}

/// Returns the position after the first event of the first streamed response, once it has arrived.
fn end_of_first_event(received: &[u8]) -> Option<usize> {
    let stream = find(received, EVENT_STREAM, 0)?;
    let events = find(received, END_OF_HEADERS, stream)?;
    find(received, END_OF_EVENT, events)
}

/// Returns the position after the first occurrence of `pattern` at or after `start`.
fn find(bytes: &[u8], pattern: &[u8], start: usize) -> Option<usize> {
    let at = bytes[start..].windows(pattern.len()).position(|window| window == pattern)?;
    Some(start + at + pattern.len())
}
