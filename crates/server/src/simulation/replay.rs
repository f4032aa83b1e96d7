//! [`Replay`]: executes the requests of models one after the other, without queue, worker and disk.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use tinkex_backend::outcome::Outcome;
use tinkex_engine::{Engine, EngineOptions, Trainer};
use tinkex_store::store::ModelRunRecord;
use tinkex_wire::codec::json;
use tinkex_wire::{
    ForwardBackward, LoadWeights, OptimStep, OptimStepOutput, SampleRequest, SampleResponse,
};

use super::{LossView, RequestHandler, RunView};
use crate::admit::{engine_sample, stop_conditions};
use crate::operation::{PassObjective, TrainingPass, step_params};
use crate::worker::{lora_config, optimizer_kind, sample_response};

/// Models that are trained request by request, to compare with the results of a server.
pub struct Replay {
    handler: RequestHandler,
    engine: Engine,
    trainers: BTreeMap<String, Trainer>,
    /// Records of the runs, also of the runs that were deleted.
    runs: BTreeMap<String, RunView>,
    /// Custom losses, also of the sessions that have ended.
    losses: BTreeMap<String, LossView>,
    /// Name of the base model.
    base_model: String,
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replay").finish_non_exhaustive()
    }
}

impl Replay {
    /// Loads the base model `name` in `folder`, to execute the requests of `runs`, which may use
    /// `losses`.
    ///
    /// # Errors
    /// If the base model cannot be loaded.
    pub fn new(
        handler: RequestHandler,
        runs: BTreeMap<String, RunView>,
        losses: BTreeMap<String, LossView>,
        name: &str,
        folder: &Path,
    ) -> tinkex_engine::Result<Self> {
        let options =
            EngineOptions { threads: 1, name: Some(name.to_owned()), ..EngineOptions::default() };
        let engine = Engine::open(folder, options)?;
        let base_model = name.to_owned();
        Ok(Self { handler, engine, trainers: BTreeMap::new(), runs, losses, base_model })
    }

    /// Executes a successful request of a model. Returns the expected result; `None` if the result
    /// does not depend on weights.
    ///
    /// # Errors
    /// If the request cannot be executed.
    pub fn execute(
        &mut self,
        model: &str,
        kind: &str,
        body: &Bytes,
    ) -> Result<Option<Bytes>, String> {
        let run = self.run(model)?;
        if kind == "CreateModel" {
            let created = self.engine.create_trainer(lora_config(&run.lora), optimizer_kind(&run));
            let trainer = created.map_err(|error| error.to_string())?;
            self.trainers.insert(model.to_owned(), trainer);
            return Ok(None);
        }
        let trainer = self.trainers.get_mut(model).ok_or("the model was not created")?;
        match kind {
            "ForwardBackward" => {
                let request = ForwardBackward::from_proto(body).map_err(|e| e.to_string())?;
                let state = &self.handler.0;
                let objective = {
                    // The server has dropped the losses of the sessions that have ended.
                    let mut store = state.store();
                    let kept = store.losses.clone();
                    let losses = self.losses.values();
                    store.losses.extend(losses.map(|loss| (loss.0.clone(), Arc::clone(&loss.1))));
                    let objective = PassObjective::resolve(&store, &run, &request);
                    store.losses = kept;
                    objective
                };
                let pass = objective
                    .and_then(|loss| TrainingPass::new(&state.models, &run, loss, &request))
                    .map_err(|error| error.to_string())?;
                let output = pass.data.run(trainer, pass.mode, &|| false);
                let output = output.map_err(|e| e.to_string())?.ok_or("interrupted")?;
                Ok(Some(pass.data.to_wire_output(output).to_proto()))
            }
            "OptimStep" => {
                let request: OptimStep = json::decode(body).map_err(|e| e.to_string())?;
                let params = step_params(&request.params).map_err(|e| e.to_string())?;
                let report = trainer.optim_step(&params).map_err(|e| e.to_string())?;
                let metrics = [("unclipped_grad_l2:mean".to_owned(), report.grad_norm)];
                let output = OptimStepOutput::new(metrics.into_iter().collect());
                Ok(Some(Outcome::json(&output).payload))
            }
            "DiscardGradient" => {
                trainer.discard_gradient();
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Saves a model to `folder`, with the state of its optimizer and its gradients.
    ///
    /// # Errors
    /// If the model does not exist or cannot be saved.
    pub fn save(&self, model: &str, folder: &Path) -> Result<(), String> {
        let trainer = self.trainers.get(model).ok_or("the model was not created")?;
        trainer.save_with_gradients(folder).map_err(|error| error.to_string())
    }

    /// Replaces a model by the model that [`save`](Self::save) wrote to `folder`. `body` is the
    /// body of the request that loads the model.
    ///
    /// # Errors
    /// If the folder cannot be loaded.
    pub fn load(&mut self, model: &str, body: &Bytes, folder: &Path) -> Result<(), String> {
        let run = self.run(model)?;
        let request: LoadWeights = json::decode(body).map_err(|error| error.to_string())?;
        let kind = optimizer_kind(&run);
        let trainer = if request.optimizer {
            self.engine.resume_trainer(folder, kind)
        } else {
            self.engine.load_trainer(folder, kind)
        };
        let trainer = trainer.map_err(|error| error.to_string())?;
        self.trainers.insert(model.to_owned(), trainer);
        Ok(())
    }

    /// Draws the samples of a request alone, from the weights that [`save`](Self::save) wrote to
    /// `folder`, or from the base model.
    ///
    /// # Errors
    /// If the request cannot be executed.
    pub fn sample(
        &self,
        body: &Bytes,
        seed: u64,
        folder: Option<&Path>,
    ) -> Result<SampleResponse, String> {
        let request: SampleRequest = json::decode(body).map_err(|error| error.to_string())?;
        let admission = &self.handler.0.admission;
        let base = admission.base_model(&self.base_model).map_err(|error| error.to_string())?;
        let stop = stop_conditions(&base, request.sampling_params.stop.clone());
        let sample = stop.and_then(|stop| engine_sample(admission, &base, &request, stop, seed));
        let sample = sample.map_err(|error| error.to_string())?;
        let weights = match folder {
            Some(folder) => self.engine.load_weights(folder).map_err(|error| error.to_string())?,
            None => self.engine.base_weights(),
        };
        let mut sampler = self.engine.sampler().map_err(|error| error.to_string())?;
        sampler.add(&weights, sample.request).map_err(|error| error.to_string())?;
        while !sampler.is_idle() {
            if let Some((_, output)) = sampler.step().into_iter().next() {
                let output = output.map_err(|error| error.to_string())?;
                return Ok(sample_response(output, request.target_prompt_logprobs.as_ref()));
            }
        }
        Err("the sampler returned no output".to_owned())
    }

    fn run(&self, model: &str) -> Result<ModelRunRecord, String> {
        let run = self.runs.get(model).map(|run| run.0.clone());
        run.ok_or_else(|| format!("model {model} has no record"))
    }
}
