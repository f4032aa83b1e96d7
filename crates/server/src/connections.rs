//! [`Connections`]: limits the number of connections, and reserves a part of them for clients that
//! have authenticated.
//!
//! A connection is unauthenticated until one of its requests was authorized. Unauthenticated
//! connections have a limit of their own, and a limit per address. A further connection closes the
//! oldest unauthenticated connection, also in the middle of a request: connections that send nothing
//! could otherwise keep all other clients out until a timeout closes them.
//!
//! HTTP clients keep idle connections open for their next request. If all connections are in use, a
//! further connection closes the connection that has been idle for the longest time.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::routes::{KeyedBody, ResponseBody};

/// Time to wait for a connection to close before closing the next one.
const CLOSE_TIME: Duration = Duration::from_millis(50);

/// Limits on connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    /// Maximum number of open connections.
    pub(crate) total: usize,
    /// Maximum number of unauthenticated connections.
    pub(crate) unauthenticated: usize,
    /// Maximum number of unauthenticated connections of one address. Does not apply to addresses
    /// that several clients share.
    pub(crate) per_address: usize,
    /// Minimum time that a connection has to authenticate before it can be closed for another
    /// connection.
    pub(crate) grace: Duration,
}

/// The open connections of a server.
pub(crate) struct Connections {
    limits: ConnectionLimits,
    table: Mutex<ConnectionTable>,
    /// Notified when a connection closes, becomes idle or authenticates.
    changed: Notify,
}

/// How a connection must close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// After the request in progress, if there is one.
    AfterRequest,
    /// At once.
    Now,
}

impl Connections {
    pub(crate) fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self { limits, table: Mutex::default(), changed: Notify::new() })
    }

    /// Adds a connection of a client, and closes another connection if a limit is
    /// reached. Waits if no connection can be closed yet. Returns `None` if the address has too many
    /// unauthenticated connections, of which none can be closed yet.
    ///
    /// Only one task may call this method at a time.
    pub(crate) async fn add(self: &Arc<Self>, client: ClientAddress) -> Option<OpenConnection> {
        // Do not choose the next connection before this time: the chosen connection needs time to
        // close.
        let mut next_choice = Instant::now();
        loop {
            // Create the future before looking at the table, so that no notification is lost in
            // between.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let admission = {
                let now = Instant::now();
                let mut table = self.table.lock();
                table.admit(client, &self.limits, now, now >= next_choice)
            };
            let wake_at = match admission {
                AdmitConnection::Refused => return None,
                AdmitConnection::Opened(number, closing) => {
                    let id = ConnectionId { connections: Arc::clone(self), number };
                    return Some(OpenConnection { id, closing });
                }
                AdmitConnection::Closes => {
                    next_choice = Instant::now() + CLOSE_TIME;
                    Some(next_choice)
                }
                AdmitConnection::Waits(until) => until,
            };
            match wake_at {
                Some(wake_at) => {
                    let wake_at = wake_at.max(next_choice);
                    // Ignore the result: the table is read again after both events.
                    let _ = tokio::time::timeout_at(wake_at, changed).await;
                }
                None => changed.await,
            }
        }
    }
}

/// Decision about a new connection.
enum AdmitConnection {
    /// The connection was added under this number.
    Opened(u64, watch::Receiver<Option<Closing>>),
    /// Another connection was told to close.
    Closes,
    /// No connection can be closed now. Contains the time at which the next connection can be closed
    /// although it did nothing, if it is known.
    Waits(Option<Instant>),
    /// The address has too many unauthenticated connections.
    Refused,
}

#[derive(Default)]
struct ConnectionTable {
    open: HashMap<u64, ConnectionEntry>,
    /// Number of unauthenticated connections by address, without the connections that were told to
    /// close.
    unauthenticated: HashMap<ClientAddress, usize>,
    /// Number of the next connection.
    next: u64,
    /// Logical clock: incremented each time a connection becomes idle.
    idle_count: u64,
}

struct ConnectionEntry {
    client: ClientAddress,
    opened: Instant,
    trust: Trust,
    /// Value of [`ConnectionTable::idle_count`] when the last request ended. `None` before the first
    /// request and during a request.
    idle_since: Option<u64>,
    close: watch::Sender<Option<Closing>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Trust {
    Unauthenticated,
    Authenticated,
    /// The connection was told to close.
    Closing,
}

impl ConnectionTable {
    /// Decides about a new connection. Closes another connection only if `may_close`.
    fn admit(
        &mut self,
        client: ClientAddress,
        limits: &ConnectionLimits,
        now: Instant,
        may_close: bool,
    ) -> AdmitConnection {
        let mut closes = false;
        let of_client = self.unauthenticated.get(&client).copied().unwrap_or(0);
        if client.is_limited() && of_client >= limits.per_address {
            let Some(number) = self.oldest_closable(Some(client), limits, now) else {
                return AdmitConnection::Refused;
            };
            self.close(number);
            closes = true;
        }
        if self.unauthenticated.values().sum::<usize>() >= limits.unauthenticated {
            // Close a connection of the address with the most connections.
            let most =
                self.unauthenticated.iter().max_by_key(|(client, count)| (**count, **client));
            let most = most.map(|(client, _)| *client);
            let oldest = most.and_then(|client| self.oldest_closable(Some(client), limits, now));
            match oldest.or_else(|| self.oldest_closable(None, limits, now)) {
                Some(number) => self.close(number),
                None => return AdmitConnection::Waits(self.next_closable(limits)),
            }
            closes = true;
        }
        if self.open.len() < limits.total {
            return self.insert(client, now);
        }
        if closes {
            return AdmitConnection::Closes;
        }
        if !may_close {
            return AdmitConnection::Waits(Some(now));
        }
        let idle = self.open.iter().filter_map(|(number, entry)| {
            let since = entry.idle_since.filter(|_| entry.trust == Trust::Authenticated);
            Some((since?, *number))
        });
        let longest_idle = idle.min().map(|(_, number)| number);
        match self.oldest_closable(None, limits, now).or(longest_idle) {
            Some(number) => {
                self.close(number);
                AdmitConnection::Closes
            }
            None => AdmitConnection::Waits(self.next_closable(limits)),
        }
    }

    fn insert(&mut self, client: ClientAddress, now: Instant) -> AdmitConnection {
        let number = self.next;
        self.next += 1;
        let (close, closing) = watch::channel(None);
        let trust = Trust::Unauthenticated;
        let entry = ConnectionEntry { client, opened: now, trust, idle_since: None, close };
        self.open.insert(number, entry);
        *self.unauthenticated.entry(client).or_default() += 1;
        AdmitConnection::Opened(number, closing)
    }

    /// Returns the oldest unauthenticated connection that can be closed, of one client or of all.
    fn oldest_closable(
        &self,
        client: Option<ClientAddress>,
        limits: &ConnectionLimits,
        now: Instant,
    ) -> Option<u64> {
        let of_client =
            |entry: &ConnectionEntry| client.is_none_or(|client| entry.client == client);
        let open = self.open.iter();
        let closable = open.filter(|(_, entry)| of_client(entry) && entry.is_closable(limits, now));
        closable.map(|(number, _)| *number).min()
    }

    /// Returns the time at which the oldest unauthenticated connection can be closed.
    fn next_closable(&self, limits: &ConnectionLimits) -> Option<Instant> {
        let entries = self.open.values().filter(|entry| entry.trust == Trust::Unauthenticated);
        entries.map(|entry| entry.opened + limits.grace).min()
    }

    /// Tells a connection to close.
    fn close(&mut self, number: u64) {
        let Some(entry) = self.open.get_mut(&number) else { return };
        let closing = match entry.trust {
            Trust::Authenticated => Closing::AfterRequest,
            _ => Closing::Now,
        };
        entry.close.send_replace(Some(closing));
        self.leave_unauthenticated(number, Trust::Closing);
    }

    /// Changes the trust of a connection.
    fn leave_unauthenticated(&mut self, number: u64, trust: Trust) {
        let Some(entry) = self.open.get_mut(&number) else { return };
        let client = entry.client;
        if std::mem::replace(&mut entry.trust, trust) == Trust::Unauthenticated {
            self.forget_unauthenticated(client);
        }
    }

    fn forget_unauthenticated(&mut self, client: ClientAddress) {
        if let Some(count) = self.unauthenticated.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.unauthenticated.remove(&client);
            }
        }
    }

    fn remove(&mut self, number: u64) {
        if let Some(entry) = self.open.remove(&number)
            && entry.trust == Trust::Unauthenticated
        {
            self.forget_unauthenticated(entry.client);
        }
    }
}

impl ConnectionEntry {
    /// Returns whether the connection is unauthenticated, and is idle after a request or had time to
    /// authenticate.
    fn is_closable(&self, limits: &ConnectionLimits, now: Instant) -> bool {
        let had_time = self.idle_since.is_some() || now >= self.opened + limits.grace;
        self.trust == Trust::Unauthenticated && had_time
    }
}

/// Address for which unauthenticated connections are counted: an IPv4 address, or the network of an
/// IPv6 address. A host usually has a /64 network of IPv6 addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientAddress {
    network: IpAddr,
    /// Whether several clients use the address.
    is_shared: bool,
}

impl ClientAddress {
    /// Returns the address of a client. The programs and the reverse proxy of this machine share the
    /// loopback address.
    pub(crate) fn new(address: IpAddr) -> Self {
        let network = match address.to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                let network = address.to_bits() & !u128::from(u64::MAX);
                Ipv6Addr::from_bits(network).into()
            }
            address => address,
        };
        Self { network, is_shared: network.is_loopback() }
    }

    /// Returns the address of a reverse proxy, which its clients share.
    pub(crate) fn shared(address: IpAddr) -> Self {
        Self { is_shared: true, ..Self::new(address) }
    }

    /// Returns whether the limits per address apply.
    pub(crate) fn is_limited(self) -> bool {
        !self.is_shared
    }
}

/// An open connection. Dropping it removes it from the open connections.
pub(crate) struct OpenConnection {
    id: ConnectionId,
    closing: watch::Receiver<Option<Closing>>,
}

impl OpenConnection {
    /// Marks the connection as busy until the returned value is dropped.
    pub(crate) fn begin_request(&self) -> ActiveRequest {
        let mut table = self.id.connections.table.lock();
        if let Some(entry) = table.open.get_mut(&self.id.number) {
            entry.idle_since = None;
        }
        ActiveRequest { id: self.id.clone() }
    }

    /// Returns the handle with which a request marks its connection as authenticated.
    pub(crate) fn id(&self) -> ConnectionId {
        self.id.clone()
    }

    /// Waits until the connection must close.
    pub(crate) async fn closing(&self) -> Closing {
        let mut closing = self.closing.clone();
        let closing = closing.wait_for(Option::is_some).await;
        closing.ok().and_then(|closing| *closing).unwrap_or(Closing::AfterRequest)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.id.connections.table.lock().remove(self.id.number);
        self.id.connections.changed.notify_waiters();
    }
}

/// Handle of an open connection. Each request has it as an extension.
#[derive(Clone)]
pub(crate) struct ConnectionId {
    connections: Arc<Connections>,
    number: u64,
}

impl ConnectionId {
    /// Marks the connection as authenticated, because one of its requests was authorized.
    pub(crate) fn mark_authenticated(&self) {
        let mut table = self.connections.table.lock();
        let entry = table.open.get(&self.number);
        if entry.is_some_and(|entry| entry.trust == Trust::Unauthenticated) {
            table.leave_unauthenticated(self.number, Trust::Authenticated);
            drop(table);
            self.connections.changed.notify_waiters();
        }
    }
}

/// A request in progress. Its connection becomes idle when the value is dropped.
pub(crate) struct ActiveRequest {
    id: ConnectionId,
}

impl ActiveRequest {
    /// Returns a body that holds the request until the body is sent or dropped.
    pub(crate) fn hold_in(self, body: KeyedBody<ResponseBody>) -> ActiveBody {
        ActiveBody { body, _request: self }
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let connections = &self.id.connections;
        let mut table = connections.table.lock();
        table.idle_count += 1;
        let since = table.idle_count;
        if let Some(entry) = table.open.get_mut(&self.id.number) {
            entry.idle_since = Some(since);
        }
        drop(table);
        connections.changed.notify_waiters();
    }
}

/// Body of a response, whose connection is busy until the body is sent.
pub(crate) struct ActiveBody {
    body: KeyedBody<ResponseBody>,
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

    const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const GRACE: Duration = Duration::from_secs(1);

    fn limits(total: usize) -> ConnectionLimits {
        ConnectionLimits { total, unauthenticated: total, per_address: total, grace: GRACE }
    }

    async fn open(connections: &Arc<Connections>, address: IpAddr) -> OpenConnection {
        connections.add(ClientAddress::new(address)).await.unwrap()
    }

    async fn open_authenticated(connections: &Arc<Connections>) -> OpenConnection {
        let connection = open(connections, CLIENT).await;
        let active = connection.begin_request();
        connection.id().mark_authenticated();
        drop(active);
        connection
    }

    fn closing(connection: &OpenConnection) -> Option<Closing> {
        connection.closing().now_or_never()
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_client_closes_the_connection_that_was_idle_for_the_longest_time() {
        let connections = Connections::new(limits(3));
        let first = open_authenticated(&connections).await;
        let second = open_authenticated(&connections).await;
        let third = open_authenticated(&connections).await;
        // The first connection handles a request, and the second has handled one since the third
        // was opened.
        let active = first.begin_request();
        drop(second.begin_request());
        let mut waiting = Box::pin(connections.add(ClientAddress::new(CLIENT)));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!(closing(&third), Some(Closing::AfterRequest));
        assert_eq!(closing(&second), None);
        drop(third);
        let fourth = waiting.await;
        assert_eq!(closing(&first), None, "a busy connection stays open");
        assert_eq!(closing(&second), None, "one connection is closed for one");
        drop((active, fourth));
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_client_gets_the_connection_that_becomes_idle() {
        let connections = Connections::new(limits(1));
        let first = open_authenticated(&connections).await;
        let active = first.begin_request();
        let mut waiting = Box::pin(connections.add(ClientAddress::new(CLIENT)));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!(closing(&first), None);
        drop(active);
        assert!((&mut waiting).now_or_never().is_none());
        first.closing().await;
        drop(first);
        waiting.await.unwrap();
    }

    /// A streamed response must not be chosen again and again while other connections are idle.
    #[tokio::test(start_paused = true)]
    async fn a_connection_that_does_not_close_is_skipped() {
        let connections = Connections::new(limits(2));
        let slow = open_authenticated(&connections).await;
        let idle = open_authenticated(&connections).await;
        let mut waiting = Box::pin(connections.add(ClientAddress::new(CLIENT)));
        assert!((&mut waiting).now_or_never().is_none());
        slow.closing().await;
        let next = async {
            idle.closing().await;
            drop(idle);
        };
        tokio::join!(next, waiting);
    }

    /// Bug: 4,096 connections that sent one byte each kept all other clients out.
    #[tokio::test(start_paused = true)]
    async fn connections_that_do_not_authenticate_are_closed_for_further_clients() {
        let connections = Connections::new(ConnectionLimits { unauthenticated: 3, ..limits(4) });
        let honest = open_authenticated(&connections).await;
        let first = open(&connections, CLIENT).await;
        let active = first.begin_request();
        let others = [open(&connections, CLIENT).await, open(&connections, CLIENT).await];
        let mut waiting = Box::pin(connections.add(ClientAddress::new(CLIENT)));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!(closing(&first), None, "the connection has time to authenticate");
        tokio::time::advance(GRACE).await;
        let task = async {
            assert_eq!(first.closing().await, Closing::Now, "also during a request");
            drop((active, first));
        };
        let (last, ()) = tokio::join!(waiting, task);
        assert!(last.is_some());
        assert_eq!([closing(&honest), closing(&others[0])], [None, None]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_waits_until_a_new_connection_authenticates() {
        let connections = Connections::new(ConnectionLimits { unauthenticated: 1, ..limits(2) });
        let first = open(&connections, CLIENT).await;
        let mut waiting = Box::pin(connections.add(ClientAddress::new(CLIENT)));
        assert!((&mut waiting).now_or_never().is_none());
        first.id().mark_authenticated();
        assert!(waiting.now_or_never().is_some());
        assert_eq!(closing(&first), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_has_a_limit_before_it_authenticates() {
        let other = IpAddr::from([192, 0, 2, 2]);
        let connections = Connections::new(ConnectionLimits { per_address: 2, ..limits(100) });
        let honest = open_authenticated(&connections).await;
        let first = open(&connections, CLIENT).await;
        let second = open(&connections, CLIENT).await;
        assert!(connections.add(ClientAddress::new(CLIENT)).await.is_none());
        let _other = open(&connections, other).await;
        tokio::time::advance(GRACE).await;
        let _third = open(&connections, CLIENT).await;
        assert_eq!(closing(&first), Some(Closing::Now));
        assert_eq!([closing(&second), closing(&honest)], [None, None]);
        // The addresses of an IPv6 network count as one address, loopback addresses not at all.
        let network = ["2001:db8::1", "2001:db8::2", "2001:db8::3"].map(|a| a.parse().unwrap());
        let [first, second] =
            [network[0], network[1]].map(|address| connections.add(ClientAddress::new(address)));
        let _open = [first.await.unwrap(), second.await.unwrap()];
        assert!(connections.add(ClientAddress::new(network[2])).await.is_none());
        for address in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] {
            for _ in 0..5 {
                std::mem::forget(open(&connections, address.parse().unwrap()).await);
            }
        }
        let proxy = ClientAddress::shared([192, 0, 2, 9].into());
        for _ in 0..5 {
            std::mem::forget(connections.add(proxy).await.unwrap());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_address_with_the_most_connections_loses_one_first() {
        let connections = Connections::new(ConnectionLimits { unauthenticated: 4, ..limits(100) });
        let single = open(&connections, IpAddr::from([192, 0, 2, 2])).await;
        let many = [
            open(&connections, CLIENT).await,
            open(&connections, CLIENT).await,
            open(&connections, CLIENT).await,
        ];
        tokio::time::advance(GRACE).await;
        let _new = open(&connections, IpAddr::from([192, 0, 2, 3])).await;
        assert_eq!(closing(&single), None);
        assert_eq!(closing(&many[0]), Some(Closing::Now));
    }
}
