//! [`PendingCalls`]: the queued calls of a model that have no result yet.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;

/// Calls of one model that have no result yet. [`ended`](Self::ended) waits for all of them.
#[derive(Debug, Default)]
pub struct PendingCalls(watch::Sender<CallNumbers>);

/// Numbers of the calls of one model. Calls are numbered in the order in which they begin.
#[derive(Debug, Default)]
struct CallNumbers {
    /// Number of the next call.
    next: u64,
    /// Numbers of the calls that have not ended.
    pending: BTreeSet<u64>,
}

/// One pending call. Dropping it ends the call.
#[derive(Debug)]
pub struct PendingCall {
    calls: Arc<PendingCalls>,
    number: u64,
}

impl PendingCalls {
    /// Adds a call, which ends when the returned value is dropped.
    pub fn begin(self: &Arc<Self>) -> PendingCall {
        let mut number = 0;
        self.0.send_modify(|calls| {
            number = calls.next;
            calls.next += 1;
            calls.pending.insert(number);
        });
        PendingCall { calls: Arc::clone(self), number }
    }

    /// Returns a future that resolves once all calls that are pending now have ended. Calls that
    /// begin later do not prolong the wait.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let next = self.0.borrow().next;
        let mut calls = self.0.subscribe();
        async move {
            let all_ended =
                |calls: &CallNumbers| calls.pending.first().is_none_or(|first| *first >= next);
            // Fails only if the sender was dropped. In that case no call is pending, because each
            // pending call keeps the sender alive.
            let _ = calls.wait_for(all_ended).await;
        }
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        self.calls.0.send_modify(|calls| {
            calls.pending.remove(&self.number);
        });
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn only_earlier_calls_are_waited_for() {
        let calls = Arc::new(PendingCalls::default());
        assert!(calls.ended().now_or_never().is_some());
        let first = calls.begin();
        let second = calls.begin();
        let mut ended = Box::pin(calls.ended());
        assert!((&mut ended).now_or_never().is_none());
        let _later = calls.begin();
        drop(second);
        assert!((&mut ended).now_or_never().is_none());
        drop(first);
        assert!(ended.now_or_never().is_some());
    }
}
