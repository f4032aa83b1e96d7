//! Requests that are executed one at a time: creation, loads, saves and custom losses.

use std::sync::Arc;

use tinkex_autodiff::LossProgram;
use tinkex_backend::model_outcome::{
    already_saved, checkpoint_metadata, checkpoint_record, close_run, open_run, saved_outcome,
    usage_key,
};
use tinkex_backend::operation::{CheckpointLoad, CheckpointSave, ModelOperation};
use tinkex_backend::outcome::Outcome;
use tinkex_backend::upstream::CustomLossTraining;
use tinkex_loss::CustomLoss;
use tinkex_store::record::{
    CheckpointRecord, ModelRunRecord, Record, SamplerRecord, SnapshotRecord, UsageMeter,
};
use tinkex_store::weights::{RemoteWeights, WeightsLocation};
use tinkex_wire::{
    CheckpointKind, ForwardBackward, ForwardBackwardOutput, ModelCreated, PassMode, RequestId,
    SamplerId, SamplerWeightsSaved, WeightsLoaded,
};

use super::outcome::pass_outcome;
use super::{AloneOperation, RunTask};
use crate::custom_loss_pass::CustomLossPass;
use crate::fault::Fault;
use crate::remote_model::{self, ModelHandle, pass_result, unreadable};

impl RunTask {
    /// Executes the first pending request, which must be the only pending request of the model.
    pub(super) async fn execute_alone(
        &mut self,
        id: &RequestId,
        seq: u64,
        operation: &AloneOperation,
    ) -> Result<Outcome, Fault> {
        let run = match open_run(&self.context.store, &self.model) {
            Ok(run) => run,
            Err(failed) => return Ok(failed),
        };
        let run = &run;
        match operation {
            ModelOperation::Create => {
                self.drop_stored_model(run).await;
                let created = remote_model::create(&self.upstream, run).await;
                match created {
                    Ok(handle) => {
                        self.handle = Some(handle);
                        self.is_adopted = false;
                    }
                    Err(Fault::Failed(category, message)) => {
                        return Ok(close_run(run, Outcome::failed(category, message)));
                    }
                    Err(fault) => return Err(fault),
                }
                self.store_model();
                Ok(Outcome::json(&ModelCreated::new(run.id.clone())))
            }
            ModelOperation::Load(load) => self.load(run, seq, load).await,
            ModelOperation::Save(save) => self.save(run, id, seq, save).await,
            ModelOperation::SaveForSampler(sampler) => self.save_for_sampler(run, sampler).await,
            ModelOperation::Train(CustomLossTraining { body, loss }) => {
                self.ensure_model(run).await?;
                self.check_not_adopted()?;
                let pass = ForwardBackward::from_proto(body).map_err(unreadable)?;
                let Some(handle) = &mut self.handle else {
                    return Err(Fault::Unavailable("the model is not available".to_owned()));
                };
                let output = custom_loss_pass(handle, pass, loss).await?;
                self.store_model();
                Ok(pass_outcome(&self.context, run, body, &output))
            }
            ModelOperation::Fail(category, message) => {
                let failed = Outcome::failed(*category, message);
                Ok(if seq == 0 { close_run(run, failed) } else { failed })
            }
        }
    }

    async fn load(
        &mut self,
        run: &ModelRunRecord,
        seq: u64,
        load: &CheckpointLoad<RemoteWeights>,
    ) -> Result<Outcome, Fault> {
        let CheckpointLoad { weights, path, optimizer, creates } = load;
        self.drop_stored_model(run).await;
        let loaded = async {
            let mut handle = remote_model::create(&self.upstream, run).await?;
            let saved = async {
                handle.load(&weights.path, *optimizer).await?;
                // Save a recovery checkpoint: the loaded checkpoint may be deleted before the model
                // is created again.
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
            Err(Fault::Failed(category, message)) if *creates => {
                return Ok(close_run(run, Outcome::failed(category, message)));
            }
            Err(fault) => return Err(fault),
        };
        let model = handle.record();
        self.handle = Some(handle);
        self.is_adopted = false;
        self.steps = 0;
        let snapshot = Some(SnapshotRecord { seq, weights: self.remote(saved) });
        let row = self.with_model(ModelRunRecord { snapshot, ..run.clone() }, Some(model));
        let loaded = WeightsLoaded::default().path(Some(path.to_string()));
        let outcome = Outcome::json(&loaded.model_id(Some(run.id.clone())));
        Ok(outcome.with_record(Record::Run(row)))
    }

    async fn save(
        &mut self,
        run: &ModelRunRecord,
        id: &RequestId,
        seq: u64,
        save: &CheckpointSave,
    ) -> Result<Outcome, Fault> {
        match already_saved(&self.context.store, id, save) {
            Ok(None) => {}
            Ok(Some(outcome)) | Err(outcome) => return Ok(outcome),
        }
        let weights = self.save_weights(run, save.path.kind()).await?;
        let clock = self.context.clock();
        let row = checkpoint_record(clock, run, seq, save.clone(), weights, 0);
        let row = CheckpointRecord { request: Some(id.clone()), ..row };
        let usage = vec![(usage_key(clock, run, UsageMeter::Checkpoints), 1)];
        let outcome = saved_outcome(&save.path, 0).with_usage(usage);
        let metadata = Record::Metadata(checkpoint_metadata(save));
        Ok(outcome.with_record(Record::Checkpoint(row)).with_record(metadata))
    }

    async fn save_for_sampler(
        &mut self,
        run: &ModelRunRecord,
        sampler: &SamplerId,
    ) -> Result<Outcome, Fault> {
        let weights = self.save_weights(run, CheckpointKind::Sampler).await?;
        let record = Record::Sampler(SamplerRecord {
            id: sampler.clone(),
            session: run.session.clone(),
            base_model: run.base_model.clone(),
            model_path: None,
            weights: Some(weights),
            run: Some(run.id.clone()),
            clients: 1,
            end: None,
            weights_released: false,
        });
        Ok(Outcome::json(&SamplerWeightsSaved::ephemeral(sampler.clone())).with_record(record))
    }

    /// Saves the weights on the upstream.
    async fn save_weights(
        &mut self,
        run: &ModelRunRecord,
        kind: CheckpointKind,
    ) -> Result<WeightsLocation, Fault> {
        self.ensure_model(run).await?;
        self.check_not_adopted()?;
        let name = format!("tinkex-{}", &self.context.random.id()[..12]);
        let is_legacy = self.upstream.is_legacy();
        let Some(handle) = &mut self.handle else {
            return Err(Fault::Unavailable("the model is not available".to_owned()));
        };
        // A legacy server samples from a checkpoint with the model that saved it, and may change
        // that model. Save a training checkpoint instead, which a separate model for sampling can
        // load.
        let path = match kind {
            CheckpointKind::Sampler | CheckpointKind::External if !is_legacy => {
                handle.save_for_sampler(name).await?
            }
            _ => handle.save(name).await?,
        };
        self.store_model();
        Ok(self.remote(path))
    }

    pub(super) fn remote(&self, path: String) -> WeightsLocation {
        self.upstream.weights_at(path)
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
    let computed = CustomLossPass::compute(loss, pass, &output).await?;
    if mode == PassMode::Forward {
        return Ok(computed.output(output));
    }
    let id = handle.submit_pass(computed.backward().clone()).await?;
    // If the upstream does not respond, the request is in doubt: this model may already have
    // accumulated the gradient and must not accumulate it again.
    let output = pass_result(&handle.session, &id).await.map_err(Fault::into_doubt)?;
    Ok(computed.output(output))
}
