//! [`EventTrace`]: the events of a run, with their simulated times.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

/// Records events. Cheap to clone.
#[derive(Clone)]
pub(crate) struct EventTrace(Arc<Mutex<TraceState>>);

struct TraceState {
    /// Folder of the run. Its name is random, so events contain `FOLDER` in its place.
    folder: String,
    start: Instant,
    hash: u64,
    /// Events as text, if they are kept.
    lines: Option<Vec<String>>,
    /// First violation.
    failure: Option<String>,
    counts: BTreeMap<&'static str, u64>,
}

impl EventTrace {
    /// Starts a trace. The trace keeps a hash of its events, and also the events if `keep_lines` is
    /// true. The events contain `FOLDER` in place of the path `folder`, whose name is random.
    pub(crate) fn new(keep_lines: bool, folder: &Path) -> Self {
        Self(Arc::new(Mutex::new(TraceState {
            folder: folder.display().to_string(),
            start: Instant::now(),
            hash: 0xcbf2_9ce4_8422_2325,
            lines: keep_lines.then(Vec::new),
            failure: None,
            counts: BTreeMap::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, TraceState> {
        self.0.lock()
    }

    /// Records an event.
    pub(crate) fn event(&self, event: fmt::Arguments<'_>) {
        let mut state = self.lock();
        let line = format!("{:>12.3} {event}", state.start.elapsed().as_secs_f64());
        let line = line.replace(&state.folder, "FOLDER");
        for byte in line.bytes() {
            state.hash = (state.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if let Some(lines) = &mut state.lines {
            lines.push(line);
        }
    }

    /// Adds one to the count of the faults with this name.
    pub(crate) fn count(&self, name: &'static str) {
        *self.lock().counts.entry(name).or_default() += 1;
    }

    /// Records that an oracle found a violation. Only the first violation is reported.
    pub(crate) fn fail(&self, failure: String) {
        self.event(format_args!("FAILURE {failure}"));
        self.lock().failure.get_or_insert(failure);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.lock().failure.is_some()
    }

    /// Returns what was recorded, and removes it from the trace.
    pub(crate) fn finish(&self) -> TraceSummary {
        let mut state = self.lock();
        TraceSummary {
            hash: state.hash,
            lines: state.lines.take().unwrap_or_default(),
            failure: state.failure.take(),
            simulated_seconds: state.start.elapsed().as_secs_f64(),
            counts: std::mem::take(&mut state.counts),
        }
    }
}

/// What a trace has recorded.
pub(crate) struct TraceSummary {
    pub(crate) hash: u64,
    pub(crate) lines: Vec<String>,
    pub(crate) failure: Option<String>,
    pub(crate) simulated_seconds: f64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

/// Records an event with the syntax of `format!`.
macro_rules! event {
    ($trace:expr, $($argument:tt)*) => { $trace.event(format_args!($($argument)*)) };
}
pub(crate) use event;
