//! Methods of the blocking clients. Each calls the method of the same name of the async client,
//! which documents it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tinkex_wire::rest::{
    AccessScope, AdapterImported, AuditLog, AuditLogRequest, BillingUsage, Checkpoint,
    CheckpointPage, ExternalWeightsUrls, ListSessions, ListTrainingRuns, ListUserCheckpoints,
    SamplerInfo, SearchSessions, SessionInfo, SessionPage, SessionSearchPage, SessionSummary,
    StorageUsage, StorageUsageRequest, TrainingRun, TrainingRunPage,
};
use tinkex_wire::{
    ApiKeyInfo, Datum, Logprobs, ModelId, ModelInfo, ModelInput, OptimParams, SampleResponse,
    SamplerHandle, SamplerId, SamplingParams, Secret, ServerCapabilities, SessionId, Timestamp,
    TinkerPath, WeightsInfo,
};

use crate::config::BaseUrl;
use crate::download::{CheckpointDownload, DownloadedCheckpoint, FileDownload};
use crate::error::{Error, Result};
use crate::export::{CheckpointExport, ExportedModel};
use crate::loss::CustomLoss;
use crate::rest_client::{AdapterImport, CopyCheckpoint};
use crate::sampling::{SampleRequestBuilder, SampleStream, StreamedToken};
use crate::training::{
    BatchOutput, CreateFromState, CreateLora, ExternalWeights, LossSpec, OptimOutput, RestoreMode,
    SaveOptions, StepOutput, TrainingStepBuilder,
};
use crate::transport::Identity;

use super::{
    AdminClient, BlockingCall, BlockingIter, Pending, RestClient, SamplingClient, ServiceClient,
    TrainingClient,
};

/// Implements methods that wait for the method of the same name of the async client (`wait`), or
/// start it and return its result as [`Pending`] (`start`).
macro_rules! delegate {
    ($client:ident: $(
        $kind:ident $name:ident($($argument:ident: $type:ty),*) -> $output:ty;
    )*) => {
        impl $client {$(
            #[doc = concat!("Blocking form of [`", stringify!($client), "::", stringify!($name),
                "`](crate::", stringify!($client), "::", stringify!($name), ").")]
            ///
            /// # Errors
            /// As the async form; [`ErrorKind::Config`](crate::ErrorKind::Config) inside an async
            /// runtime.
            pub fn $name(&self, $($argument: $type),*) -> delegate!(@output $kind $output) {
                delegate!(@call $kind self $name $($argument)*)
            }
        )*}
    };
    (@output wait $output:ty) => { Result<$output> };
    (@output start $output:ty) => { Pending<$output> };
    (@call wait $self:ident $name:ident $($argument:ident)*) => {
        $self.block_on($self.client.$name($($argument),*))
    };
    (@call start $self:ident $name:ident $($argument:ident)*) => {
        $self.start(|client| client.$name($($argument),*))
    };
}

delegate! { ServiceClient:
    wait server_capabilities() -> ServerCapabilities;
    wait server_time() -> Option<Timestamp>;
    wait create_custom_loss(loss: &CustomLoss) -> CustomLoss;
    wait whoami() -> Identity;
}

impl ServiceClient {
    /// Creates a training client for a new LoRA adapter; see
    /// [`tinkex::ServiceClient::create_lora_training_client`](crate::ServiceClient::create_lora_training_client).
    pub fn create_lora_training_client(
        &self,
        base_model: impl Into<String>,
    ) -> BlockingCall<CreateLora> {
        self.prepare(self.client.create_lora_training_client(base_model))
    }

    /// Creates a training client that continues from a checkpoint; see
    /// [`tinkex::ServiceClient::create_training_client_from`](crate::ServiceClient::create_training_client_from).
    pub fn create_training_client_from(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        restore: RestoreMode,
    ) -> BlockingCall<CreateFromState> {
        self.prepare(self.client.create_training_client_from(path, restore))
    }

    /// Creates a sampling client for a base model.
    ///
    /// # Errors
    /// If the server does not have the model, or inside an async runtime.
    pub fn create_sampling_client(&self, base_model: impl Into<String>) -> Result<SamplingClient> {
        let client = self.block_on(self.client.create_sampling_client(base_model))?;
        Ok(self.wrap(client))
    }

    /// Creates a sampling client for a sampler checkpoint.
    ///
    /// # Errors
    /// If the path is invalid, the checkpoint does not exist or is a training checkpoint, or inside
    /// an async runtime.
    pub fn create_sampling_client_from(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> Result<SamplingClient> {
        let client = self.block_on(self.client.create_sampling_client_from(path))?;
        Ok(self.wrap(client))
    }

    /// Creates a sampling client for a sampling session of another process. Sends nothing.
    ///
    /// # Errors
    /// If the handle is for another server.
    pub fn restore_sampling_client(&self, handle: &SamplerHandle) -> Result<SamplingClient> {
        let client = self.runtime.enter(|| self.client.restore_sampling_client(handle))?;
        Ok(self.wrap(client))
    }

    /// Completes queued work, reports the result of the program and closes the client; see
    /// [`tinkex::ServiceClient::finish`](crate::ServiceClient::finish). Inside an async runtime it
    /// only logs a warning.
    pub fn finish<T, E: fmt::Display + 'static>(&self, result: &std::result::Result<T, E>) {
        self.wait_or_warn(self.runtime.enter(|| self.client.finish(result)));
    }

    /// Closes the client at once and drops queued work; see
    /// [`tinkex::ServiceClient::abort`](crate::ServiceClient::abort). Inside an async runtime it
    /// only logs a warning.
    pub fn abort(&self) {
        self.wait_or_warn(self.client.abort());
    }

    /// Returns a client for training runs, checkpoints and sessions.
    #[must_use]
    pub fn rest(&self) -> RestClient {
        self.wrap(self.client.rest())
    }

    /// Returns a client for usage, storage and the audit log of an organization.
    #[must_use]
    pub fn admin(&self) -> AdminClient {
        self.wrap(self.client.admin())
    }

    /// Returns the server's base URL.
    #[must_use]
    pub fn base_url(&self) -> &BaseUrl {
        self.client.base_url()
    }
}

impl BlockingCall<CreateLora> {
    /// Creates the model and waits until the server has loaded it.
    ///
    /// # Errors
    /// As [`CreateLora::create`]; also inside an async runtime.
    pub fn wait(self) -> Result<TrainingClient> {
        let client = self.runtime.block_on(self.call.create())?;
        Ok(TrainingClient { client, runtime: self.runtime })
    }
}

impl BlockingCall<CreateFromState> {
    /// Creates the model and waits until the checkpoint is loaded.
    ///
    /// # Errors
    /// As [`CreateFromState::create`]; also inside an async runtime.
    pub fn wait(self) -> Result<TrainingClient> {
        let client = self.runtime.block_on(self.call.create())?;
        Ok(TrainingClient { client, runtime: self.runtime })
    }
}

delegate! { TrainingClient:
    start forward_backward(data: Vec<Datum>, loss: impl Into<LossSpec>) -> BatchOutput;
    start forward(data: Vec<Datum>, loss: impl Into<LossSpec>) -> BatchOutput;
    start optim_step(params: impl Into<OptimParams>) -> OptimOutput;
    start save_state(options: impl Into<SaveOptions>) -> TinkerPath;
    start save_weights_for_sampler(options: impl Into<SaveOptions>) -> TinkerPath;
    start save_weights_external(options: impl Into<SaveOptions>) -> ExternalWeights;
    start load_state(
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        restore: RestoreMode
    ) -> ();
    start load_state_with_key(
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        restore: RestoreMode,
        key: impl Into<Secret>
    ) -> ();
    wait get_info() -> ModelInfo;
}

#[cfg(feature = "tokenizer")]
delegate! { TrainingClient: wait tokenizer() -> crate::tokenizer::Tokenizer; }

impl TrainingClient {
    /// Returns the id that the server gave the model.
    #[must_use]
    pub fn model_id(&self) -> &ModelId {
        self.client.model_id()
    }

    /// Creates a training step: a pass and the optimizer step that applies its gradient; see
    /// [`tinkex::TrainingClient::step`](crate::TrainingClient::step).
    pub fn step(
        &self,
        data: Vec<Datum>,
        loss: impl Into<LossSpec>,
        params: impl Into<OptimParams>,
    ) -> BlockingCall<TrainingStepBuilder> {
        self.prepare(self.client.step(data, loss, params))
    }

    /// Waits until all calls so far have ended; see
    /// [`tinkex::TrainingClient::flush`](crate::TrainingClient::flush). Inside an async runtime it
    /// only logs a warning.
    pub fn flush(&self) {
        self.wait_or_warn(self.client.flush());
    }

    /// Saves the weights without a name, and returns a client that samples from them.
    pub fn save_weights_and_get_sampling_client(&self) -> Pending<SamplingClient> {
        let runtime = self.runtime.clone();
        self.start(|client| {
            let saved = client.save_weights_and_get_sampling_client();
            async move { Ok(SamplingClient { client: saved.await?, runtime }) }
        })
    }
}

impl BlockingCall<TrainingStepBuilder> {
    /// Queues the step. [`Pending::wait`] returns both results.
    pub fn send(self) -> Pending<StepOutput> {
        let future = self.runtime.enter(|| self.call.send());
        Pending { future: Box::pin(future), runtime: self.runtime }
    }

    /// Queues the step and waits for both results.
    ///
    /// # Errors
    /// As [`TrainingStepBuilder::send`]; also inside an async runtime.
    pub fn wait(self) -> Result<StepOutput> {
        self.send().wait()
    }
}

delegate! { SamplingClient:
    start compute_logprobs(tokens: impl Into<ModelInput>) -> Logprobs;
    wait get_sampler() -> SamplerInfo;
}

#[cfg(feature = "tokenizer")]
delegate! { SamplingClient: wait tokenizer() -> crate::tokenizer::Tokenizer; }

impl SamplingClient {
    /// Creates a request for completions of `prompt`; see
    /// [`tinkex::SamplingClient::sample`](crate::SamplingClient::sample).
    ///
    /// ```no_run
    /// # fn run(sampler: tinkex::blocking::SamplingClient) -> tinkex::Result<()> {
    /// use tinkex::SamplingParams;
    ///
    /// let params = SamplingParams::new().max_tokens(64);
    /// let prompts = [[1, 2], [3, 4]];
    /// // All are in flight before the first is awaited.
    /// let pending = prompts.map(|prompt| sampler.sample(prompt, params.clone()).send());
    /// for response in pending {
    ///     println!("{:?}", response.wait()?.sequences[0].tokens);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn sample(
        &self,
        prompt: impl Into<ModelInput>,
        params: SamplingParams,
    ) -> BlockingCall<SampleRequestBuilder> {
        self.prepare(self.client.sample(prompt, params))
    }

    /// Samples one completion of `prompt`; iterate over the call to receive its tokens.
    ///
    /// ```no_run
    /// # fn run(sampler: tinkex::blocking::SamplingClient) -> tinkex::Result<()> {
    /// use tinkex::SamplingParams;
    ///
    /// for token in sampler.sample_stream([1, 2, 3], SamplingParams::new().max_tokens(64)) {
    ///     print!("{}", token?.text);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn sample_stream(
        &self,
        prompt: impl Into<ModelInput>,
        params: SamplingParams,
    ) -> BlockingCall<SampleStream> {
        self.prepare(self.client.sample_stream(prompt, params))
    }

    /// Returns the id of the sampling session.
    #[must_use]
    pub fn sampler_id(&self) -> &SamplerId {
        self.client.sampler_id()
    }

    /// Returns a handle with which another process can sample from the same weights.
    #[must_use]
    pub fn handle(&self) -> SamplerHandle {
        self.client.handle()
    }
}

impl BlockingCall<SampleRequestBuilder> {
    /// Sends the request. [`Pending::wait`] returns its response.
    pub fn send(self) -> Pending<SampleResponse> {
        let future = self.runtime.enter(|| self.call.send());
        Pending { future: Box::pin(future), runtime: self.runtime }
    }

    /// Sends the request and waits for the response.
    ///
    /// # Errors
    /// As [`SampleRequestBuilder::send`]; also inside an async runtime.
    pub fn wait(self) -> Result<SampleResponse> {
        self.send().wait()
    }
}

impl IntoIterator for BlockingCall<SampleStream> {
    type Item = Result<StreamedToken>;
    type IntoIter = BlockingIter<'static, StreamedToken>;

    fn into_iter(self) -> Self::IntoIter {
        BlockingIter::new(self.call, self.runtime)
    }
}

delegate! { RestClient:
    wait list_training_runs(list: &ListTrainingRuns) -> TrainingRunPage;
    wait get_training_run(run_id: impl Into<ModelId>, access_scope: AccessScope) -> TrainingRun;
    wait get_training_run_by_path(
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        access_scope: AccessScope
    ) -> TrainingRun;
    wait get_sampler(sampler_id: impl Into<SamplerId>) -> SamplerInfo;
    wait list_checkpoints(run_id: impl Into<ModelId>) -> CheckpointPage;
    wait list_user_checkpoints(list: &ListUserCheckpoints) -> CheckpointPage;
    wait get_weights_info(path: impl TryInto<TinkerPath, Error: Into<Error>>) -> WeightsInfo;
    wait delete_checkpoint(path: impl TryInto<TinkerPath, Error: Into<Error>>) -> ();
    wait publish_checkpoint(path: impl TryInto<TinkerPath, Error: Into<Error>>) -> ();
    wait unpublish_checkpoint(path: impl TryInto<TinkerPath, Error: Into<Error>>) -> ();
    wait set_checkpoint_ttl(
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        ttl: Option<Duration>
    ) -> ();
    wait get_external_weights_urls(
        path: impl TryInto<TinkerPath, Error: Into<Error>>
    ) -> ExternalWeightsUrls;
    wait copy_weights(copy: CopyCheckpoint) -> TinkerPath;
    wait list_sessions(list: &ListSessions) -> SessionPage;
    wait get_session(
        session_id: impl Into<SessionId>,
        access_scope: AccessScope
    ) -> SessionInfo;
    wait search_sessions(search: &SearchSessions) -> SessionSearchPage;
    wait assign_session_project(
        session_id: impl Into<SessionId>,
        project_id: impl Into<String>
    ) -> ();
    wait export_session_trace(session_id: impl Into<SessionId>) -> String;
    wait get_api_key() -> ApiKeyInfo;
    wait delete_api_key() -> ();
}

impl RestClient {
    /// Returns an iterator over all training runs from `list.offset` on, newest first.
    pub fn training_runs(&self, list: ListTrainingRuns) -> BlockingIter<'_, TrainingRun> {
        self.iterate(self.client.training_runs(list))
    }

    /// Returns an iterator over all of the user's checkpoints.
    pub fn user_checkpoints(&self) -> BlockingIter<'_, Checkpoint> {
        self.iterate(self.client.user_checkpoints())
    }

    /// Returns an iterator over all sessions that match.
    pub fn sessions_found(&self, search: SearchSessions) -> BlockingIter<'_, SessionSummary> {
        self.iterate(self.client.sessions_found(search))
    }

    /// Imports a PEFT adapter; see
    /// [`tinkex::RestClient::import_adapter`](crate::RestClient::import_adapter).
    pub fn import_adapter(&self, folder: impl Into<PathBuf>) -> BlockingCall<AdapterImport> {
        self.prepare(self.client.import_adapter(folder))
    }

    /// Downloads the files of a checkpoint; see
    /// [`tinkex::RestClient::download`](crate::RestClient::download).
    pub fn download(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        folder: impl Into<PathBuf>,
    ) -> BlockingCall<CheckpointDownload> {
        self.prepare(self.client.download(path, folder))
    }

    /// Exports a checkpoint; see [`tinkex::RestClient::export`](crate::RestClient::export).
    pub fn export(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        to: impl Into<PathBuf>,
    ) -> BlockingCall<CheckpointExport> {
        self.prepare(self.client.export(path, to))
    }

    /// Downloads a file from a URL that needs no credential; see
    /// [`tinkex::RestClient::download_file`](crate::RestClient::download_file).
    pub fn download_file(
        &self,
        url: impl Into<String>,
        file: impl Into<PathBuf>,
    ) -> BlockingCall<FileDownload> {
        self.prepare(self.client.download_file(url, file))
    }
}

impl BlockingCall<AdapterImport> {
    /// Uploads the adapter and waits until the server has imported it.
    ///
    /// # Errors
    /// As [`AdapterImport`]; also inside an async runtime.
    pub fn wait(self) -> Result<AdapterImported> {
        self.runtime.block_on(self.call.into_future())
    }
}

impl BlockingCall<CheckpointDownload> {
    /// Downloads the files and waits until the folder is complete.
    ///
    /// # Errors
    /// As [`CheckpointDownload`]; also inside an async runtime.
    pub fn wait(self) -> Result<DownloadedCheckpoint> {
        self.runtime.block_on(self.call.into_future())
    }
}

impl BlockingCall<CheckpointExport> {
    /// Exports the checkpoint and waits until the folder is complete.
    ///
    /// # Errors
    /// As [`CheckpointExport`]; also inside an async runtime.
    pub fn wait(self) -> Result<ExportedModel> {
        self.runtime.block_on(self.call.into_future())
    }
}

impl BlockingCall<FileDownload> {
    /// Downloads the file and returns its size in bytes.
    ///
    /// # Errors
    /// As [`FileDownload`]; also inside an async runtime.
    pub fn wait(self) -> Result<u64> {
        self.runtime.block_on(self.call.into_future())
    }
}

delegate! { AdminClient:
    wait get_billing_usage(starting_on: Timestamp, ending_before: Timestamp) -> BillingUsage;
    wait get_checkpoint_storage(query: &StorageUsageRequest) -> StorageUsage;
    wait get_audit_log(query: &AuditLogRequest) -> AuditLog;
}
