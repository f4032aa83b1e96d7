//! The queue: requests that wait for the worker.
//!
//! The requests of a model are released in the order of their numbers, however they arrive. One
//! that comes before its turn is held until the numbers before it have come, or for so long that
//! they never will: a client may use a number up without sending anything. Models take turns.
//! Samples have no order.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tinkex_wire::{ModelId, RequestId, SessionId};

use crate::work::{Job, Op, Work};

/// Requests that wait for the worker.
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    wake: Condvar,
    gap: Duration,
}

#[derive(Default)]
struct Inner {
    lines: HashMap<ModelId, Line>,
    /// Whose turn it is.
    turns: VecDeque<ModelId>,
    samples: VecDeque<Job>,
    cancelled: Vec<RequestId>,
    dropped: Vec<ModelId>,
    silent: Vec<SessionId>,
    /// Requests that wait, and samples that are being drawn.
    count: usize,
    bytes: usize,
    /// Requests on their way to the disk, and their bytes: a slow disk must not gather them without
    /// end.
    coming: (usize, usize),
    stopping: bool,
}

#[derive(Default)]
struct Line {
    /// The number that may run.
    next: u64,
    waiting: BTreeMap<u64, (Job, Instant)>,
    /// Numbers whose requests were refused: nobody waits for them.
    refused: BTreeSet<u64>,
}

impl Line {
    /// The first number that is waited for, if what waits comes behind it.
    fn missing(&self) -> Option<u64> {
        let first = *self.waiting.keys().next()?;
        (self.next..first).find(|number| !self.refused.contains(number))
    }

    /// Takes out the next request if it may run.
    fn release(&mut self, now: Instant, gap: Duration) -> Option<Job> {
        let waited = |(_, arrived): &(Job, Instant)| now.saturating_duration_since(*arrived) >= gap;
        if self.missing().is_some() && !self.waiting.values().next().is_some_and(waited) {
            return None;
        }
        let (seq, (job, _)) = self.waiting.pop_first()?;
        self.next = self.next.max(seq + 1);
        self.refused = self.refused.split_off(&self.next);
        Some(job)
    }
}

/// Refused numbers of one model that are remembered.
const MOST_REFUSED: usize = 4_096;

/// What the worker is handed.
#[derive(Default)]
pub(crate) struct Batch {
    /// The next request of some model.
    pub(crate) train: Option<Job>,
    /// New samples.
    pub(crate) samples: Vec<Job>,
    /// Requests that nobody waits for.
    pub(crate) cancelled: Vec<RequestId>,
    /// Models that nobody will use again.
    pub(crate) dropped: Vec<ModelId>,
    /// Sessions of which nothing was heard for too long.
    pub(crate) silent: Vec<SessionId>,
    /// Whether to come to an end.
    pub(crate) stopping: bool,
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.train.is_none()
            && self.samples.is_empty()
            && self.cancelled.is_empty()
            && self.dropped.is_empty()
            && self.silent.is_empty()
            && !self.stopping
    }
}

/// A request that came after its number was given up.
pub(crate) struct Late(pub(crate) RequestId);

impl Queue {
    pub(crate) fn new(gap: Duration) -> Self {
        Self { inner: Mutex::default(), wake: Condvar::new(), gap }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many requests wait, or are samples being drawn, and their bytes.
    pub(crate) fn size(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.count + inner.coming.0, inner.bytes + inner.coming.1)
    }

    /// A request is on its way to the disk.
    pub(crate) fn expect(&self, bytes: usize) {
        let coming = &mut self.lock().coming;
        *coming = (coming.0 + 1, coming.1 + bytes);
    }

    /// It is there, or it is known not to be.
    pub(crate) fn expected(&self, bytes: usize) {
        let coming = &mut self.lock().coming;
        *coming = (coming.0 - 1, coming.1 - bytes);
    }

    /// Where the line of a model begins after a restart.
    pub(crate) fn start_at(&self, model: &ModelId, next: u64) {
        let mut inner = self.lock();
        let line = inner.lines.entry(model.clone()).or_default();
        line.next = line.next.max(next);
    }

    /// The number that a model's line waits for.
    pub(crate) fn next_of(&self, model: &ModelId) -> u64 {
        self.lock().lines.get(model).map_or(0, |line| line.next)
    }

    /// What a request has to wait for, if it is a number that has not come.
    pub(crate) fn missing(&self, model: &ModelId, seq: u64) -> Option<u64> {
        let inner = self.lock();
        inner.lines.get(model)?.missing().filter(|missing| seq > *missing)
    }

    /// Nobody will send a request under this number: it was refused.
    pub(crate) fn refuse(&self, model: &ModelId, seq: u64) {
        let mut inner = self.lock();
        if let Some(line) = inner.lines.get_mut(model)
            && seq >= line.next
            && line.refused.len() < MOST_REFUSED
        {
            line.refused.insert(seq);
        }
        drop(inner);
        self.wake.notify_all();
    }

    /// Lines a request up.
    pub(crate) fn push(&self, job: Job, now: Instant) -> Result<(), Late> {
        let mut inner = self.lock();
        match &job.work {
            Work::Sample(_) => {
                inner.count += 1;
                inner.bytes += job.bytes;
                inner.samples.push_back(job);
            }
            Work::Train { model, seq, .. } => {
                let (model, seq) = (model.clone(), *seq);
                let line = inner.lines.entry(model.clone()).or_default();
                if seq < line.next {
                    return Err(Late(job.id));
                }
                let bytes = job.bytes;
                let idle = line.waiting.is_empty();
                line.waiting.insert(seq, (job, now));
                inner.count += 1;
                inner.bytes += bytes;
                if idle {
                    inner.turns.push_back(model);
                }
            }
        }
        drop(inner);
        self.wake.notify_all();
        Ok(())
    }

    /// A sample that was handed out has ended. Until then it counts: any number of them can be drawn
    /// at once, so the line alone would never be full.
    pub(crate) fn sampled(&self, bytes: usize) {
        let mut inner = self.lock();
        inner.count -= 1;
        inner.bytes -= bytes;
    }

    /// Nobody waits for this request any more.
    pub(crate) fn cancel(&self, id: RequestId) {
        self.lock().cancelled.push(id);
        self.wake.notify_all();
    }

    /// Nobody will use this model again; returns what still waited for it.
    pub(crate) fn drop_model(&self, model: &ModelId) -> Vec<RequestId> {
        let mut inner = self.lock();
        let line = inner.lines.remove(model).unwrap_or_default();
        inner.turns.retain(|turn| turn != model);
        inner.count -= line.waiting.len();
        inner.bytes -= line.waiting.values().map(|(job, _)| job.bytes).sum::<usize>();
        inner.dropped.push(model.clone());
        drop(inner);
        self.wake.notify_all();
        line.waiting.into_values().map(|(job, _)| job.id).collect()
    }

    /// Nothing was heard of these sessions for too long.
    pub(crate) fn silent(&self, sessions: Vec<SessionId>) {
        // Those of the last round that are still to be ended are among them.
        self.lock().silent = sessions;
        self.wake.notify_all();
    }

    /// Tells the worker to come to an end.
    pub(crate) fn stop(&self) {
        self.lock().stopping = true;
        self.wake.notify_all();
    }

    /// What there is to do. With `wait` it is waited for, at most that long.
    pub(crate) fn take(&self, train: bool, wait: Option<Duration>) -> Batch {
        let mut inner = self.lock();
        let until = wait.map(|wait| Instant::now() + wait);
        loop {
            let now = Instant::now();
            let batch = inner.take(train, now, self.gap);
            let Some(until) = until.filter(|until| *until > now && batch.is_empty()) else {
                return batch;
            };
            let next_gap = inner.next_deadline(self.gap).unwrap_or(until);
            let pause =
                next_gap.min(until).saturating_duration_since(now).max(Duration::from_millis(1));
            inner = match self.wake.wait_timeout(inner, pause) {
                Ok((inner, _)) => inner,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

impl Inner {
    fn take(&mut self, train: bool, now: Instant, gap: Duration) -> Batch {
        let train = if train { self.release(now, gap) } else { None };
        let samples: Vec<Job> = self.samples.drain(..).collect();
        if let Some(job) = &train {
            self.count -= 1;
            self.bytes -= job.bytes;
        }
        Batch {
            train,
            samples,
            cancelled: std::mem::take(&mut self.cancelled),
            dropped: std::mem::take(&mut self.dropped),
            silent: std::mem::take(&mut self.silent),
            stopping: self.stopping,
        }
    }

    /// The next request of the first model in turn that has one ready.
    fn release(&mut self, now: Instant, gap: Duration) -> Option<Job> {
        for _ in 0..self.turns.len() {
            let model = self.turns.pop_front()?;
            let Some(line) = self.lines.get_mut(&model) else { continue };
            let job = line.release(now, gap);
            if !line.waiting.is_empty() {
                self.turns.push_back(model);
            }
            if job.is_some() {
                return job;
            }
        }
        None
    }

    /// When the first held request has waited long enough.
    fn next_deadline(&self, gap: Duration) -> Option<Instant> {
        self.lines
            .values()
            .filter_map(|line| line.waiting.first_key_value())
            .map(|(_, (_, arrived))| *arrived + gap)
            .min()
    }
}

impl Op {
    /// A name for logs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Fail(..) => "request",
            Self::Create => "create_model",
            Self::Pass(pass) if pass.mode == tinkex_wire::PassMode::Forward => "forward",
            Self::Pass(_) => "forward_backward",
            Self::Step(_) => "optim_step",
            Self::Save(_) => "save",
            Self::SaveFor(_) => "save_for_sampler",
            Self::Load { .. } => "load",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::Sample;

    fn job(model: &str, seq: u64) -> Job {
        let work = Work::Train { model: model.into(), seq, op: Op::Create };
        Job { id: format!("{model}{seq}").into(), bytes: 10, work }
    }

    fn taken(queue: &Queue) -> Option<String> {
        queue.take(true, None).train.map(|job| job.id.as_str().to_owned())
    }

    #[test]
    fn requests_run_in_the_order_of_their_numbers() {
        let queue = Queue::new(Duration::from_secs(60));
        let now = Instant::now();
        for seq in [2, 3, 1] {
            assert!(queue.push(job("m", seq), now).is_ok());
            assert_eq!(taken(&queue), None, "0 has not come");
        }
        assert_eq!(queue.missing(&"m".into(), 3), Some(0));
        assert!(queue.push(job("m", 0), now).is_ok());
        assert_eq!(queue.size(), (4, 40));
        let all: Vec<_> = std::iter::from_fn(|| taken(&queue)).collect();
        assert_eq!(all, ["m0", "m1", "m2", "m3"]);
        assert_eq!(queue.size(), (0, 0));
        assert!(queue.push(job("m", 2), now).is_err(), "its turn is over");
    }

    #[test]
    fn a_gap_that_never_fills_is_skipped() {
        let queue = Queue::new(Duration::from_secs(60));
        let now = Instant::now();
        assert!(queue.push(job("m", 0), now).is_ok());
        assert!(queue.push(job("m", 2), now.checked_sub(Duration::from_secs(61)).unwrap()).is_ok());
        assert_eq!(taken(&queue).unwrap(), "m0");
        assert_eq!(taken(&queue).unwrap(), "m2");
        let Err(Late(late)) = queue.push(job("m", 1), now) else { panic!("1 is too late") };
        assert_eq!(late, "m1");
    }

    #[test]
    fn nobody_waits_for_a_refused_number() {
        let queue = Queue::new(Duration::from_secs(60));
        let now = Instant::now();
        assert!(queue.push(job("m", 0), now).is_ok());
        assert!(queue.push(job("m", 3), now).is_ok());
        assert_eq!(taken(&queue).unwrap(), "m0");
        queue.refuse(&"m".into(), 2);
        assert_eq!(taken(&queue), None, "1 may come");
        assert_eq!(queue.missing(&"m".into(), 3), Some(1));
        assert!(queue.push(job("m", 1), now).is_ok());
        assert_eq!(taken(&queue).unwrap(), "m1");
        assert_eq!(taken(&queue).unwrap(), "m3");
    }

    #[test]
    fn a_sample_counts_until_it_has_ended() {
        let queue = Queue::new(Duration::from_secs(60));
        let request = tinkex_engine::sample::SampleRequest::new(vec![1], 1);
        let sample = Sample { sampler: "s".into(), request, targets: None, spread: 0 };
        let job = Job { id: "r".into(), bytes: 10, work: Work::Sample(Box::new(sample)) };
        assert!(queue.push(job, Instant::now()).is_ok());
        let taken = queue.take(true, None).samples;
        assert_eq!((taken.len(), queue.size()), (1, (1, 10)));
        queue.sampled(taken[0].bytes);
        assert_eq!(queue.size(), (0, 0));
    }

    #[test]
    fn models_take_turns() {
        let queue = Queue::new(Duration::from_secs(60));
        let now = Instant::now();
        for seq in 0..3 {
            for model in ["a", "b"] {
                assert!(queue.push(job(model, seq), now).is_ok());
            }
        }
        let all: Vec<_> = std::iter::from_fn(|| taken(&queue)).collect();
        assert_eq!(all, ["a0", "b0", "a1", "b1", "a2", "b2"]);
    }

    #[test]
    fn a_dropped_model_gives_back_what_waited() {
        let queue = Queue::new(Duration::from_secs(60));
        let now = Instant::now();
        assert!(queue.push(job("a", 1), now).is_ok());
        assert!(queue.push(job("b", 0), now).is_ok());
        assert_eq!(queue.drop_model(&"a".into()), ["a1"]);
        assert_eq!(queue.size(), (1, 10));
        assert_eq!(taken(&queue).unwrap(), "b0");
    }
}
