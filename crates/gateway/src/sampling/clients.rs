//! [`SamplerPool`]: the clients that sample from weights on an upstream. The pool keeps one client
//! for each set of weights that was sampled from recently.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tinkex::{SampleResponse, SamplingClient};
use tinkex_session::SessionSampler as _;
use tinkex_store::history::logged_folder;
use tinkex_store::record::FailureCategory;
use tinkex_wire::SampleRequest;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::Upstream;
use crate::fault::Fault;
use crate::remote_model::ModelHandle;
use crate::upstream_session::UpstreamSession;

/// Number of models for sampling that are kept on a legacy upstream, which has few slots for
/// models. The pool exceeds this number only while requests sample from more models at the same
/// time.
const MAX_SAMPLING_MODELS: usize = 4;
/// Number of sampling clients of checkpoints that are kept for an upstream with the current
/// protocol. Each client has its own session.
const MAX_SAMPLING_CLIENTS: usize = 64;

/// Base model, and path of the weights on the upstream. The path is `None` for the base model.
pub(crate) type SamplerKey = (String, Option<String>);

/// Sampling clients of an upstream.
#[derive(Default)]
pub(crate) struct SamplerPool(Mutex<HashMap<SamplerKey, CachedSampler>>);

struct CachedSampler {
    /// Name under which the samples are logged, once it is known.
    logged_name: Option<String>,
    /// The sampler. It has other owners while it is in use, which prevents its eviction.
    sampler: Arc<OnceCell<WeightsSampler>>,
    last_used: Instant,
}

/// A client that samples from fixed weights.
pub(crate) struct WeightsSampler {
    client: SamplingClient,
    /// Path on the upstream of the weights that the client samples from; `None` for a base model.
    pub(crate) path: Option<String>,
    session: UpstreamSession,
    /// The model that holds the weights on a legacy upstream; `None` on other upstreams and for a
    /// base model.
    model: Option<ModelHandle>,
    /// When the last successful check of the session began.
    checked: tokio::sync::Mutex<Option<Instant>>,
}

impl WeightsSampler {
    fn new(
        client: SamplingClient,
        session: UpstreamSession,
        path: Option<String>,
        model: Option<ModelHandle>,
    ) -> Self {
        Self { client, path, session, model, checked: Default::default() }
    }

    /// Sends a sampling request to the upstream, and checks that the response belongs to it.
    pub(super) async fn draw(&self, request: SampleRequest) -> Result<SampleResponse, Fault> {
        let response = self.client.relay(request).await.map_err(Fault::from);
        if matches!(response, Ok(_) | Err(Fault::Failed(..))) {
            self.check_session().await?;
        }
        response
    }

    /// Checks that a response belongs to a request of this session; see
    /// [`confirm`](crate::remote_model::confirm). Samples that end at the same time share a check.
    async fn check_session(&self) -> Result<(), Fault> {
        if self.session.has_current_protocol() {
            return Ok(());
        }
        let received = Instant::now();
        let mut checked = self.checked.lock().await;
        if checked.is_none_or(|start| start < received) {
            let start = Instant::now();
            self.session.check().await?;
            *checked = Some(start);
        }
        Ok(())
    }
}

impl SamplerPool {
    fn lock(&self) -> MutexGuard<'_, HashMap<SamplerKey, CachedSampler>> {
        self.0.lock()
    }

    /// Removes a client whose weights the upstream has lost, unless another sample has already
    /// replaced the client.
    pub(super) fn forget(&self, key: &SamplerKey, lost: &Arc<OnceCell<WeightsSampler>>) {
        let mut clients = self.lock();
        if clients.get(key).is_some_and(|cached| Arc::ptr_eq(&cached.sampler, lost)) {
            clients.remove(key);
        }
    }
}

impl Upstream {
    /// Returns the client for weights, creating it on first use. The client is not evicted while
    /// the caller holds it.
    pub(crate) async fn sampler(
        &self,
        key: &SamplerKey,
    ) -> Result<Arc<OnceCell<WeightsSampler>>, Fault> {
        let cell = {
            let mut clients = self.samplers.lock();
            let cached = clients.entry(key.clone()).or_insert_with(|| CachedSampler {
                logged_name: None,
                sampler: Arc::default(),
                last_used: Instant::now(),
            });
            cached.last_used = Instant::now();
            Arc::clone(&cached.sampler)
        };
        // Evict first, so that the new model finds a free slot.
        self.evict_samplers(key).await;
        cell.get_or_try_init(|| self.create_sampler(key)).await?;
        Ok(cell)
    }

    async fn create_sampler(&self, (base, path): &SamplerKey) -> Result<WeightsSampler, Fault> {
        self.require_reached()?;
        match path {
            Some(path) if self.is_legacy() => self.create_sampling_model(base, path).await,
            _ => {
                let session = UpstreamSession::open(&self.service).await?;
                let client = session.sampling_client(base, path.as_deref()).await?;
                Ok(WeightsSampler::new(client, session, path.clone(), None))
            }
        }
    }

    /// Creates a model for sampling from a training checkpoint. A legacy server would sample from
    /// the checkpoint with the model that saved it: sampling would change a model in training, and
    /// would require that model to be in memory.
    async fn create_sampling_model(&self, base: &str, path: &str) -> Result<WeightsSampler, Fault> {
        let origin = self.context.store.lock().origin_of_weights(&self.weights_at(path.to_owned()));
        let (_, lora) = origin.ok_or_else(|| {
            let message = format!("no checkpoint of this server has the weights {path}");
            Fault::Failed(FailureCategory::User, message)
        })?;
        let mut model = ModelHandle::create_for_sampling(self, base, &lora).await?;
        let sampled = async {
            model.load(path, false).await?;
            let name = format!("tinkex-{}", &self.context.random.id()[..12]);
            let path = model.save_for_sampler(name).await?;
            let client = model.session.sampling_client(base, Some(&path)).await?;
            Ok::<_, Fault>((client, path))
        };
        match sampled.await {
            Ok((client, path)) => {
                Ok(WeightsSampler::new(client, model.session.clone(), Some(path), Some(model)))
            }
            Err(fault) => {
                model.unload(self).await;
                Err(fault)
            }
        }
    }

    /// Returns the name under which samples from weights are logged; `None` for a base model.
    pub(super) fn logged_name(&self, key: &SamplerKey) -> Option<String> {
        let path = key.1.as_deref()?;
        let cached = self.samplers.lock().get(key).and_then(|cached| cached.logged_name.clone());
        if cached.is_some() {
            return cached;
        }
        let weights = self.weights_at(path.to_owned());
        let origin = self.context.store.lock().origin_of_weights(&weights);
        let name = logged_folder(origin.as_ref().map(|(run, _)| run), &weights);
        if let Some(cached) = self.samplers.lock().get_mut(key) {
            cached.logged_name = Some(name.clone());
        }
        Some(name)
    }

    /// Removes the least recently used idle clients of checkpoints, with their models and sessions
    /// on the upstream, if there are too many clients. Keeps the client of `key`.
    async fn evict_samplers(&self, key: &SamplerKey) {
        let limit = if self.is_legacy() { MAX_SAMPLING_MODELS } else { MAX_SAMPLING_CLIENTS };
        let evicted: Vec<Arc<OnceCell<WeightsSampler>>> = {
            let mut clients = self.samplers.lock();
            let is_other = |other: &SamplerKey| other.1.is_some() && other != key;
            let others = clients.keys().filter(|other| is_other(other)).count();
            let mut idle: Vec<(Instant, SamplerKey)> = clients
                .iter()
                .filter(|(other, cached)| {
                    is_other(other) && Arc::strong_count(&cached.sampler) == 1
                })
                .map(|(other, cached)| (cached.last_used, other.clone()))
                .collect();
            idle.sort();
            let oldest = idle.into_iter().take((others + 1).saturating_sub(limit));
            oldest.filter_map(|(_, key)| Some(clients.remove(&key)?.sampler)).collect()
        };
        for cell in evicted {
            let Some(sampler) = Arc::into_inner(cell).and_then(OnceCell::into_inner) else {
                continue;
            };
            match sampler.model {
                Some(model) => model.unload(self).await,
                None => sampler.session.finish().await,
            }
        }
    }
}
