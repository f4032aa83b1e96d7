//! [`EventLog`]: records the `tracing` events of the crate.

use std::sync::{Arc, Mutex, Once};

use tokio::time::Instant;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

/// Records events as lines of text.
#[derive(Clone, Default)]
pub(crate) struct EventLog(Arc<Mutex<Vec<(Instant, String)>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!(" {}={value:?}", field.name());
    }
}

impl Subscriber for EventLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("tinkex")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} {}", event.metadata().target(), event.metadata().level()));
        event.record(&mut line);
        self.0.lock().unwrap().push((Instant::now(), line.0));
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl EventLog {
    /// Returns the lines that contain all of `words`.
    pub(crate) fn with(&self, words: &[&str]) -> Vec<String> {
        self.timed(words).into_iter().map(|(_, line)| line).collect()
    }

    /// Returns the lines that contain all of `words`, with their times.
    pub(crate) fn timed(&self, words: &[&str]) -> Vec<(Instant, String)> {
        let lines = self.0.lock().unwrap();
        let all = |line: &&(Instant, String)| words.iter().all(|word| line.1.contains(word));
        lines.iter().filter(all).cloned().collect()
    }
}

/// Global subscriber that records nothing but keeps all callsites enabled.
///
/// Without it, `tracing` may cache a callsite as disabled on all threads just before an
/// [`EventLog`] is installed on any of them.
struct NullSubscriber;

impl Subscriber for NullSubscriber {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        false
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, _: &Event<'_>) {}
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Installs the global subscriber. Call it before the first event of a test.
pub(crate) fn keep_events() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(NullSubscriber).unwrap());
}
