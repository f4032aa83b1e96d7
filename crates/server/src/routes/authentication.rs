//! Authentication: the key of a request, and responses that end with it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::{HeaderMap, Response};
use http_body_util::Either;
use hyper::body::{Body, Frame, SizeHint};
use tinkex_store::durable::Proposal;
use tinkex_store::error::ServerError;
use tinkex_store::store::{Store, UserStore};
use tinkex_store::user::Principal;
use tinkex_wire::header;
use tinkex_wire::rest::KeyRole;

use super::RouteResult;
use super::error::HttpError;
use crate::keyring::AcceptedKey;
use crate::state::ServerState;

/// The server, and who sends the request.
#[derive(Clone, Copy)]
pub(super) struct Caller<'a> {
    pub(super) state: &'a Arc<ServerState>,
    pub(super) principal: &'a Principal,
}

impl<'a> Caller<'a> {
    /// Locks the store, as the caller may see it.
    pub(super) fn store(self) -> UserStore<'a, parking_lot::MutexGuard<'a, Store>> {
        UserStore::new(self.state.store.lock(), self.principal)
    }

    /// Changes existing records that the caller may change; see
    /// [`SharedStore::change`](tinkex_store::durable::SharedStore::change).
    pub(super) async fn change<T>(
        self,
        decide: impl FnOnce(UserStore<'_, &mut Store>) -> Proposal<T>,
    ) -> Result<T, ServerError> {
        let principal = self.principal;
        self.state.store.change(|store| decide(UserStore::new(store, principal))).await
    }

    /// Checks that the caller may do more than read.
    pub(super) fn require_write(self) -> Result<(), ServerError> {
        require(self.principal, Access::Write)
    }
}

/// Access that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Every key.
    Read,
    /// A key that is not limited to reading.
    Write,
    /// The key of an administrator.
    Admin,
}

/// Checks that the role of the principal gives `access`.
pub(super) fn require(principal: &Principal, access: Access) -> Result<(), ServerError> {
    let role = principal.role;
    match access {
        Access::Read => Ok(()),
        Access::Write if role != KeyRole::Read => Ok(()),
        Access::Admin if role == KeyRole::Admin => Ok(()),
        Access::Write => {
            Err(ServerError::forbidden("this API key may only read; use a key with the role user"))
        }
        Access::Admin => {
            Err(ServerError::forbidden("this request needs the API key of an administrator"))
        }
    }
}

/// Finds the API key in `x-api-key` or `authorization: Bearer`. If the server has no key, checks
/// the origin of the request instead. `from_allowed_page` is true if the request comes from a web
/// page of an allowed origin.
pub(super) fn authenticate(
    state: &ServerState,
    headers: &HeaderMap,
    from_allowed_page: bool,
) -> Result<Arc<AcceptedKey>, HttpError> {
    if state.options.api_key.is_none() {
        // A web page can send requests to a local port, also through a domain name that its owner
        // makes resolve to this machine (DNS rebinding).
        let from_page = headers.contains_key(ORIGIN) && !from_allowed_page;
        if from_page || !is_local_host(headers) {
            return Err(ServerError::forbidden(
                "this server has no API key and rejects requests from web pages and for host names \
                 other than localhost; start it with an API key, or with --allow-origin for \
                 inference requests from a web page",
            )
            .into());
        }
        return Ok(state.keyring.administrator());
    }
    let sent = sent_key(headers).unwrap_or_default();
    state.keyring.find(sent).ok_or_else(HttpError::unauthorized)
}

/// Returns the API key of a request.
pub(super) fn sent_key(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get(header::API_KEY) {
        return Some(key.as_bytes());
    }
    let (scheme, key) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Returns whether the `host` header is absent, an IP address or `localhost`.
pub(super) fn is_local_host(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST) else { return true };
    let Ok(authority) = http::uri::Authority::try_from(host.as_bytes()) else { return false };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

/// Key of a request, as an extension of its response: the body ends with the key.
#[derive(Clone)]
struct ResponseKey(Arc<AcceptedKey>);

/// Runs the handler of a request until the key of the request is revoked or expires.
pub(super) async fn while_valid(
    key: &Arc<AcceptedKey>,
    handler: impl Future<Output = RouteResult>,
) -> RouteResult {
    // Poll in this order: a simulation must not depend on a random order.
    let mut response = tokio::select! {
        biased;
        response = handler => response?,
        () = key.ended() => return Err(HttpError::unauthorized()),
    };
    // A body in memory is sent completely: the request that revokes its own key gets its response.
    if matches!(response.body(), Either::Right(_)) {
        response.extensions_mut().insert(ResponseKey(Arc::clone(key)));
    }
    Ok(response)
}

/// Makes the body of a response end with the key of its request.
pub(super) fn end_with_key<B>(mut response: Response<B>) -> Response<KeyedBody<B>> {
    let key = response.extensions_mut().remove::<ResponseKey>();
    response.map(|body| KeyedBody {
        body,
        ended: key.map(|ResponseKey(key)| -> KeyEnd { Box::pin(async move { key.ended().await }) }),
    })
}

type KeyEnd = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Body that ends early when the key of its request is revoked or expires.
pub(crate) struct KeyedBody<B> {
    body: B,
    ended: Option<KeyEnd>,
}

impl<B: Body<Data = Bytes> + Unpin> Body for KeyedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.get_mut();
        if let Some(ended) = &mut this.ended
            && ended.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(None);
        }
        Pin::new(&mut this.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
