//! [`TokenCache`]: exchanges a credential for a token, and caches and renews the token.
//!
//! An exchange runs in a task of its own, and no lock is held while it runs. All requests that need
//! the token wait for the outcome of the exchange. Dropping one of these requests neither cancels
//! the exchange nor delays the other requests.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use tinkex_wire::Secret;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::clock::WallClock;
use crate::error::{Error, Result};
use crate::task;

use super::{refresh_in, seconds_left};
use crate::Transport;

/// Remaining lifetime, in seconds, at or below which a token is replaced before it is used.
pub(crate) const MIN_LIFETIME: f64 = 60.0;
/// Minimum time between two renewals in the background. Limits the rate of exchanges if tokens are
/// short-lived, the local clock is ahead of the server's, or exchanges fail.
const MIN_INTERVAL: Duration = Duration::from_secs(60);
/// Longest sleep between two checks of the wall clock. Timers stop while a computer is suspended,
/// so a single long sleep would end too late.
const CLOCK_STEP: Duration = Duration::from_secs(10);

/// Future of an exchange. The future is `'static`, because it may outlive the request that started
/// it.
pub(crate) type Exchange = BoxFuture<'static, Result<Secret>>;

/// Outcome of an exchange; `None` while it runs.
type Outcome = Option<Result<Secret>>;

/// Current token of a credential. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct TokenCache {
    clock: WallClock,
    state: Arc<Mutex<TokenState>>,
}

/// State that all clones of a [`TokenCache`] share.
#[derive(Debug, Default)]
struct TokenState {
    current: Option<Secret>,
    /// Exchange in progress.
    exchange: Option<watch::Receiver<Outcome>>,
    /// Time at which the last exchange ended.
    exchanged: Option<Instant>,
}

/// What a request that needs a token does next.
enum Next {
    Use(Secret),
    Wait(watch::Receiver<Outcome>),
}

impl TokenCache {
    pub(crate) fn new(clock: WallClock) -> Self {
        Self { clock, state: Arc::default() }
    }

    /// Returns the current token if its remaining lifetime is long enough, else the outcome of
    /// `exchange`. If the exchange fails, returns the old token, if any: the server decides whether
    /// that token has expired.
    pub(crate) async fn get(
        &self,
        exchange: impl Fn() -> Exchange + Send + Sync,
    ) -> Result<Secret> {
        if let Some(token) = self.fresh(&self.lock()) {
            return Ok(token);
        }
        // Boxed, because exchanges are rare: inlined, the future of the exchange would enlarge the
        // future of every request.
        match Box::pin(self.exchange(|state| self.fresh(state), exchange)).await {
            Ok(token) => Ok(token),
            Err(error) => match self.lock().current.clone() {
                Some(old) => {
                    tracing::warn!(%error, "cannot renew the token; using the old one");
                    Ok(old)
                }
                None => Err(error),
            },
        }
    }

    /// Replaces the token, even if it is still valid.
    async fn renew(&self, exchange: impl Fn() -> Exchange + Send + Sync) -> Result<Secret> {
        self.exchange(|_| None, exchange).await
    }

    /// Drops a token that the server has rejected. A newer token is kept.
    pub(crate) fn reject(&self, token: &Secret) {
        let mut state = self.lock();
        if state.current.as_ref() == Some(token) {
            state.current = None;
        }
    }

    /// Returns the token that `usable` accepts. If it accepts none, waits for the exchange in
    /// progress, or starts one. All callers that wait at the same time share one exchange.
    async fn exchange(
        &self,
        usable: impl Fn(&TokenState) -> Option<Secret> + Send + Sync,
        exchange: impl Fn() -> Exchange + Send + Sync,
    ) -> Result<Secret> {
        task::require_runtime()?;
        // Try twice: the exchange in progress may belong to another runtime and ends without an
        // outcome if that runtime ends.
        for _ in 0..2 {
            let mut outcome = match self.next(&usable, &exchange) {
                Next::Use(token) => return Ok(token),
                Next::Wait(outcome) => outcome,
            };
            let outcome = outcome.wait_for(Option::is_some).await.map(|outcome| outcome.clone());
            if let Ok(Some(outcome)) = outcome {
                return outcome;
            }
        }
        Err(Error::runtime_ended())
    }

    /// Looks for a usable token and for an exchange in progress under one lock, so that no request
    /// starts a second exchange just after the first has ended.
    fn next(
        &self,
        usable: impl Fn(&TokenState) -> Option<Secret>,
        exchange: impl Fn() -> Exchange,
    ) -> Next {
        let mut state = self.lock();
        if let Some(token) = usable(&state) {
            return Next::Use(token);
        }
        // The sender of a running exchange exists until its task has ended.
        let running = state.exchange.as_ref().filter(|outcome| outcome.has_changed().is_ok());
        if let Some(outcome) = running {
            return Next::Wait(outcome.clone());
        }
        let (sender, outcome) = watch::channel(None);
        state.exchange = Some(outcome.clone());
        drop(state);
        task::spawn_detached(self.clone().run(exchange(), sender));
        Next::Wait(outcome)
    }

    /// Runs an exchange, stores its token and then sends the outcome to the waiting requests.
    async fn run(self, exchange: Exchange, sender: watch::Sender<Outcome>) {
        let outcome = task::catching_panics(exchange).await;
        {
            let mut state = self.lock();
            if let Ok(token) = &outcome {
                state.current = Some(token.clone());
            }
            state.exchange = None;
            state.exchanged = Some(Instant::now());
        }
        sender.send_replace(Some(outcome));
    }

    /// Returns the current token if its remaining lifetime is long enough.
    fn fresh(&self, state: &TokenState) -> Option<Secret> {
        let now = self.clock.unix_now();
        state.current.clone().filter(|token| seconds_left(token, now) > MIN_LIFETIME)
    }

    /// Returns the time until the token should be renewed in the background.
    fn renew_in(&self) -> Duration {
        let state = self.lock();
        let since_last = state.exchanged.map_or(Duration::ZERO, |at| at.elapsed());
        let token = state.current.as_ref();
        let early = token.map_or(Duration::ZERO, |token| refresh_in(token, self.clock.unix_now()));
        early.max(MIN_INTERVAL.saturating_sub(since_last))
    }

    fn lock(&self) -> MutexGuard<'_, TokenState> {
        self.state.lock()
    }
}

/// Renews the token before it expires, until the transport is dropped or closed.
pub(crate) async fn keep_fresh(transport: Weak<Transport>) {
    loop {
        let delay = {
            let Some(transport) = transport.upgrade().filter(|transport| !transport.is_closed())
            else {
                return;
            };
            let Some(token) = transport.token_cache() else { return };
            let mut delay = token.renew_in();
            if delay.is_zero() {
                if let Err(error) = token.renew(|| transport.exchange_token()).await {
                    tracing::debug!(%error, "cannot renew the token");
                }
                delay = token.renew_in();
            }
            delay
        };
        sleep(delay.min(CLOCK_STEP)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use std::time::{SystemTime, UNIX_EPOCH};

    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use futures_util::FutureExt as _;
    use futures_util::future::join_all;
    use serde_json::json;

    use super::*;
    use crate::error::ErrorKind;

    const NOW: u64 = 1_000_000;

    fn expiring(seconds: u64) -> Secret {
        let claims = json!({"exp": NOW + seconds}).to_string();
        format!("h.{}.s", URL_SAFE_NO_PAD.encode(claims)).into()
    }

    /// Creates a cache and the handle of its clock, which starts at [`NOW`].
    fn cache() -> (TokenCache, Arc<AtomicU64>) {
        let seconds = Arc::new(AtomicU64::new(NOW));
        let clock = Arc::clone(&seconds);
        let clock = move || -> SystemTime {
            UNIX_EPOCH + Duration::from_secs(clock.load(Ordering::Relaxed))
        };
        (TokenCache::new(WallClock::new(clock)), seconds)
    }

    fn succeed(token: &Secret) -> impl Fn() -> Exchange + Send + Sync + use<> {
        let token = token.clone();
        move || {
            let token = token.clone();
            Box::pin(async move {
                tokio::task::yield_now().await;
                Ok(token)
            })
        }
    }

    fn fail() -> Exchange {
        Box::pin(async { Err(Error::new(ErrorKind::Auth, "no")) })
    }

    /// Covers R-JWT.
    #[tokio::test]
    async fn concurrent_requests_share_one_exchange() {
        let (tokens, _) = cache();
        let exchanges = AtomicU32::new(0);
        let token = expiring(3600);
        let get = || {
            tokens.get(|| {
                exchanges.fetch_add(1, Ordering::Relaxed);
                succeed(&token)()
            })
        };
        let all = join_all((0..20).map(|_| get())).await;
        assert!(all.into_iter().all(|given| given.unwrap() == token));
        assert_eq!(exchanges.load(Ordering::Relaxed), 1);
        assert_eq!(tokens.get(fail).await.unwrap(), token, "cached while it is fresh");
    }

    /// Covers R-JWT.
    #[tokio::test]
    async fn an_old_token_is_used_if_the_exchange_fails() {
        let (tokens, clock) = cache();
        let error = tokens.get(fail).await.unwrap_err();
        assert_eq!(error.to_string(), "no", "there is no old token, and the error is unchanged");
        let old = expiring(100);
        assert_eq!(tokens.get(succeed(&old)).await.unwrap(), old);
        clock.fetch_add(40, Ordering::Relaxed);
        assert_eq!(tokens.get(fail).await.unwrap(), old, "60 s are left");
        clock.fetch_add(100, Ordering::Relaxed);
        assert_eq!(tokens.get(fail).await.unwrap(), old, "expired");
    }

    /// Covers R-JWT.
    #[tokio::test]
    async fn tokens_near_their_expiry_and_unreadable_tokens_are_exchanged() {
        let (tokens, clock) = cache();
        let old = expiring(100);
        let new = expiring(3600);
        tokens.get(succeed(&old)).await.unwrap();
        clock.fetch_add(39, Ordering::Relaxed);
        assert_eq!(tokens.get(succeed(&new)).await.unwrap(), old, "61 s are left");
        clock.fetch_add(1, Ordering::Relaxed);
        assert_eq!(tokens.get(succeed(&new)).await.unwrap(), new, "60 s are left");
        let (tokens, _) = cache();
        tokens.get(succeed(&"no token".into())).await.unwrap();
        assert_eq!(tokens.get(succeed(&new)).await.unwrap(), new);
    }

    /// While a computer is suspended, the monotonic clock stops and the wall clock continues.
    #[tokio::test(start_paused = true)]
    async fn a_token_that_expired_during_suspend_is_not_used() {
        let (tokens, clock) = cache();
        let old = expiring(3600);
        let new = expiring(99_999);
        tokens.get(succeed(&old)).await.unwrap();
        assert_eq!(tokens.renew_in(), Duration::from_secs(3300));
        clock.fetch_add(10_000, Ordering::Relaxed);
        assert_eq!(tokens.get(succeed(&new)).await.unwrap(), new);
    }

    #[tokio::test]
    async fn a_dropped_request_does_not_cancel_the_exchange_of_the_others() {
        let (tokens, _) = cache();
        let token = expiring(3600);
        let (release, released) = tokio::sync::oneshot::channel::<()>();
        let released = released.shared();
        let slow = || -> Exchange {
            let released = released.clone();
            let token = token.clone();
            Box::pin(async move {
                released.await.unwrap();
                Ok(token)
            })
        };
        let mut first = Box::pin(tokens.get(&slow));
        assert!(first.as_mut().now_or_never().is_none(), "the exchange waits");
        let mut second = Box::pin(tokens.get(&fail));
        assert!(second.as_mut().now_or_never().is_none(), "joins the exchange of the first");
        drop(first);
        release.send(()).unwrap();
        assert_eq!(second.await.unwrap(), token);
    }

    #[tokio::test]
    async fn a_rejected_token_is_dropped_unless_a_newer_one_replaced_it() {
        let (tokens, _) = cache();
        let old = expiring(3600);
        let new = expiring(7200);
        tokens.get(succeed(&old)).await.unwrap();
        tokens.reject(&old);
        assert_eq!(tokens.get(succeed(&new)).await.unwrap(), new);
        tokens.reject(&old);
        assert_eq!(tokens.get(fail).await.unwrap(), new);
        tokens.reject(&new);
        assert!(tokens.get(fail).await.is_err(), "the old token is not used again");
    }

    /// A runtime that ends drops its tasks; the exchange must not stay "in progress" for ever.
    #[test]
    fn an_exchange_whose_runtime_ended_is_repeated_by_the_next_request() {
        let (tokens, _) = cache();
        let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime().block_on(async {
            let pending = || -> Exchange { Box::pin(std::future::pending()) };
            assert!(tokens.get(pending).now_or_never().is_none());
        });
        let token = expiring(3600);
        assert_eq!(runtime().block_on(tokens.get(succeed(&token))).unwrap(), token);
    }
}
