//! From finished work to an answer on disk, and then to those who wait for it.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use tinkex_engine::ErrorKind;
use tinkex_wire::RequestId;

use crate::state::Shared;
use crate::store::{Answer, Done, Fact, Fault, Store, Use, now};

/// What came of a request.
#[derive(Debug)]
pub(crate) struct Settled {
    pub(crate) answer: Answer,
    pub(crate) body: Bytes,
    /// Whether a model was changed.
    pub(crate) changed: bool,
    pub(crate) used: Vec<(Use, u64)>,
    /// What became true by it; written together with the answer.
    pub(crate) facts: Vec<Fact>,
}

impl Settled {
    fn new(answer: Answer, body: Bytes) -> Self {
        Self { answer, body, changed: false, used: Vec::new(), facts: Vec::new() }
    }

    pub(crate) fn json(value: &impl Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(body) => Self::new(Answer::Json, body.into()),
            Err(why) => Self::failed(Fault::Server, why.to_string()),
        }
    }

    pub(crate) fn proto(body: Bytes) -> Self {
        Self::new(Answer::Proto, body)
    }

    pub(crate) fn failed(category: Fault, error: impl Into<String>) -> Self {
        Self::new(Answer::Failed { error: error.into(), category }, Bytes::new())
    }

    pub(crate) fn cancelled() -> Self {
        Self::failed(Fault::User, "cancelled by its client")
    }

    /// The same, having changed a model.
    pub(crate) fn changed(mut self) -> Self {
        self.changed = true;
        self
    }

    /// The same, with something that became true by it.
    pub(crate) fn fact(mut self, fact: Fact) -> Self {
        self.facts.push(fact);
        self
    }

    /// The same, or a failure if its body is longer than `most`. What was done stays done.
    fn within(self, most: usize) -> Self {
        let size = self.body.len();
        if size <= most {
            return self;
        }
        let error = format!("the answer has {size} bytes, more than {most}; ask for less at once");
        let answer = Answer::Failed { error, category: Fault::User };
        Self { answer, body: Bytes::new(), ..self }
    }

    /// The same, having used something.
    pub(crate) fn used(mut self, used: Vec<(Use, u64)>) -> Self {
        self.used = used;
        self
    }
}

impl From<tinkex_engine::Error> for Settled {
    fn from(error: tinkex_engine::Error) -> Self {
        let category = match error.kind() {
            ErrorKind::Input | ErrorKind::Numeric => Fault::User,
            _ => Fault::Server,
        };
        let source = std::error::Error::source(&error).map(|why| format!(": {why}"));
        let text = match &error {
            // The datum's message has its source in it already.
            tinkex_engine::Error::Io { .. } => format!("{error}{}", source.unwrap_or_default()),
            _ => error.to_string(),
        };
        Self::failed(category, text)
    }
}

/// Bytes of an answer. A payload may be twice as long.
const LONGEST: usize = 512 << 20;

/// Answers a request: written down first, shown then.
pub(crate) fn settle(shared: &Arc<Shared>, store: &mut Store, id: &RequestId, settled: Settled) {
    let Settled { answer, body, changed, used, facts } = settled.within(LONGEST);
    shared.metrics.jobs.add(1);
    if matches!(answer, Answer::Failed { .. }) {
        shared.metrics.failed_jobs.add(1);
    }
    let Some(request) = store.requests.get(id).map(|entry| Arc::clone(&entry.row)) else { return };
    let (number, size, at) = (store.disk.number(), body.len(), now());
    let done = Done { request, number, size, answer: answer.clone(), changed, at, used };
    let (shared, id, shown) = (Arc::clone(shared), id.clone(), body.clone());
    let then = Box::new(move |written: std::io::Result<()>| {
        if let Err(why) = written {
            // The server ends; the request is carried out again after the next start.
            crate::log::warn(format_args!("the answer to {id} is not on disk: {why}"));
        }
        shared.store().show(&id, answer, shown, number);
    });
    store.settle(done, facts, body, then);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_is_too_long_fails_and_what_was_done_stays_done() {
        let answer = || Settled::proto(Bytes::from_static(b"12345")).changed();
        assert_eq!(answer().within(5).body, "12345");
        let failed = answer().within(4);
        assert!(matches!(&failed.answer, Answer::Failed { category: Fault::User, .. }));
        assert!(failed.body.is_empty() && failed.changed);
    }
}
