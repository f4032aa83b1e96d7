//! [`Pool`]: a growing list of HTTP clients, each with its own connections.
//!
//! A request uses the first client below its request limit. With HTTP/2 a client has one
//! connection, so the pool keeps thousands of requests from queueing behind the stream limit of one
//! connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Response, StatusCode};
use parking_lot::RwLock;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::HttpFailure;

/// Number of empty 400 responses that are treated as lost connections. Further ones are returned to
/// the caller.
const EMPTY_400_BUDGET: u32 = 16;

/// Pool of HTTP clients. Requests take a read lock; only growth takes a write lock.
pub(crate) struct Pool<C> {
    requests_per_client: usize,
    make: Box<dyn Fn() -> C + Send + Sync>,
    slots: RwLock<Vec<Arc<Slot<C>>>>,
    /// Permits for concurrent requests; `None` without a limit.
    permits: Option<Arc<Semaphore>>,
    empty_400_budget: AtomicU32,
}

/// Client of a pool, with the number of requests that use it.
struct Slot<C> {
    client: RwLock<C>,
    active: AtomicUsize,
    #[cfg(test)]
    index: usize,
}

impl<C: Clone> Pool<C> {
    pub(crate) fn new(requests_per_client: usize, make: Box<dyn Fn() -> C + Send + Sync>) -> Self {
        let empty_400_budget = AtomicU32::new(EMPTY_400_BUDGET);
        Self {
            requests_per_client,
            make,
            slots: RwLock::default(),
            permits: None,
            empty_400_budget,
        }
    }

    /// Limits the number of concurrent requests for which [`lease_permitted`](Self::lease_permitted)
    /// returns a client.
    pub(crate) fn max_requests(self, limit: Option<usize>) -> Self {
        Self { permits: limit.map(|limit| Arc::new(Semaphore::new(limit))), ..self }
    }

    /// Waits until the number of concurrent requests is below the limit of the pool, and returns a
    /// client for one request.
    pub(crate) async fn lease_permitted(&self) -> Lease<C> {
        let permit = match &self.permits {
            None => None,
            Some(permits) => {
                let permit = Arc::clone(permits).acquire_owned().await;
                Some(permit.expect("the semaphore is never closed"))
            }
        };
        let mut lease = self.lease();
        lease.permit = permit;
        lease
    }

    /// Returns a client for one request. The lease counts against the request limit of the client
    /// until the lease is dropped.
    pub(crate) fn lease(&self) -> Lease<C> {
        loop {
            let full = {
                let slots = self.slots.read();
                if let Some(slot) =
                    slots.iter().find(|slot| slot.try_acquire(self.requests_per_client))
                {
                    return Lease::new(slot);
                }
                slots.len()
            };
            // Create the client before taking the write lock, because creating one is slow.
            let client = RwLock::new((self.make)());
            let mut slots = self.slots.write();
            if slots.len() == full {
                slots.push(Arc::new(Slot {
                    client,
                    active: AtomicUsize::new(0),
                    #[cfg(test)]
                    index: full,
                }));
            }
        }
    }

    /// Checks a response. A proxy that closes a connection responds with an empty 400. After such a
    /// response the HTTP client is replaced, and the response is reported as a lost connection, so
    /// that the request is retried. This happens at most 16 times ([`EMPTY_400_BUDGET`]) until
    /// successful responses refill the budget.
    pub(crate) fn check_response(
        &self,
        lease: &Lease<C>,
        response: Response<Bytes>,
    ) -> Result<Response<Bytes>, HttpFailure> {
        let budget = &self.empty_400_budget;
        if response.status() == StatusCode::BAD_REQUEST && response.body().is_empty() {
            self.renew(lease);
            let take_one = |left: u32| left.checked_sub(1);
            if budget.fetch_update(Ordering::AcqRel, Ordering::Acquire, take_one).is_ok() {
                return Err(HttpFailure::connect("proxy closed the connection (empty 400)"));
            }
        } else if !response.status().is_client_error() && !response.status().is_server_error() {
            let put_one = |left: u32| (left < EMPTY_400_BUDGET).then_some(left + 1);
            let _ = budget.fetch_update(Ordering::AcqRel, Ordering::Acquire, put_one);
        }
        Ok(response)
    }

    /// Replaces the client of a lease by a new one, which later requests use.
    pub(crate) fn renew(&self, lease: &Lease<C>) {
        let client = (self.make)();
        *lease.slot.client.write() = client;
    }
}

impl<C> Slot<C> {
    /// Reserves the client for one more request, unless it is at its limit.
    fn try_acquire(&self, limit: usize) -> bool {
        let one_more = |active: usize| (active < limit).then_some(active + 1);
        self.active.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }
}

/// A client of a [`Pool`], reserved for one request.
pub(crate) struct Lease<C> {
    slot: Arc<Slot<C>>,
    client: C,
    /// Counts against the limit of the pool until it is dropped.
    permit: Option<OwnedSemaphorePermit>,
}

impl<C: Clone> Lease<C> {
    fn new(slot: &Arc<Slot<C>>) -> Self {
        let client = slot.client.read().clone();
        Self { slot: Arc::clone(slot), client, permit: None }
    }
}

impl<C> Lease<C> {
    pub(crate) fn client(&self) -> &C {
        &self.client
    }
}

impl<C> Drop for Lease<C> {
    fn drop(&mut self) {
        self.slot.active.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    fn counting(requests_per_client: usize) -> (Pool<usize>, Arc<AtomicUsize>) {
        let made = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&made);
        let make = move || counter.fetch_add(1, Ordering::Relaxed);
        (Pool::new(requests_per_client, Box::new(make)), made)
    }

    #[test]
    fn a_request_uses_the_first_client_below_its_limit() {
        for case in fixture::cases("client_pool.json") {
            let cap = usize::try_from(case["max_per_client"].as_u64().unwrap()).unwrap();
            let (pool, _) = counting(cap);
            let mut open = HashMap::new();
            for (op, index) in
                case["ops"].as_array().unwrap().iter().zip(case["client_index"].as_array().unwrap())
            {
                let (sign, name) = op.as_str().unwrap().split_at(1);
                if sign == "+" {
                    let lease = pool.lease();
                    assert_eq!(json!(lease.slot.index), *index, "{op}");
                    open.insert(name.to_owned(), lease);
                } else {
                    open.remove(name).expect("the request was started");
                    assert_eq!(*index, Value::Null);
                }
            }
        }
    }

    #[tokio::test]
    async fn requests_above_the_limit_of_the_pool_wait() {
        use futures_util::FutureExt as _;

        let (pool, made) = counting(2);
        let pool = pool.max_requests(Some(3));
        let mut leases = Vec::new();
        for _ in 0..3 {
            leases.push(pool.lease_permitted().await);
        }
        let mut waiting = Box::pin(pool.lease_permitted());
        assert!((&mut waiting).now_or_never().is_none());
        leases.pop();
        leases.push(waiting.await);
        assert_eq!(made.load(Ordering::Relaxed), 2);
        // A request that needs no connection of its own is not limited.
        drop(pool.lease());
    }

    #[test]
    fn an_empty_400_is_a_lost_connection_until_the_budget_is_spent() {
        for case in fixture::cases("empty_400.json") {
            let (pool, made) = counting(50);
            let script = match &case["script"] {
                Value::Array(steps) => steps.clone(),
                repeat => {
                    let count = usize::try_from(repeat["count"].as_u64().unwrap()).unwrap();
                    vec![repeat["repeat"].clone(); count]
                }
            };
            let expected = case["result_budget_clients_made"].as_array().unwrap();
            for (step, expected) in script.iter().zip(expected) {
                let status = u16::try_from(step["status"].as_u64().unwrap_or(200)).unwrap();
                let body = step["body"].as_str().unwrap_or("{}").to_owned();
                let response = Response::builder().status(status).body(Bytes::from(body)).unwrap();
                let result = pool.check_response(&pool.lease(), response);
                let outcome = match &result {
                    Err(_) => "connection_error".to_owned(),
                    Ok(response) if response.status().is_success() => "ok".to_owned(),
                    Ok(response) => format!("status_{}", response.status().as_u16()),
                };
                let budget = pool.empty_400_budget.load(Ordering::Relaxed);
                let state = json!([outcome, budget, made.load(Ordering::Relaxed)]);
                if case["id"] == "no_content_length" {
                    // Unlike the Python SDK, the client reads the body to decide (B-06).
                    assert_eq!(state, json!(["status_400", 16, 1]));
                } else {
                    assert_eq!(&state, expected, "{}", case["id"]);
                }
            }
        }
    }
}
