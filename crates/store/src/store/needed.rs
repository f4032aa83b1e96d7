//! Finds the base models and upstreams that the stored runs and requests need.

use std::collections::BTreeMap;

use tinkex_wire::ModelId;

use super::{ModelRunRecord, SequenceScope, Store};
use crate::weights::{Backend, WeightsLocation};

/// A base model or upstream that must be available.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NeededBackend {
    /// A base model of the engine.
    EngineModel(String),
    /// A base model, on the engine or on any upstream.
    BaseModel(String),
    /// The upstream with this name.
    Upstream(String),
}

/// The runs and requests that need a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// The first of these runs in alphabetical order, so that messages do not change between
    /// starts.
    pub run: Option<ModelId>,
    /// Number of open runs. Counted for upstreams only: a run of the engine waits in its data
    /// folder until its base model is available again.
    pub runs: usize,
    /// Number of unfinished requests.
    pub requests: usize,
}

impl Store {
    /// Returns the backends that the unfinished requests and the open runs on upstreams need.
    pub fn needed_backends(&self) -> BTreeMap<NeededBackend, Need> {
        let mut needed: BTreeMap<NeededBackend, Need> = BTreeMap::new();
        for run in self.runs.values().map(|entry| &entry.row) {
            let session = self.sessions.get(&run.session);
            let is_open = session.is_some_and(|session| session.row.end.is_none());
            if run.upstream.is_some() && run.closed.is_none() && is_open {
                let need = needed.entry(backend_of(run)).or_default();
                need.runs += 1;
                need.add_run(&run.id);
            }
        }
        for entry in self.requests.values().filter(|entry| entry.finished_at().is_none()) {
            let (backend, run) = match &entry.row.scope {
                SequenceScope::Model(id) => match self.runs.get(id) {
                    Some(run) => (backend_of(&run.row), Some(id)),
                    None => continue,
                },
                SequenceScope::Sampler(id) => {
                    let Some(sampler) = self.samplers.get(id) else { continue };
                    let base = sampler.row.base_model.clone();
                    let backend = match &sampler.row.weights {
                        None => NeededBackend::BaseModel(base),
                        Some(WeightsLocation::Local(_)) => NeededBackend::EngineModel(base),
                        Some(WeightsLocation::Upstream(remote)) => {
                            NeededBackend::Upstream(remote.upstream.clone())
                        }
                    };
                    (backend, None)
                }
                SequenceScope::CustomLosses(_) => continue,
            };
            let need = needed.entry(backend).or_default();
            need.requests += 1;
            if let Some(run) = run {
                need.add_run(run);
            }
        }
        needed
    }
}

impl Need {
    fn add_run(&mut self, run: &ModelId) {
        if self.run.as_ref().is_none_or(|first| run.as_str() < first.as_str()) {
            self.run = Some(run.clone());
        }
    }
}

fn backend_of(run: &ModelRunRecord) -> NeededBackend {
    match run.backend() {
        Backend::Engine => NeededBackend::EngineModel(run.base_model.clone()),
        Backend::Upstream(name) => NeededBackend::Upstream(name.to_string()),
    }
}
