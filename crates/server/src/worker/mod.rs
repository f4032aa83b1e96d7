//! The worker: the one thread that owns the engine.
//!
//! Training and sampling take turns by the time they took, so that neither starves the other;
//! when one has nothing to do the other has it all. Samples of all sessions run together.

mod engines;
mod model;
mod sample;
mod train;

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tinkex_wire::{ModelId, SessionId};

use self::engines::Engines;
use self::model::Live;
use self::sample::Running;
use crate::settle::{Settled, settle};
use crate::state::Shared;
use crate::store::{End, Fault};
use crate::sweep;
use crate::work::{Job, Work};

/// How long the worker sleeps if nothing happens.
const IDLE: Duration = Duration::from_secs(5);

/// What the thread works with.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    engines: Engines,
    live: HashMap<ModelId, Live>,
    running: Running,
}

impl Worker {
    /// Starts the thread; it ends when the queue says so, and tells how many models it saved.
    pub(crate) fn start(shared: Arc<Shared>) -> io::Result<JoinHandle<usize>> {
        let engines = Engines::new(&shared.options);
        let mut worker =
            Self { shared, engines, live: HashMap::new(), running: Running::default() };
        std::thread::Builder::new().name("worker".to_owned()).spawn(move || worker.run_or_tell())
    }

    /// What runs is guarded piece by piece; a mistake anywhere else is the end of the worker, and
    /// whoever asks the server for something has to hear of it.
    fn run_or_tell(&mut self) -> usize {
        catch_unwind(AssertUnwindSafe(|| self.run())).unwrap_or_else(|_| {
            crate::log::warn(format_args!(
                "the worker made a mistake and ended; what was promised goes on after a restart"
            ));
            self.shared.broken.send_replace(true);
            0
        })
    }

    fn run(&mut self) -> usize {
        let (mut trained, mut sampled) = (Duration::ZERO, Duration::ZERO);
        loop {
            let sampling = !self.engines.is_idle();
            let turn = !sampling || trained <= sampled;
            let batch = self.shared.queue.take(turn, (!sampling).then(|| self.patience()));
            for job in batch.samples {
                self.begin(job);
            }
            for id in batch.cancelled {
                self.cancel(&id);
            }
            for model in batch.dropped {
                self.live.remove(&model);
            }
            if !batch.silent.is_empty() {
                self.end(batch.silent);
            }
            if batch.stopping {
                return self.save_all();
            }
            let start = Instant::now();
            match batch.train {
                Some(job) => {
                    self.carry_out(job);
                    trained += start.elapsed();
                }
                // No credit for having had nothing to do.
                None if turn => trained = trained.max(sampled),
                None => {}
            }
            if self.engines.is_idle() {
                sampled = trained;
                self.unload_idle();
            } else {
                let start = Instant::now();
                self.step();
                sampled += start.elapsed();
            }
            self.shared.metrics.busy_micros.add(micros(start.elapsed()));
        }
    }

    /// How long there may be nothing to do at all.
    fn patience(&self) -> Duration {
        let until = self.next_idle().map(|at| at.saturating_duration_since(Instant::now()));
        until.unwrap_or(IDLE).min(IDLE)
    }

    /// Ends sessions of which nothing was heard, once what their models learned is saved.
    fn end(&mut self, sessions: Vec<SessionId>) {
        let mut ended = Vec::new();
        for id in sessions {
            // It may have said something meanwhile.
            if !sweep::is_silent(&self.shared, &id) {
                continue;
            }
            let models: Vec<ModelId> = {
                let store = self.shared.store();
                store.runs_of(&id).map(|run| run.id.clone()).collect()
            };
            let saves = self.shared.options.autosave_on_expiry;
            // What cannot be saved now is tried again with the next round.
            if !saves || models.iter().all(|model| self.autosave(model)) {
                ended.push((id, End::Expired));
            }
        }
        let turn = Arc::clone(&self.shared.changes).blocking_lock_owned();
        sweep::end_sessions(&self.shared, turn, ended, Box::new(|_| {}));
    }

    /// Runs a request of a model and answers it.
    fn carry_out(&mut self, job: Job) {
        let Job { id, work, .. } = job;
        let Work::Train { model, seq, op } = work else { return };
        let name = op.name();
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.train(&id, &model, seq, op)));
        let settled = outcome.unwrap_or_else(|_| {
            // Whatever it left half done goes; the model comes back from disk.
            self.live.remove(&model);
            Settled::failed(
                Fault::Server,
                "the server made a mistake; the model is as it was before",
            )
        });
        let took = start.elapsed();
        self.tell(name, model.as_str(), seq, took, &settled);
        let changed = settled.changed;
        settle(&self.shared, &mut self.shared.store(), &id, settled);
        if changed {
            self.snapshot_if_due(&model, seq, took);
        }
    }

    fn tell(&self, name: &str, whose: &str, seq: u64, took: Duration, settled: &Settled) {
        let tokens: u64 = settled.used.iter().map(|(_, n)| n).sum();
        let seconds = took.as_secs_f64();
        match &settled.answer {
            crate::store::Answer::Failed { error, .. } => {
                crate::log::job(format_args!(
                    "{name} {whose} #{seq} failed after {seconds:.3} s: {error}"
                ));
            }
            _ if name == "forward_backward" || name == "forward" => {
                #[expect(clippy::cast_precision_loss, reason = "for people")]
                let speed = tokens as f64 / seconds.max(1e-9);
                crate::log::job(format_args!(
                    "{name} {whose} #{seq} {tokens} tokens in {seconds:.3} s ({speed:.0} tokens/s)"
                ));
            }
            _ => crate::log::job(format_args!("{name} {whose} #{seq} in {seconds:.3} s")),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
