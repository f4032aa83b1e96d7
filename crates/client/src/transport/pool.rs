//! A growing list of HTTP clients, each with connections of its own.
//!
//! A request takes the first client that is not full. Under HTTP/2 one client is one connection, so
//! this is what keeps thousands of requests from queueing behind one connection's stream limit.

use std::sync::Mutex;

use bytes::Bytes;
use http::{Response, StatusCode};

use super::http::HttpFailure;

/// How many refusals by a proxy are taken for broken connections before one is believed.
const EMPTY_400_BUDGET: u32 = 16;

pub(crate) struct Pool<C> {
    requests_per_client: usize,
    make: Box<dyn Fn() -> C + Send + Sync>,
    state: Mutex<State<C>>,
}

struct State<C> {
    slots: Vec<Slot<C>>,
    empty_400_budget: u32,
}

struct Slot<C> {
    client: C,
    active: usize,
}

impl<C: Clone> Pool<C> {
    pub(crate) fn new(requests_per_client: usize, make: Box<dyn Fn() -> C + Send + Sync>) -> Self {
        let state = State { slots: Vec::new(), empty_400_budget: EMPTY_400_BUDGET };
        Self { requests_per_client, make, state: Mutex::new(state) }
    }

    /// A place for one request, until the lease is dropped.
    pub(crate) fn lease(&self) -> Lease<'_, C> {
        let mut state = self.lock();
        let free = |slot: &Slot<C>| slot.active < self.requests_per_client;
        let slot = state.slots.iter().position(free).unwrap_or_else(|| {
            state.slots.push(Slot { client: (self.make)(), active: 0 });
            state.slots.len() - 1
        });
        state.slots[slot].active += 1;
        let client = state.slots[slot].client.clone();
        drop(state);
        Lease { pool: self, slot, client }
    }

    /// Looks at a reply. A 400 without a body comes from a proxy that wants to be rid of the
    /// connection: the client is replaced, and the request counts as never answered, so that it is
    /// sent again. After many of those it is believed.
    pub(crate) fn settle(
        &self,
        lease: &Lease<'_, C>,
        reply: Response<Bytes>,
    ) -> Result<Response<Bytes>, HttpFailure> {
        let mut state = self.lock();
        if reply.status() == StatusCode::BAD_REQUEST && reply.body().is_empty() {
            state.slots[lease.slot].client = (self.make)();
            if state.empty_400_budget > 0 {
                state.empty_400_budget -= 1;
                return Err(HttpFailure::connect("a proxy refused the connection (empty 400)"));
            }
        } else if !reply.status().is_client_error() && !reply.status().is_server_error() {
            state.empty_400_budget = EMPTY_400_BUDGET.min(state.empty_400_budget + 1);
        }
        Ok(reply)
    }

    /// The next request in this place gets a new client.
    pub(crate) fn renew(&self, lease: &Lease<'_, C>) {
        let client = (self.make)();
        self.lock().slots[lease.slot].client = client;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State<C>> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A place in a [`Pool`].
pub(crate) struct Lease<'a, C> {
    pool: &'a Pool<C>,
    slot: usize,
    client: C,
}

impl<C> Lease<'_, C> {
    pub(crate) fn client(&self) -> &C {
        &self.client
    }
}

impl<C> Drop for Lease<'_, C> {
    fn drop(&mut self) {
        let state = self.pool.state.lock();
        let mut state = state.unwrap_or_else(std::sync::PoisonError::into_inner);
        state.slots[self.slot].active -= 1;
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
                    assert_eq!(json!(lease.slot), *index, "{op}");
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
                let result = pool.settle(&pool.lease(), reply);
                let seen = match &result {
                    Err(_) => "connection_error".to_owned(),
                    Ok(reply) if reply.status().is_success() => "ok".to_owned(),
                    Ok(reply) => format!("status_{}", reply.status().as_u16()),
                };
                let budget = pool.lock().empty_400_budget;
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
