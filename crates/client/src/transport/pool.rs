//! A growing list of HTTP clients, each with connections of its own.
//!
//! A request takes the first client that is not full. Under HTTP/2 one client is one connection, so
//! this is what keeps thousands of requests from queueing behind one connection's stream limit.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use http::{Response, StatusCode};

use super::http::HttpFailure;

/// How many refusals by a proxy are taken for broken connections before one is believed.
const EMPTY_400_BUDGET: u32 = 16;

/// Requests pass side by side: the list is only locked for good when it grows.
pub(crate) struct Pool<C> {
    requests_per_client: usize,
    make: Box<dyn Fn() -> C + Send + Sync>,
    slots: RwLock<Vec<Arc<Slot<C>>>>,
    empty_400_budget: AtomicU32,
}

struct Slot<C> {
    client: RwLock<C>,
    active: AtomicUsize,
    #[cfg(test)]
    index: usize,
}

impl<C: Clone> Pool<C> {
    pub(crate) fn new(requests_per_client: usize, make: Box<dyn Fn() -> C + Send + Sync>) -> Self {
        let empty_400_budget = AtomicU32::new(EMPTY_400_BUDGET);
        Self { requests_per_client, make, slots: RwLock::default(), empty_400_budget }
    }

    /// A place for one request, until the lease is dropped.
    pub(crate) fn lease(&self) -> Lease<C> {
        loop {
            let full = {
                let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
                if let Some(slot) = slots.iter().find(|slot| slot.enter(self.requests_per_client)) {
                    return Lease::new(slot);
                }
                slots.len()
            };
            // Made before the list is locked: it takes a while.
            let client = RwLock::new((self.make)());
            let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
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

    /// Looks at a reply. A 400 without a body comes from a proxy that wants to be rid of the
    /// connection: the client is replaced, and the request counts as never answered, so that it is
    /// sent again. After many of those it is believed.
    pub(crate) fn check_response(
        &self,
        lease: &Lease<C>,
        reply: Response<Bytes>,
    ) -> Result<Response<Bytes>, HttpFailure> {
        let budget = &self.empty_400_budget;
        if reply.status() == StatusCode::BAD_REQUEST && reply.body().is_empty() {
            self.renew(lease);
            let less = |left: u32| left.checked_sub(1);
            if budget.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok() {
                return Err(HttpFailure::connect("a proxy refused the connection (empty 400)"));
            }
        } else if !reply.status().is_client_error() && !reply.status().is_server_error() {
            let more = |left: u32| (left < EMPTY_400_BUDGET).then_some(left + 1);
            let _ = budget.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        }
        Ok(reply)
    }

    /// The next request in this place gets a new client.
    pub(crate) fn renew(&self, lease: &Lease<C>) {
        let client = (self.make)();
        *lease.slot.client.write().unwrap_or_else(PoisonError::into_inner) = client;
    }
}

impl<C> Slot<C> {
    /// Takes a place, if there is one.
    fn enter(&self, most: usize) -> bool {
        let one_more = |active: usize| (active < most).then_some(active + 1);
        self.active.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }
}

/// A place in a [`Pool`].
pub(crate) struct Lease<C> {
    slot: Arc<Slot<C>>,
    client: C,
}

impl<C: Clone> Lease<C> {
    fn new(slot: &Arc<Slot<C>>) -> Self {
        let client = slot.client.read().unwrap_or_else(PoisonError::into_inner).clone();
        Self { slot: Arc::clone(slot), client }
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
    fn a_request_takes_the_first_client_that_is_not_full() {
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
                    open.remove(name).expect("a request that was begun");
                    assert_eq!(*index, Value::Null);
                }
            }
        }
    }

    #[test]
    fn an_empty_400_is_a_broken_connection_for_a_while() {
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
                let reply = Response::builder().status(status).body(Bytes::from(body)).unwrap();
                let result = pool.check_response(&pool.lease(), reply);
                let seen = match &result {
                    Err(_) => "connection_error".to_owned(),
                    Ok(reply) if reply.status().is_success() => "ok".to_owned(),
                    Ok(reply) => format!("status_{}", reply.status().as_u16()),
                };
                let budget = pool.empty_400_budget.load(Ordering::Relaxed);
                let state = json!([seen, budget, made.load(Ordering::Relaxed)]);
                if case["id"] == "no_content_length" {
                    // Unlike the reference we look at the body, which is there.
                    assert_eq!(state, json!(["status_400", 16, 1]));
                } else {
                    assert_eq!(&state, expected, "{}", case["id"]);
                }
            }
        }
    }
}
