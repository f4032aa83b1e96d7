//! [`ByteBudget`]: a limit on bytes that lets one request overshoot.
//!
//! A request is admitted while nothing is owed, then its bytes are taken off and may leave a debt.
//! So a request of any size passes sooner or later, and the limit is overshot by one at most.
//! Waiting requests are admitted in the order they came.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

#[derive(Debug)]
pub(crate) struct ByteBudget(Mutex<State>);

#[derive(Debug)]
struct State {
    left: i64,
    waiting: VecDeque<(i64, oneshot::Sender<BytePermit>)>,
}

/// Bytes taken off a budget, given back when this is dropped.
#[derive(Debug)]
pub(crate) struct BytePermit {
    budget: Arc<ByteBudget>,
    bytes: i64,
}

impl ByteBudget {
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        let left = i64::try_from(bytes).unwrap_or(i64::MAX);
        Arc::new(Self(Mutex::new(State { left, waiting: VecDeque::new() })))
    }

    /// Waits until nothing is owed, then takes `bytes`. Dropping the future leaves no trace.
    pub(crate) async fn take(self: &Arc<Self>, bytes: u64) -> BytePermit {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let admitted = {
            let mut state = self.lock();
            if state.left >= 0 && state.waiting.is_empty() {
                state.left -= bytes;
                return self.permit(bytes);
            }
            let (sender, admitted) = oneshot::channel();
            state.waiting.push_back((bytes, sender));
            admitted
        };
        admitted.await.expect("the budget outlives those who wait for it")
    }

    fn permit(self: &Arc<Self>, bytes: i64) -> BytePermit {
        BytePermit { budget: Arc::clone(self), bytes }
    }

    fn give_back(self: &Arc<Self>, bytes: i64) {
        let mut admitted = Vec::new();
        let mut state = self.lock();
        state.left = state.left.saturating_add(bytes);
        while state.left >= 0 {
            let Some((bytes, sender)) = state.waiting.pop_front() else { break };
            // Whoever gave up waiting must not be charged.
            if !sender.is_closed() {
                state.left -= bytes;
                admitted.push((sender, self.permit(bytes)));
            }
        }
        drop(state);
        // A permit that nobody takes any more is dropped here, and gives its bytes back.
        for (sender, permit) in admitted {
            let _ = sender.send(permit);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for BytePermit {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use serde_json::json;

    use super::*;
    use crate::fixture;
    use crate::task::Task;

    #[tokio::test(start_paused = true)]
    async fn requests_are_admitted_as_in_the_reference() {
        for case in fixture::cases("bytes_semaphore.json") {
            let budget = ByteBudget::new(case["max"].as_u64().unwrap());
            let log = Arc::new(Mutex::new(Vec::new()));
            let held = Arc::new(Mutex::new(HashMap::new()));
            let mut tasks = HashMap::new();
            for op in case["ops"].as_array().unwrap() {
                let name = op[1].as_str().unwrap().to_owned();
                match op[0].as_str().unwrap() {
                    "acquire" => {
                        let bytes = op[2].as_u64().unwrap();
                        let (budget, log) = (Arc::clone(&budget), Arc::clone(&log));
                        let (held, owner) = (Arc::clone(&held), name.clone());
                        let task = Task::spawn(async move {
                            let permit = budget.take(bytes).await;
                            log.lock().unwrap().push(format!("in:{owner}"));
                            held.lock().unwrap().insert(owner, permit);
                        });
                        tasks.insert(name, task);
                    }
                    "release" => {
                        log.lock().unwrap().push(format!("out:{name}"));
                        let permit = held.lock().unwrap().remove(&name);
                        drop(permit.expect("a permit to release"));
                    }
                    _ => drop(tasks.remove(&name).expect("a task to cancel")),
                }
                // Everything that can run has run before the clock moves.
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                let left = budget.lock().left;
                log.lock().unwrap().push(format!("budget={left}"));
            }
            assert_eq!(json!(*log.lock().unwrap()), case["log"], "{case}");
        }
    }
}
