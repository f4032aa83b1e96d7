//! Requests that are executed one at a time: creation, loads, saves and custom losses.

use std::sync::Arc;

use tinkex::CustomLossPass;
use tinkex::loss::CustomLoss;
use tinkex_autodiff::LossProgram;
use tinkex_wire::{
    CheckpointKind, ForwardBackward, ForwardBackwardOutput, ModelCreated, PassMode, RequestId,
    SamplerId, SamplerWeightsSaved, TinkerPath, WeightsLoaded,
};

use super::outcome::pass_outcome;
use super::{PendingRequest, RunTask};
use crate::backend::RemoteWeights;
use crate::model_outcome::{
    already_saved, checkpoint_record, close_run, open_run, saved_outcome, usage_key,
};
use crate::operation::{CheckpointSave, ModelOperation};
use crate::outcome::Outcome;
use crate::store::{FailureCategory, Record, RunRecord, SamplerRecord, SnapshotRecord, UsageMeter};
use crate::upstream::fault::Fault;
use crate::upstream::remote_model::{self, ModelHandle, pass_result, unreadable};
use crate::upstream::remote_weights::remote_path;

impl RunTask {
    /// Executes the first request, which is not a relay and therefore the only one.
    pub(super) async fn execute_first(&mut self) -> Result<Outcome, Fault> {
        let run = match open_run(&self.state, &self.model) {
            Ok(run) => run,
            Err(failed) => return Ok(failed),
        };
        let Some(PendingRequest { id, seq, operation, .. }) = self.pending.front() else {
            return Err(Fault::Unavailable("there is no request".to_owned()));
        };
        let (id, seq, operation) = (id.clone(), *seq, Arc::clone(operation));
        self.execute(&run, &id, seq, &operation).await
    }

    async fn execute(
        &mut self,
        run: &RunRecord,
        id: &RequestId,
        seq: u64,
        operation: &ModelOperation,
    ) -> Result<Outcome, Fault> {
        match operation {
            ModelOperation::Create => {
                self.drop_stored_model(run).await;
                let created = remote_model::create(&self.upstream, run).await;
                match created {
                    Ok(handle) => (self.handle, self.is_adopted) = (Some(handle), false),
                    Err(Fault::Failed(category, message)) => {
                        return Ok(close_run(run, Outcome::failed(category, message)));
                    }
                    Err(fault) => return Err(fault),
                }
                self.store_model();
                Ok(Outcome::json(&ModelCreated::new(run.id.clone())))
            }
            ModelOperation::Load { folder, path, optimizer, creates } => {
                self.load(run, seq, folder, path, *optimizer, *creates).await
            }
            ModelOperation::Save(save) => self.save(run, id, seq, save).await,
            ModelOperation::SaveForSampler(sampler) => self.save_for_sampler(run, sampler).await,
            ModelOperation::RelayCustomLoss { body, loss } => {
                self.ensure_model(run).await?;
                self.check_not_adopted()?;
                let pass = ForwardBackward::from_proto(body).map_err(unreadable)?;
                let Some(handle) = &mut self.handle else {
                    return Err(Fault::Unavailable("the model is not available".to_owned()));
                };
                let output = custom_loss_pass(handle, pass, loss).await?;
                self.store_model();
                Ok(pass_outcome(&self.state, run, body, &output))
            }
            ModelOperation::Fail(category, message) => {
                let failed = Outcome::failed(*category, message);
                Ok(if seq == 0 { close_run(run, failed) } else { failed })
            }
            ModelOperation::Relay { .. }
            | ModelOperation::Pass(_)
            | ModelOperation::OptimStep(_) => Ok(Outcome::failed(
                FailureCategory::Server,
                "internal error: the request is one of the engine",
            )),
        }
    }

    async fn load(
        &mut self,
        run: &RunRecord,
        seq: u64,
        folder: &str,
        path: &TinkerPath,
        optimizer: bool,
        creates: bool,
    ) -> Result<Outcome, Fault> {
        self.drop_stored_model(run).await;
        let loaded = async {
            let mut handle = remote_model::create(&self.upstream, run).await?;
            let saved = async {
                handle.load(remote_path(folder)?, optimizer).await?;
                // The checkpoint may be deleted before the model is created again.
                handle.save(self.recovery_name()).await
            };
            match saved.await {
                Ok(saved) => Ok((handle, saved)),
                Err(fault) => {
                    handle.unload(&self.upstream).await;
                    Err(fault)
                }
            }
        };
        let (handle, saved) = match loaded.await {
            Ok(loaded) => loaded,
            Err(Fault::Failed(category, message)) if creates => {
                return Ok(close_run(run, Outcome::failed(category, message)));
            }
            Err(fault) => return Err(fault),
        };
        let model = handle.record();
        (self.handle, self.is_adopted) = (Some(handle), false);
        self.steps = 0;
        let snapshot = Some(SnapshotRecord { seq, folder: self.remote(saved) });
        let row = self.with_model(RunRecord { snapshot, ..run.clone() }, Some(model));
        let (path, id) = (Some(path.to_string()), Some(run.id.clone()));
        let outcome = Outcome::json(&WeightsLoaded::default().path(path).model_id(id));
        Ok(outcome.with_record(Record::Run(row)))
    }

    async fn save(
        &mut self,
        run: &RunRecord,
        id: &RequestId,
        seq: u64,
        save: &CheckpointSave,
    ) -> Result<Outcome, Fault> {
        match already_saved(&self.state, id, save) {
            Ok(None) => {}
            Ok(Some(outcome)) | Err(outcome) => return Ok(outcome),
        }
        let folder = self.save_weights(run, save.path.kind()).await?;
        let clock = &self.state.clock;
        let row = checkpoint_record(clock, run, seq, save.clone(), folder, 0);
        let row = crate::store::CheckpointRecord { request: Some(id.clone()), ..row };
        let usage = vec![(usage_key(clock, run, UsageMeter::Checkpoints), 1)];
        let outcome = saved_outcome(&save.path, 0).with_usage(usage);
        Ok(outcome.with_record(Record::Checkpoint(row)))
    }

    async fn save_for_sampler(
        &mut self,
        run: &RunRecord,
        sampler: &SamplerId,
    ) -> Result<Outcome, Fault> {
        let folder = self.save_weights(run, CheckpointKind::Sampler).await?;
        let record = Record::Sampler(SamplerRecord {
            id: sampler.clone(),
            session: run.session.clone(),
            base_model: run.base_model.clone(),
            model_path: None,
            folder: Some(folder),
            run: Some(run.id.clone()),
            clients: 1,
        });
        Ok(Outcome::json(&SamplerWeightsSaved::ephemeral(sampler.clone())).with_record(record))
    }

    /// Saves the weights on the upstream. Returns where they are, as records store it.
    async fn save_weights(
        &mut self,
        run: &RunRecord,
        kind: CheckpointKind,
    ) -> Result<String, Fault> {
        self.ensure_model(run).await?;
        self.check_not_adopted()?;
        let name = format!("tinkex-{}", &self.state.random.id()[..12]);
        let is_older = self.upstream.is_older();
        let Some(handle) = &mut self.handle else {
            return Err(Fault::Unavailable("the model is not available".to_owned()));
        };
        // An older server samples a checkpoint with the model that it belongs to, and may change
        // that model: other models are sampled instead, which load a training checkpoint.
        let path = match kind {
            CheckpointKind::Sampler | CheckpointKind::External if !is_older => {
                handle.save_for_sampler(name).await?
            }
            _ => handle.save(name).await?,
        };
        self.store_model();
        Ok(self.remote(path))
    }

    pub(super) fn remote(&self, path: String) -> String {
        RemoteWeights { upstream: self.upstream.name.to_string(), path }.to_string()
    }
}

/// Computes a custom loss and accumulates its gradient on the upstream. Returns the output of the
/// pass.
pub(super) async fn custom_loss_pass(
    handle: &mut ModelHandle,
    pass: ForwardBackward,
    loss: &Arc<LossProgram>,
) -> Result<ForwardBackwardOutput, Fault> {
    let mode = pass.mode;
    let loss = CustomLoss::from_graph("custom", loss.inputs().to_vec(), loss.graph().clone())?;
    let id = handle.submit_pass(CustomLossPass::forward(&pass)?).await?;
    let output = pass_result(&handle.session, &id).await?;
    let computed = CustomLossPass::compute(loss, pass, output.clone()).await?;
    if mode == PassMode::Forward {
        return Ok(computed.output(output));
    }
    let id = handle.submit_pass(computed.backward().clone()).await?;
    // The gradient must not be accumulated on this model again.
    let output = pass_result(&handle.session, &id).await.map_err(Fault::into_doubt)?;
    Ok(computed.output(output))
}
