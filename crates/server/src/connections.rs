//! [`Connections`]: limits the number of connections. If a client waits for a connection, closes the
//! connection that has been idle for the longest time.
//!
//! HTTP clients keep idle connections open for their next request. Without this rule, the idle
//! connections of one client could keep other clients out until a timeout closes them.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::routes::ResponseBody;

/// Time to wait for a connection to close before closing the next one.
const CLOSE_TIME: Duration = Duration::from_millis(50);

/// Value of [`ConnectionState::idle_since`] while a request is handled, and after the connection was
/// told to close, until its last response is sent.
const BUSY: u64 = 0;

/// The open connections of a server.
pub(crate) struct Connections {
    permits: Arc<Semaphore>,
    open: Mutex<HashMap<u64, Arc<ConnectionState>>>,
    /// Number of the next connection.
    next: AtomicU64,
    /// Logical clock: incremented each time a connection becomes idle.
    idle_count: AtomicU64,
    /// Whether a client waits for a connection.
    is_full: AtomicBool,
    /// Notified when a connection becomes idle while a client waits.
    became_idle: Notify,
}

struct ConnectionState {
    /// Value of [`Connections::idle_count`] when the connection became idle; [`BUSY`] if it is not
    /// idle.
    idle_since: AtomicU64,
    /// Notified when the connection must close.
    close: Notify,
}

impl Connections {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            permits: Arc::new(Semaphore::new(limit)),
            open: Mutex::default(),
            next: AtomicU64::new(0),
            idle_count: AtomicU64::new(BUSY + 1),
            is_full: AtomicBool::new(false),
            became_idle: Notify::new(),
        })
    }

    /// Adds a connection. While the server has as many connections as the limit allows, closes idle
    /// connections and waits.
    pub(crate) async fn add(self: &Arc<Self>) -> OpenConnection {
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return self.register(permit);
        }
        self.is_full.store(true, Ordering::SeqCst);
        let mut acquired = std::pin::pin!(Arc::clone(&self.permits).acquire_owned());
        let permit = loop {
            // Create the future before looking for an idle connection, so that no notification is
            // lost in between.
            let mut became_idle = std::pin::pin!(self.became_idle.notified());
            became_idle.as_mut().enable();
            let closes = self.close_longest_idle();
            tokio::select! {
                biased;
                permit = acquired.as_mut() => break permit,
                () = became_idle, if !closes => {}
                // A connection that has just received a request closes after its response.
                () = tokio::time::sleep(CLOSE_TIME), if closes => {}
            }
        };
        self.is_full.store(false, Ordering::SeqCst);
        self.register(permit.expect("the semaphore is never closed"))
    }

    fn register(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> OpenConnection {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let idle_since = AtomicU64::new(self.idle_count.fetch_add(1, Ordering::Relaxed));
        let state = Arc::new(ConnectionState { idle_since, close: Notify::new() });
        self.open.lock().insert(number, Arc::clone(&state));
        OpenConnection { connections: Arc::clone(self), number, state, _permit: permit }
    }

    /// Tells the connection that has been idle for the longest time to close. Returns false if no
    /// connection is idle.
    fn close_longest_idle(&self) -> bool {
        let open = self.open.lock();
        let idle = |state: &&Arc<ConnectionState>| {
            let since = state.idle_since.load(Ordering::SeqCst);
            (since != BUSY).then_some(since)
        };
        let longest = open.values().filter(|state| idle(state).is_some()).min_by_key(idle);
        let Some(state) = longest else { return false };
        state.idle_since.store(BUSY, Ordering::SeqCst);
        state.close.notify_one();
        true
    }
}

/// An open connection. Dropping it releases its permit.
pub(crate) struct OpenConnection {
    connections: Arc<Connections>,
    number: u64,
    state: Arc<ConnectionState>,
    _permit: OwnedSemaphorePermit,
}

impl OpenConnection {
    /// Marks the connection as busy until the returned value is dropped.
    pub(crate) fn begin_request(&self) -> ActiveRequest {
        self.state.idle_since.store(BUSY, Ordering::SeqCst);
        let connections = Arc::clone(&self.connections);
        ActiveRequest { connections, state: Arc::clone(&self.state) }
    }

    /// Waits until the connection must close.
    pub(crate) async fn closing(&self) {
        self.state.close.notified().await;
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.open.lock().remove(&self.number);
    }
}

/// A request in progress. Its connection becomes idle when the value is dropped.
pub(crate) struct ActiveRequest {
    connections: Arc<Connections>,
    state: Arc<ConnectionState>,
}

impl ActiveRequest {
    /// Returns a body that holds the request until the body is sent or dropped.
    pub(crate) fn hold_in(self, body: ResponseBody) -> ActiveBody {
        ActiveBody { body, _request: self }
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let connections = &self.connections;
        let since = connections.idle_count.fetch_add(1, Ordering::Relaxed);
        self.state.idle_since.store(since, Ordering::SeqCst);
        if connections.is_full.load(Ordering::SeqCst) {
            connections.became_idle.notify_one();
        }
    }
}

/// Body of a response, whose connection is busy until the body is sent.
pub(crate) struct ActiveBody {
    body: ResponseBody,
    _request: ActiveRequest,
}

impl Body for ActiveBody {
    type Data = Bytes;
    type Error = <ResponseBody as Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_waiting_client_closes_the_connection_that_was_idle_for_the_longest_time() {
        let connections = Connections::new(3);
        let first = connections.add().await;
        let second = connections.add().await;
        let third = connections.add().await;
        // The first connection handles a request, and the second has handled one since the third
        // was opened.
        let active = first.begin_request();
        drop(second.begin_request());
        let mut waiting = Box::pin(connections.add());
        assert!((&mut waiting).now_or_never().is_none());
        assert!(third.closing().now_or_never().is_some());
        assert!(second.closing().now_or_never().is_none());
        drop(third);
        let fourth = waiting.await;
        assert!(first.closing().now_or_never().is_none(), "a busy connection stays open");
        assert!(second.closing().now_or_never().is_none(), "one connection is closed for one");
        drop((active, fourth));
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_client_gets_the_connection_that_becomes_idle() {
        let connections = Connections::new(1);
        let first = connections.add().await;
        let active = first.begin_request();
        let mut waiting = Box::pin(connections.add());
        assert!((&mut waiting).now_or_never().is_none());
        assert!(first.closing().now_or_never().is_none());
        drop(active);
        assert!((&mut waiting).now_or_never().is_none());
        first.closing().await;
        drop(first);
        waiting.await;
    }

    /// A streamed response must not be chosen again and again while other connections are idle.
    #[tokio::test(start_paused = true)]
    async fn a_connection_that_does_not_close_is_skipped() {
        let connections = Connections::new(2);
        let slow = connections.add().await;
        let idle = connections.add().await;
        let mut waiting = Box::pin(connections.add());
        assert!((&mut waiting).now_or_never().is_none());
        slow.closing().await;
        let next = async {
            idle.closing().await;
            drop(idle);
        };
        tokio::join!(next, waiting);
    }
}
