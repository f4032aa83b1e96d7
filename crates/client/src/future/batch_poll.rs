//! [`BatchPoll`]: one poll for all tickets of a sampling session, where the server offers that.
//!
//! The server tells which tickets have answers; the answers themselves are fetched one by one, as
//! ever. With thousands of samples under way that is one open request in place of thousands.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinkex_wire::{CompletedFuture, FuturesRetrieved, FuturesTarget, RequestId, RetrieveFutures};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep};

use crate::error::{Error, Result};
use crate::task::Task;
use crate::transport::{BILLING_PAUSE, RequestOptions, Transport};

use super::poll_interval::{Contact, PollInterval};

const AFTER_FAILURE: Duration = Duration::from_secs(1);
const BAD_REQUESTS: u32 = 3;
const MOST_GIVEN_UP: usize = 10_000;
/// Far more than samples can be between being taken and being waited for.
const MOST_UNCLAIMED: usize = 10_000;

/// Which answers have arrived. Polling ends when this is dropped.
#[derive(Debug)]
pub(crate) struct BatchPoll {
    board: Arc<Board>,
    _task: Task,
}

/// What the polling task and those who wait share.
#[derive(Debug, Default)]
struct Board {
    state: Mutex<State>,
    /// Somebody waits, or has fetched an answer.
    news: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<RequestId, oneshot::Sender<Arrival>>,
    arrived: Unclaimed,
    /// Nobody waits for these any more.
    given_up: HashSet<RequestId>,
    /// Answers that were fetched, which the server may forget.
    fetched: BTreeSet<RequestId>,
    over: Option<Over>,
}

/// Announced before anybody asked. A sample that is given up while it is handed over has a ticket that
/// nobody here ever sees: the oldest announcements go when there are too many.
#[derive(Debug, Default)]
struct Unclaimed {
    new: HashMap<RequestId, CompletedFuture>,
    old: HashMap<RequestId, CompletedFuture>,
}

impl Unclaimed {
    fn insert(&mut self, completion: CompletedFuture) {
        if self.new.len() >= MOST_UNCLAIMED {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(completion.request_id().clone(), completion);
    }

    fn remove(&mut self, request_id: &RequestId) -> Option<CompletedFuture> {
        self.new.remove(request_id).or_else(|| self.old.remove(request_id))
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.new.len() + self.old.len()
    }
}

/// Why there will be no more announcements.
#[derive(Debug)]
enum Over {
    /// The server does not offer them after all: everybody asks for themselves.
    NotOffered,
    Failed(Error),
}

/// What a waiter learns: its completion, or nothing if it has to ask for itself.
type Arrival = Result<Option<CompletedFuture>>;

impl BatchPoll {
    /// Begins to poll as soon as somebody waits.
    pub(crate) fn watch(
        transport: Arc<Transport>,
        target: FuturesTarget,
        adaptive_polling: bool,
        patience: Option<Duration>,
    ) -> Self {
        let board = Arc::new(Board::default());
        let (interval, contact) = (PollInterval::new(adaptive_polling), Contact::new(patience));
        let task = Task::spawn(poll(Arc::clone(&board), transport, target, interval, contact));
        Self { board, _task: task }
    }

    /// Waits until a ticket has an answer.
    ///
    /// # Errors
    /// If the server refuses to tell.
    pub(crate) async fn wait_for(&self, request_id: &RequestId) -> Arrival {
        let arrival = {
            let mut state = self.board.lock();
            // What arrived counts, even if nothing more will.
            if let Some(completion) = state.arrived.remove(request_id) {
                return Ok(Some(completion));
            }
            if let Some(over) = &state.over {
                return over.tell();
            }
            let (sender, arrival) = oneshot::channel();
            state.waiting.insert(request_id.clone(), sender);
            arrival
        };
        let _waiter = Waiter { board: &self.board, request_id };
        self.board.news.notify_one();
        arrival.await.unwrap_or(Ok(None))
    }

    /// An answer was fetched: the server may forget it.
    pub(crate) fn fetched(&self, request_id: RequestId) {
        let mut state = self.board.lock();
        if state.over.is_none() {
            state.fetched.insert(request_id);
            drop(state);
            self.board.news.notify_one();
        }
    }
}

/// Somebody who waits, until they hear something or give up.
struct Waiter<'a> {
    board: &'a Board,
    request_id: &'a RequestId,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut state = self.board.lock();
        if state.waiting.remove(self.request_id).is_some() && state.over.is_none() {
            // A cancelled one may never be announced; so many at once cannot be on their way.
            if state.given_up.len() >= MOST_GIVEN_UP {
                state.given_up.clear();
            }
            state.given_up.insert(self.request_id.clone());
        }
    }
}

async fn poll(
    board: Arc<Board>,
    transport: Arc<Transport>,
    target: FuturesTarget,
    mut interval: PollInterval,
    mut contact: Contact,
) {
    let (mut cursor, mut bad) = (0, 0);
    loop {
        let retrieved = board.wanted().await;
        let poll = RetrieveFutures {
            target: target.clone(),
            prev_cursor: cursor,
            timeout: None,
            retrieved_request_ids: retrieved.iter().cloned().collect(),
        };
        let asked = Instant::now();
        let error = match transport.send(&poll, &RequestOptions::default()).await {
            Ok(reply) => {
                (cursor, bad) = (reply.cursor, 0);
                contact.seen();
                let nothing = reply.completions.is_empty();
                board.announce(reply, &retrieved);
                if nothing {
                    interval.wait(asked).await;
                }
                continue;
            }
            Err(error) => error,
        };
        match error.status() {
            Some(402) if transport.pause_for_billing() => sleep(BILLING_PAUSE).await,
            Some(400) if bad < BAD_REQUESTS => {
                bad += 1;
                sleep(AFTER_FAILURE).await;
            }
            Some(404 | 405 | 501) => return board.end(Over::NotOffered),
            None if error.is_retryable() => {
                if contact.lost(asked) {
                    // Whoever asks later may find the server there again.
                    board.disappoint(&error);
                    contact.seen();
                }
                sleep(AFTER_FAILURE).await;
            }
            _ if error.is_retryable() => {
                contact.seen();
                sleep(AFTER_FAILURE).await;
            }
            _ => return board.end(Over::Failed(error)),
        }
    }
}

impl Board {
    /// Waits until there is a reason to poll; returns the fetched answers to report.
    async fn wanted(&self) -> BTreeSet<RequestId> {
        loop {
            {
                let state = self.lock();
                if !state.waiting.is_empty() || !state.fetched.is_empty() {
                    return state.fetched.clone();
                }
            }
            self.news.notified().await;
        }
    }

    fn announce(&self, reply: FuturesRetrieved, reported: &BTreeSet<RequestId>) {
        let mut state = self.lock();
        state.fetched.retain(|request_id| !reported.contains(request_id));
        for completion in reply.completions {
            let request_id = completion.request_id();
            if let Some(waiter) = state.waiting.remove(request_id) {
                let _ = waiter.send(Ok(Some(completion)));
            } else if !state.given_up.remove(request_id) {
                state.arrived.insert(completion);
            }
        }
    }

    /// Tells all who wait now that nothing comes.
    fn disappoint(&self, error: &Error) {
        for (_, waiter) in self.lock().waiting.drain() {
            let _ = waiter.send(Err(error.clone()));
        }
    }

    fn end(&self, over: Over) {
        let mut state = self.lock();
        for (_, waiter) in state.waiting.drain() {
            let _ = waiter.send(over.tell());
        }
        *state = State {
            over: Some(over),
            arrived: std::mem::take(&mut state.arrived),
            ..State::default()
        };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Over {
    fn tell(&self) -> Arrival {
        match self {
            Self::NotOffered => Ok(None),
            Self::Failed(error) => Err(error.clone()),
        }
    }
}

#[cfg(test)]
impl BatchPoll {
    /// How many announcements are kept for somebody who may still ask.
    pub(super) fn kept(&self) -> usize {
        self.board.lock().arrived.len()
    }

    /// Whether nothing is remembered about any ticket.
    pub(super) fn is_empty(&self) -> bool {
        let state = self.board.lock();
        let State { waiting, arrived, given_up, fetched, .. } = &*state;
        waiting.is_empty() && arrived.len() == 0 && given_up.is_empty() && fetched.is_empty()
    }
}
