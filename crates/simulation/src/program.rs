//! Programs: what the simulated clients do, generated from a seed.

use std::time::Duration;

use fastrand::Rng;
use tinkex::{
    AdamParams, Datum, Env, LossFn, RestoreMode, SamplingClient, SamplingParams, SaveOptions,
    ServiceClient, TinkerPath, TrainingClient,
};

use crate::disk::POISON;
use crate::network::SimulatedNetwork;
use crate::oracle::Oracle;
use crate::scenario::BASE_MODEL;
use crate::task;
use crate::trace::{EventTrace, event};

/// Size of the vocabulary of the base model.
const VOCABULARY: u32 = 100;

/// A client program.
pub(crate) struct ClientProgram {
    pub(crate) client: usize,
    rng: Rng,
    trace: EventTrace,
    oracle: Oracle,
    service: ServiceClient,
    models: Vec<TrainingClient>,
    samplers: Vec<SamplingClient>,
    /// Checkpoints with the state of the optimizer.
    saved: Vec<TinkerPath>,
    names: u32,
}

impl ClientProgram {
    pub(crate) fn new(
        client: usize,
        network: SimulatedNetwork,
        seed: u64,
        oracle: Oracle,
        trace: EventTrace,
    ) -> tinkex::Result<Self> {
        let service = ServiceClient::builder()
            .env(Env::empty())
            .base_url("http://127.0.0.1:1")
            .api_key("tml-simulation")
            .http(network)
            .without_telemetry()
            .build()?;
        let rng = Rng::with_seed(seed);
        let (models, samplers, saved) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { client, rng, trace, oracle, service, models, samplers, saved, names: 0 })
    }

    /// Executes a random number of random actions.
    pub(crate) async fn run(mut self) -> tinkex::Result<()> {
        for _ in 0..self.rng.u32(2..12) {
            let action = self.rng.u32(0..16);
            let result = self.act(action).await;
            let client = self.client;
            match &result {
                Ok(done) => event!(self.trace, "client {client}: {done}"),
                Err(error) => event!(self.trace, "client {client}: error: {error:?}"),
            }
            result?;
            if self.rng.u32(0..5) == 0 {
                tokio::time::sleep(Duration::from_secs(self.rng.u64(0..60))).await;
            }
        }
        self.service.finish(&tinkex::Result::Ok(())).await;
        Ok(())
    }

    async fn act(&mut self, action: u32) -> tinkex::Result<String> {
        if self.models.is_empty() || action == 0 {
            return self.create().await;
        }
        let model = self.models[self.rng.usize(0..self.models.len())].clone();
        match action {
            1..=5 => self.train(&model).await,
            6 => {
                let data = self.batch();
                let output = model.forward(data, LossFn::CrossEntropy).await?;
                Ok(format!("forward {:?}", output.metrics.get("loss:sum")))
            }
            7 | 8 => self.save(&model).await,
            9 => {
                self.samplers.push(model.save_weights_and_get_sampling_client().await?);
                Ok("saved for sampling".to_owned())
            }
            10 => self.load(&model).await,
            11 => self.manage().await,
            12 if self.rng.u32(0..6) == 0 => self.poison(&model).await,
            13 if self.rng.u32(0..4) == 0 => {
                let minutes = self.rng.u64(1..60);
                tokio::time::sleep(Duration::from_secs(60 * minutes)).await;
                Ok(format!("waited for {minutes} minutes"))
            }
            _ => self.sample().await,
        }
    }

    async fn create(&mut self) -> tinkex::Result<String> {
        let from = match self.saved.is_empty() || self.rng.bool() {
            true => None,
            false => Some(self.saved[self.rng.usize(0..self.saved.len())].clone()),
        };
        let (seed, mode) = (self.rng.u64(0..1_000), self.restore_mode());
        let model = match from {
            None => {
                let create = self.service.create_lora_training_client(BASE_MODEL);
                create.rank(2).seed(seed).create().await?
            }
            Some(path) => self.service.create_training_client_from(path, mode).create().await?,
        };
        self.models.push(model);
        Ok("created a model".to_owned())
    }

    /// Trains some steps, of which several may be in flight.
    async fn train(&mut self, model: &TrainingClient) -> tinkex::Result<String> {
        let mut losses = String::new();
        let mut pending = Vec::new();
        for _ in 0..self.rng.u32(1..4) {
            let passes = self.rng.u32(1..3);
            for _ in 0..passes {
                pending.push(model.forward_backward(self.batch(), LossFn::CrossEntropy));
            }
            let step = model.optim_step(AdamParams::with_learning_rate(1e-2));
            if self.rng.bool() {
                for pass in std::mem::take(&mut pending) {
                    let loss = pass.await?.metrics.get("loss:sum").map(|loss| loss.as_f64());
                    losses += &format!(" {loss:?}");
                }
            }
            step.await?;
        }
        for pass in pending {
            pass.await?;
        }
        Ok(format!("trained{losses}"))
    }

    async fn save(&mut self, model: &TrainingClient) -> tinkex::Result<String> {
        let reuse = self.rng.bool();
        if !reuse {
            self.names += 1;
        }
        let mut options = SaveOptions::new(format!("c{}", self.names));
        if reuse {
            options = options.overwrite();
        }
        let path = model.save_state(options).await?;
        if !self.saved.contains(&path) {
            self.saved.push(path.clone());
        }
        Ok(format!("saved {}", path.name()))
    }

    /// Creates a model from a checkpoint, while the model that saved it may overwrite it.
    async fn load(&mut self, model: &TrainingClient) -> tinkex::Result<String> {
        if self.saved.is_empty() {
            return self.save(model).await;
        }
        let path = self.saved[self.rng.usize(0..self.saved.len())].clone();
        let mode = self.restore_mode();
        let load = self.service.create_training_client_from(path.clone(), mode);
        let load = task::spawn(async move { load.create().await });
        let owner = self.models.iter().find(|model| model.model_id() == path.run()).cloned();
        if let Some(owner) = owner.filter(|_| self.rng.bool()) {
            tokio::time::sleep(Duration::from_millis(self.rng.u64(0..50))).await;
            self.train(&owner).await?;
            owner.save_state(SaveOptions::new(path.name().to_owned()).overwrite()).await?;
        }
        match load.await {
            Ok(model) => self.models.push(model?),
            Err(error) => self.trace.fail(format!("a load panicked: {error}")),
        }
        Ok(format!("loaded {}", path.name()))
    }

    /// Sends a request that kills every process that executes it. It must fail, and later requests
    /// must be executed.
    async fn poison(&mut self, model: &TrainingClient) -> tinkex::Result<String> {
        self.names += 1;
        let saved = model.save_state(SaveOptions::new(format!("{POISON}{}", self.names))).await;
        match saved {
            Ok(path) => self.trace.fail(format!("poison request {path} succeeded")),
            Err(error) => event!(self.trace, "poison request failed: {error}"),
        }
        Ok("sent a poison request".to_owned())
    }

    /// Changes a checkpoint.
    async fn manage(&mut self) -> tinkex::Result<String> {
        if self.saved.is_empty() {
            return Ok("nothing to manage".to_owned());
        }
        let at = self.rng.usize(0..self.saved.len());
        let path = self.saved[at].clone();
        let rest = self.service.rest();
        Ok(match self.rng.u32(0..5) {
            0 => {
                self.saved.remove(at);
                rest.delete_checkpoint(path).await?;
                "deleted".to_owned()
            }
            1 => {
                rest.publish_checkpoint(path).await?;
                "published".to_owned()
            }
            2 => {
                rest.unpublish_checkpoint(path).await?;
                "unpublished".to_owned()
            }
            3 => {
                rest.set_checkpoint_ttl(path, Some(Duration::from_secs(90_000))).await?;
                "set the time to live".to_owned()
            }
            _ => {
                self.oracle.copy_called();
                rest.copy_weights(tinkex::CopyCheckpoint::new(path).into_project("other")).await?;
                "copied".to_owned()
            }
        })
    }

    /// Samples several completions at once; some of them are cancelled.
    async fn sample(&mut self) -> tinkex::Result<String> {
        if self.samplers.is_empty() {
            self.samplers.push(self.service.create_sampling_client(BASE_MODEL).await?);
        }
        let sampler = self.samplers[self.rng.usize(0..self.samplers.len())].clone();
        let mut pending = Vec::new();
        for _ in 0..self.rng.u32(1..8) {
            let length = self.rng.usize(1..6);
            let prompt = self.tokens(length);
            let tokens = self.rng.u32(1..10);
            let sample = sampler.sample(prompt, SamplingParams::new().max_tokens(tokens));
            if self.rng.u32(0..6) == 0 {
                let wait = Duration::from_millis(self.rng.u64(0..100));
                let _ = tokio::time::timeout(wait, sample).await;
            } else {
                pending.push(task::spawn(async move {
                    Ok::<_, tinkex::Error>(sample.await?.sequences[0].tokens.len())
                }));
            }
        }
        let mut tokens = 0;
        for sample in pending {
            match sample.await {
                Ok(sampled) => tokens += sampled?,
                Err(error) => self.trace.fail(format!("a sample panicked: {error}")),
            }
        }
        Ok(format!("sampled {tokens} tokens"))
    }

    fn restore_mode(&mut self) -> RestoreMode {
        if self.rng.bool() { RestoreMode::WeightsOnly } else { RestoreMode::WithOptimizer }
    }

    fn batch(&mut self) -> Vec<Datum> {
        let length = self.rng.usize(1..4);
        let mut batch = Vec::new();
        for _ in 0..length {
            let (prompt, completion) = (self.rng.usize(1..5), self.rng.usize(1..5));
            let (prompt, completion) = (self.tokens(prompt), self.tokens(completion));
            batch.extend(Datum::completion(prompt, completion));
        }
        batch
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.rng.u32(3..VOCABULARY)).collect()
    }
}
