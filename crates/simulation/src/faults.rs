//! [`FaultPlan`]: the kinds and probabilities of the faults of a run.

use std::time::Duration;

use fastrand::Rng;

/// Probabilities and limits of the faults of one run. Each kind of fault is absent in some runs, so
/// that every kind of fault also occurs alone.
#[derive(Clone, Debug)]
pub(crate) struct FaultPlan {
    /// Time after which no fault happens any more.
    pub(crate) duration: Duration,
    /// Mean time between two deaths of the server process; `None` for no deaths.
    pub(crate) crash_interval: Option<Duration>,
    /// Longest time for which a dead server stays down.
    pub(crate) max_downtime: Duration,
    /// Probability that a death is a loss of power: writes that are not flushed may be lost.
    pub(crate) power_loss: f64,
    /// Probability that a restart is graceful.
    pub(crate) graceful: f64,
    /// Probability that a file operation kills the process.
    pub(crate) crash_at_write: f64,
    /// Probability that a file operation fails.
    pub(crate) write_error: f64,
    /// Probability that a flush of a file fails and drops the bytes that were not durable, as Linux
    /// does: the next flush succeeds, but the bytes are lost with the power.
    pub(crate) lost_flush: f64,
    /// Probability that a period of a full disk begins at a file operation.
    pub(crate) full_disk: f64,
    /// Probability that the disk is full while the server stops gracefully.
    pub(crate) full_at_stop: f64,
    /// Probability that the death of the process leaves a byte of a durable file damaged.
    pub(crate) damage: f64,
    /// Probability that a file cannot be read.
    pub(crate) read_error: f64,
    /// Probability that a request does not arrive.
    pub(crate) drop_request: f64,
    /// Probability that a request is executed and its response does not arrive.
    pub(crate) drop_response: f64,
    /// Probability that a request arrives twice.
    pub(crate) duplicate: f64,
    /// Probability that the connection breaks while the body of a request is sent.
    pub(crate) cut_request: f64,
    /// Probability that a proxy answers with an error, half of the time after the request was
    /// executed.
    pub(crate) error_status: f64,
    /// Probability that a message takes up to `max_delay` instead of a few milliseconds.
    pub(crate) slow_message: f64,
    pub(crate) max_delay: Duration,
    /// Probability that the program of a client dies.
    pub(crate) client_death: f64,
    /// Probability that a heartbeat is lost.
    pub(crate) drop_heartbeat: f64,
    /// Probability that the server process is frozen instead of killed.
    pub(crate) freeze: f64,
    /// Probability that a second server is started on the data folder instead, while the first one
    /// runs, as after its lock file was removed.
    pub(crate) second_server: f64,
    /// Probability that the wall clock is set to a wrong time before a restart.
    pub(crate) clock_set: f64,
    /// Probability that the clients are frozen together with the server, as when a machine is
    /// suspended. They wake up later than the server.
    pub(crate) suspend: f64,
    /// Longest freeze.
    pub(crate) max_freeze: Duration,
    /// Longest time between the wake-up of a server task and its execution, in milliseconds.
    pub(crate) max_task_delay: u64,
    /// Longest time of one turn of the worker, in which it executes a micro-batch, in milliseconds.
    pub(crate) max_compute: u64,
}

impl FaultPlan {
    /// Chooses the faults of a run.
    pub(crate) fn choose(rng: &mut Rng) -> Self {
        let mut chance = |most: f64| if rng.bool() { rng.f64() * most } else { 0.0 };
        let drop_request = chance(0.1);
        let drop_response = chance(0.1);
        let duplicate = chance(0.1);
        let cut_request = chance(0.05);
        let error_status = chance(0.1);
        let slow_message = chance(0.2);
        let crash_at_write = chance(0.02);
        let write_error = chance(0.05);
        let power_loss = chance(1.0);
        let graceful = chance(0.5);
        let full_disk = chance(0.01);
        let client_death = chance(0.3);
        let freeze = chance(0.3);
        let drop_heartbeat = chance(0.8);
        let clock_set = chance(0.8);
        let full_at_stop = chance(0.5);
        let read_error = chance(0.1);
        let suspend = chance(1.0);
        let lost_flush = chance(0.02);
        // Rare: a damaged file can end a program early.
        let damage = if rng.u32(0..6) == 0 { rng.f64() * 0.5 } else { 0.0 };
        let second_server = if rng.u32(0..6) == 0 { rng.f64() * 0.5 } else { 0.0 };
        let seconds = match rng.u32(0..4) {
            // Long enough for sessions and checkpoints to expire.
            _ if freeze > 0.0 => 2_000..9_000,
            0 => 10..6_000,
            _ => 10..600,
        };
        let duration = Duration::from_secs(rng.u64(seconds));
        let crash_interval = rng.bool().then(|| Duration::from_secs(rng.u64(2..120)));
        Self {
            duration,
            crash_interval,
            max_downtime: Duration::from_secs(rng.u64(1..40)),
            power_loss,
            graceful,
            crash_at_write,
            write_error,
            lost_flush,
            full_disk,
            full_at_stop,
            damage,
            read_error,
            drop_request,
            drop_response,
            duplicate,
            cut_request,
            error_status,
            slow_message,
            max_delay: Duration::from_millis(rng.u64(10..20_000)),
            client_death,
            drop_heartbeat,
            freeze,
            second_server,
            suspend,
            // Not together with power losses: after a boot, the server takes a wall clock that is
            // ahead of the last known time for downtime, and objects would expire.
            clock_set: if power_loss > 0.0 { 0.0 } else { clock_set },
            max_freeze: Duration::from_secs(rng.u64(1..4_000)),
            max_task_delay: if rng.u32(0..5) == 0 { rng.u64(30..3_000) } else { rng.u64(0..30) },
            max_compute: if rng.bool() { rng.u64(0..3_000) } else { 0 },
        }
    }
}
