//! [`ClientProgram`]: the actions of a simulated client, generated from a seed.

use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::Request;
use serde_json::{Value, json};
use tinkex::loss::CustomLoss;
use tinkex::{
    AdamParams, Datum, Env, HttpService as _, Lane, LoraOptions, LossFn, RestoreMode,
    SampleOptions, SamplingClient, SamplingParams, SaveOptions, ServiceClient, TrainingClient,
};
use tokio::time::Instant;

use crate::checkpoints::{ClientCheckpoint, is_missing};
use crate::disk::POISON;
use crate::network::SimulatedNetwork;
use crate::oracle::Oracle;
use crate::scenario::BASE_MODEL;
use crate::task;
use crate::trace::{EventTrace, event};

/// Size of the vocabulary of the base model.
const VOCABULARY: u32 = 100;

/// Base URL of the server.
const SERVER: &str = "http://127.0.0.1:1";

/// A client program.
pub(crate) struct ClientProgram {
    pub(crate) client: usize,
    rng: Rng,
    trace: EventTrace,
    oracle: Oracle,
    network: SimulatedNetwork,
    service: ServiceClient,
    models: Vec<TrainingClient>,
    samplers: Vec<SamplingClient>,
    /// Checkpoints with the state of the optimizer.
    saved: Vec<ClientCheckpoint>,
    names: u32,
    /// Whether the server is a gateway. A save through a gateway is not a file operation, so it
    /// cannot be a poison request.
    through_gateway: bool,
}

impl ClientProgram {
    pub(crate) fn new(
        client: usize,
        network: SimulatedNetwork,
        seed: u64,
        through_gateway: bool,
        oracle: Oracle,
        trace: EventTrace,
    ) -> tinkex::Result<Self> {
        let service = connect(&network)?;
        let rng = Rng::with_seed(seed);
        let models = Vec::new();
        let samplers = Vec::new();
        let saved = Vec::new();
        Ok(Self {
            client,
            rng,
            trace,
            oracle,
            network,
            service,
            models,
            samplers,
            saved,
            names: 0,
            through_gateway,
        })
    }

    /// Executes a random number of random actions.
    pub(crate) async fn run(mut self) -> tinkex::Result<()> {
        for _ in 0..self.rng.u32(2..12) {
            let action = self.rng.u32(0..20);
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
        self.service.finish().await;
        self.delete_run().await
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
                if self.samplers.len() > 3 {
                    let at = self.rng.usize(0..self.samplers.len());
                    self.samplers.swap_remove(at).close().await?;
                }
                Ok("saved for sampling".to_owned())
            }
            10 | 14 => self.load(&model).await,
            11 => self.manage().await,
            12 if self.rng.u32(0..6) == 0 && !self.through_gateway => self.poison(&model).await,
            13 => match self.rng.u32(0..8) {
                0 => Ok(self.wait().await),
                1 => self.use_near_expiry(&model).await,
                _ => self.sample().await,
            },
            // The scripted upstream has neither custom losses nor inference endpoints.
            16 if !self.through_gateway => self.train_custom(&model).await,
            17 if !self.through_gateway => self.complete().await,
            18 => self.look_at_dashboard().await,
            _ => self.sample().await,
        }
    }

    /// Trains a step with a custom loss, which the server computes.
    async fn train_custom(&mut self, model: &TrainingClient) -> tinkex::Result<String> {
        let factor = f64::from(self.rng.u32(1..4));
        let loss =
            CustomLoss::trace("scaled", |trace| -(trace.input("logprobs", 1) * factor).sum())?;
        let loss = self.service.create_custom_loss(&loss).await?;
        let pass = model.forward_backward(self.batch(), &loss);
        model.optim_step(AdamParams::with_learning_rate(1e-2)).await?;
        Ok(format!("trained with a custom loss {:?}", pass.await?.metrics.get("loss:sum")))
    }

    /// Completes a prompt with the base model. Equal requests must give equal tokens.
    async fn complete(&mut self) -> tinkex::Result<String> {
        let length = self.rng.usize(1..4);
        // Few different tokens, so that some requests are equal.
        let prompt: Vec<u32> = (0..length).map(|_| self.rng.u32(3..6)).collect();
        let request = json!({
            "model": BASE_MODEL, "prompt": prompt, "max_tokens": self.rng.u32(1..8),
            "temperature": 0, "return_token_ids": true, "ignore_eos": true,
        });
        let request = request.to_string();
        let sent = self.send("POST", "/v1/completions", request.clone()).await;
        Ok(match sent {
            Some(completion) => {
                self.oracle.completed(&request, &completion["choices"][0]["token_ids"]);
                "completed a prompt".to_owned()
            }
            None => "could not complete a prompt".to_owned(),
        })
    }

    /// Reads a document of the dashboard.
    async fn look_at_dashboard(&mut self) -> tinkex::Result<String> {
        let documents = ["info", "runs", "samples", "server"];
        let name = documents[self.rng.usize(0..documents.len())];
        let sent = self.send("GET", &format!("/ui/api/{name}"), String::new()).await;
        Ok(format!("dashboard {name}: {}", sent.is_some()))
    }

    /// Sends a request that is not retried. Returns `None` if a fault explains that it has failed.
    async fn send(&self, method: &str, path: &str, body: String) -> Option<Value> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{SERVER}{path}"))
            .header("host", "127.0.0.1:1")
            .body(Bytes::from(body));
        let request = match request {
            Ok(request) => request,
            Err(error) => {
                self.trace.fail(format!("cannot build a request: {error}"));
                return None;
            }
        };
        let sent = self.network.send(Lane::Train, request, Duration::from_secs(600)).await;
        // The messages of all failures of the network are marked as simulated.
        let response = sent.ok()?;
        let body = response.body();
        match response.status().as_u16() {
            200 => serde_json::from_slice(body).ok(),
            // The server is busy, starts, or cannot write.
            429 | 503 => None,
            _ if body.windows(9).any(|part| part == b"simulated") => None,
            status => {
                let text = String::from_utf8_lossy(body);
                self.trace.fail(format!("{path}: status {status}: {text}"));
                None
            }
        }
    }

    /// Deletes a run of the session that has just ended, in some programs. The run must be missing
    /// afterwards.
    async fn delete_run(mut self) -> tinkex::Result<()> {
        if self.models.is_empty() || self.rng.u32(0..4) > 0 {
            return Ok(());
        }
        let run = self.models[self.rng.usize(0..self.models.len())].model_id().clone();
        let service = connect(&self.network)?;
        let rest = service.rest();
        let deleted = rest.delete_training_run(run.clone()).await;
        match &deleted {
            // The first attempt was executed, although its response was lost. Or the request to
            // finish the session has not arrived, and the session is still open.
            Err(error) if is_missing(error) || error.kind() == tinkex::ErrorKind::Conflict => {}
            _ => {
                deleted?;
                self.trace.count("deleted run");
                if rest
                    .list_checkpoints(run.clone())
                    .await
                    .is_ok_and(|page| !page.checkpoints.is_empty())
                {
                    self.trace.fail(format!("deleted run {run} still has checkpoints"));
                }
            }
        }
        service.finish().await;
        Ok(())
    }

    async fn create(&mut self) -> tinkex::Result<String> {
        let from = if self.rng.bool() { self.choose_saved() } else { None };
        if let Some(saved) = from {
            return self.restore(&saved).await;
        }
        let seed = self.rng.u64(0..1_000);
        let options = LoraOptions::new(BASE_MODEL).rank(2).seed(seed);
        self.models.push(self.service.create_lora_training_client(options).await?);
        Ok("created a model".to_owned())
    }

    /// Creates a model from a checkpoint, which may have expired.
    async fn restore(&mut self, saved: &ClientCheckpoint) -> tinkex::Result<String> {
        let called = Instant::now();
        let mode = self.restore_mode();
        let created = self.service.create_training_client_from(saved.path.clone(), mode).await;
        Ok(match self.check_result(saved, called, created)? {
            Some(model) => {
                self.models.push(model);
                "restored a model".to_owned()
            }
            None => "found a checkpoint expired".to_owned(),
        })
    }

    /// Waits for up to an hour.
    async fn wait(&mut self) -> String {
        let minutes = self.rng.u64(1..60);
        tokio::time::sleep(Duration::from_secs(60 * minutes)).await;
        format!("waited for {minutes} minutes")
    }

    /// Saves a checkpoint, waits until about the time at which it expires, and uses it.
    async fn use_near_expiry(&mut self, model: &TrainingClient) -> tinkex::Result<String> {
        let saved = self.save_with_ttl(model, Some(Duration::from_secs(3_600))).await?;
        let wait = Duration::from_secs(3_480 + self.rng.u64(0..240));
        tokio::time::sleep(wait).await;
        self.restore(&saved).await
    }

    /// Trains some steps. Several steps may be in flight at the same time.
    async fn train(&mut self, model: &TrainingClient) -> tinkex::Result<String> {
        let mut losses = String::new();
        let mut pending = Vec::new();
        for _ in 0..self.rng.u32(1..4) {
            // An upstream cannot discard a gradient.
            if !self.through_gateway && self.rng.u32(0..6) == 0 {
                pending.push(model.forward_backward(self.batch(), LossFn::CrossEntropy));
                model.discard_gradient().await?;
            }
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
        let has_ttl = self.rng.u32(0..4) == 0;
        let ttl = has_ttl.then(|| Duration::from_secs(self.rng.u64(3_600..4_200)));
        let saved = self.save_with_ttl(model, ttl).await?;
        Ok(format!("saved {}", saved.path.name()))
    }

    async fn save_with_ttl(
        &mut self,
        model: &TrainingClient,
        ttl: Option<Duration>,
    ) -> tinkex::Result<ClientCheckpoint> {
        let reuse = self.rng.bool();
        if !reuse {
            self.names += 1;
        }
        let mut options = SaveOptions::new(format!("c{}", self.names));
        if reuse {
            options = options.overwrite();
        }
        if let Some(ttl) = ttl {
            options = options.ttl(ttl);
        }
        let called = Instant::now();
        let path = model.save_state(options).await?;
        let saved = ClientCheckpoint::new(path, called, ttl);
        self.saved.retain(|other| other.path != saved.path);
        self.saved.push(saved.clone());
        Ok(saved)
    }

    /// Creates a model from a checkpoint, which may be overwritten or deleted before the server
    /// loads it.
    async fn load(&mut self, model: &TrainingClient) -> tinkex::Result<String> {
        let Some(saved) = self.choose_saved() else { return self.save(model).await };
        let path = saved.path.clone();
        let mode = self.restore_mode();
        let called = Instant::now();
        let load = self.service.create_training_client_from(path.clone(), mode);
        let owner = self.models.iter().find(|model| model.model_id() == path.run()).cloned();
        let interference = self.rng.u32(0..4);
        if interference < 2 {
            tokio::time::sleep(Duration::from_millis(self.rng.u64(0..50))).await;
        }
        match (interference, owner) {
            (0, _) => {
                self.retire(&saved);
                let deleted = self.service.rest().delete_checkpoint(path.clone()).await;
                if !deleted.as_ref().is_err_and(|error| saved.is_expired(error)) {
                    deleted?;
                }
            }
            (1, Some(owner)) if saved.expires().is_none() => {
                self.train(&owner).await?;
                let called = Instant::now();
                let options = SaveOptions::new(path.name().to_owned()).overwrite();
                owner.save_state(options).await?;
                self.saved.retain(|other| other.path != path);
                self.saved.push(ClientCheckpoint::new(path.clone(), called, None));
            }
            _ => {}
        }
        match load.await {
            Err(error) if interference == 0 && is_missing(&error) => {}
            Ok(model) if interference == 1 => self.models.push(model),
            loaded => {
                let loaded = self.check_result(&saved, called, loaded)?;
                self.models.extend(loaded);
            }
        }
        Ok(format!("loaded {}", path.name()))
    }

    fn choose_saved(&mut self) -> Option<ClientCheckpoint> {
        let at = self.rng.usize(0..self.saved.len().max(1));
        self.saved.get(at).cloned()
    }

    /// Removes a checkpoint from the program's list. The program does not use the name again: a
    /// duplicate of a request that deletes the checkpoint or sets its time to live may arrive
    /// later, and would change a new checkpoint of this name.
    fn retire(&mut self, saved: &ClientCheckpoint) {
        self.saved.retain(|other| other.path != saved.path);
        self.names += 1;
    }

    /// Checks the result of a call that used a checkpoint and started at `called`. Returns `None`
    /// if the checkpoint has expired.
    fn check_result<T>(
        &mut self,
        saved: &ClientCheckpoint,
        called: Instant,
        result: tinkex::Result<T>,
    ) -> tinkex::Result<Option<T>> {
        match result {
            Err(error) if saved.is_expired(&error) => {
                self.trace.count("checkpoint found expired");
                self.saved.retain(|other| other.path != saved.path);
                Ok(None)
            }
            Ok(_) if saved.must_be_missing(called) => {
                self.trace.fail(format!("{} was used after it had expired", saved.path));
                Ok(None)
            }
            result => result.map(Some),
        }
    }

    /// Sends a request that kills every process that executes it. The request must fail, and the
    /// server must execute later requests.
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
        let Some(saved) = self.choose_saved() else { return Ok("nothing to manage".to_owned()) };
        let path = saved.path.clone();
        let rest = self.service.rest();
        let called = Instant::now();
        let (action, result) = match self.rng.u32(0..5) {
            0 => {
                self.retire(&saved);
                let deleted = rest.delete_checkpoint(path).await;
                // An expired checkpoint can be deleted until its files are removed.
                if !deleted.as_ref().is_err_and(|error| saved.is_expired(error)) {
                    deleted?;
                }
                return Ok("deleted".to_owned());
            }
            1 => ("published", rest.publish_checkpoint(path).await),
            2 => ("unpublished", rest.unpublish_checkpoint(path).await),
            3 if saved.expires().is_none() => {
                let ttl = Duration::from_secs(self.rng.u64(3_600..4_200));
                let set = rest.set_checkpoint_ttl(path.clone(), Some(ttl)).await;
                self.retire(&saved);
                if set.is_ok() {
                    self.saved.push(ClientCheckpoint::new(path, called, Some(ttl)));
                }
                ("set the time to live", set)
            }
            _ => {
                self.oracle.copy_called();
                let copy = tinkex::CopyCheckpoint::new(path).into_project("other");
                ("copied", rest.copy_weights(copy).await.map(drop))
            }
        };
        self.check_result(&saved, called, result)?;
        Ok(action.to_owned())
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
            let mut params = SamplingParams::new().max_tokens(tokens);
            if self.rng.bool() {
                params = params.seed(self.rng.u64(0..4));
            }
            let mut options = SampleOptions::new(params);
            // The scripted upstream returns one sample.
            if !self.through_gateway {
                options = options.num_samples(self.rng.u32(1..3));
            }
            let sample = sampler.sample(prompt, options);
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
        // The passes of long batches are killed between their micro-batches.
        let length = if self.rng.u32(0..4) == 0 { 4..20 } else { 1..4 };
        let length = self.rng.usize(length);
        let mut batch = Vec::new();
        for _ in 0..length {
            let prompt = self.rng.usize(1..5);
            let completion = self.rng.usize(1..5);
            let prompt = self.tokens(prompt);
            let completion = self.tokens(completion);
            batch.extend(Datum::completion(prompt, completion));
        }
        batch
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.rng.u32(3..VOCABULARY)).collect()
    }
}

/// Creates a client of the server.
fn connect(network: &SimulatedNetwork) -> tinkex::Result<ServiceClient> {
    ServiceClient::builder()
        .env(Env::empty())
        .base_url(SERVER)
        .api_key("tml-simulation")
        .http(network.clone())
        .without_telemetry()
        .build()
}
