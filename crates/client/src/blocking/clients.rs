//! Methods of the blocking clients. Each calls the method of the same name of the async client,
//! which documents it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "export")]
use tinkex_wire::rest::AdapterImported;
use tinkex_wire::rest::{
    AccessScope, AuditLog, AuditLogRequest, BackupStatus, BillingUsage, Checkpoint, CheckpointPage,
    CreateKey, DiskUsage, DrainStatus, ExternalWeightsUrls, KeyCreated, KeyList, ListSessions,
    ListTrainingRuns, ListUserCheckpoints, SamplerInfo, SearchSessions, SessionInfo, SessionPage,
    SessionSearchPage, SessionSummary, StorageUsage, StorageUsageRequest, TrainingRun,
    TrainingRunPage, UserLimits, UserList,
};
use tinkex_wire::{
    ApiKeyInfo, Datum, Logprobs, ModelId, ModelInfo, ModelInput, OptimParams, SampleResponse,
    SamplerHandle, SamplerId, Secret, ServerCapabilities, SessionId, Timestamp, TinkerPath,
    WeightsInfo,
};

use crate::config::BaseUrl;
use crate::download::{CheckpointDownload, DownloadedCheckpoint, FileDownload};
use crate::error::{Error, Result};
#[cfg(feature = "export")]
use crate::export::{CheckpointExport, ExportedModel};
use crate::loss::CustomLoss;
#[cfg(feature = "export")]
use crate::rest_client::AdapterImport;
use crate::rest_client::CopyCheckpoint;
use crate::sampling::{SampleOptions, SampleStreamOptions, StreamedToken};
use crate::training::{
    BatchOutput, ExternalWeights, LoraOptions, LossSpec, OptimOutput, RestoreMode, RestoreOptions,
    SaveOptions, StepOptions, StepOutput,
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
            /// As the async form; [`ErrorKind::Config`](crate::ErrorKind::Config) in an async task.
            pub fn $name(&self, $($argument: $type),*) -> delegate!(@output $kind $output) {
                delegate!(@call $kind self $name $($argument)*)
            }
        )*}
    };
    (@output wait $output:ty) => { Result<$output> };
    (@output start $output:ty) => { Pending<$output> };
    (@call wait $self:ident $name:ident $($argument:ident)*) => {
        $self.block_on(async { $self.client.$name($($argument),*).await })
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
        options: impl Into<LoraOptions>,
    ) -> Pending<TrainingClient> {
        self.start_wrapped(|client| client.create_lora_training_client(options))
    }

    /// Creates a training client that continues from a checkpoint; see
    /// [`tinkex::ServiceClient::create_training_client_from`](crate::ServiceClient::create_training_client_from).
    pub fn create_training_client_from(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        options: impl Into<RestoreOptions>,
    ) -> Pending<TrainingClient> {
        self.start_wrapped(|client| client.create_training_client_from(path, options))
    }

    /// Creates a sampling client for a base model; see
    /// [`tinkex::ServiceClient::create_sampling_client`](crate::ServiceClient::create_sampling_client).
    pub fn create_sampling_client(&self, base_model: impl Into<String>) -> Pending<SamplingClient> {
        self.start_wrapped(|client| client.create_sampling_client(base_model))
    }

    /// Creates a sampling client for a sampler checkpoint; see
    /// [`tinkex::ServiceClient::create_sampling_client_from`](crate::ServiceClient::create_sampling_client_from).
    pub fn create_sampling_client_from(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> Pending<SamplingClient> {
        self.start_wrapped(|client| client.create_sampling_client_from(path))
    }

    /// Creates a sampling client for a sampling session of another process. Sends nothing.
    ///
    /// # Errors
    /// If the handle is for another server.
    pub fn restore_sampling_client(&self, handle: &SamplerHandle) -> Result<SamplingClient> {
        let client = self.runtime.enter(|| self.client.restore_sampling_client(handle))?;
        Ok(self.wrap(client))
    }

    /// Completes queued work, reports the program as successful and closes the client; see
    /// [`tinkex::ServiceClient::finish`](crate::ServiceClient::finish). In an async task it only logs a
    /// warning.
    pub fn finish(&self) {
        self.wait_or_warn(crate::ServiceClient::finish);
    }

    /// Completes queued work, reports the program as failed and closes the client; see
    /// [`tinkex::ServiceClient::finish_with_error`](crate::ServiceClient::finish_with_error).
    /// In an async task it only logs a warning.
    pub fn finish_with_error<E: fmt::Display + 'static>(&self, error: &E) {
        self.wait_or_warn(|client| client.finish_with_error(error));
    }

    /// Closes the client at once and drops queued work; see
    /// [`tinkex::ServiceClient::abort`](crate::ServiceClient::abort). In an async task it only logs a
    /// warning.
    pub fn abort(&self) {
        self.wait_or_warn(crate::ServiceClient::abort);
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

delegate! { TrainingClient:
    start forward_backward(data: Vec<Datum>, loss: impl Into<LossSpec>) -> BatchOutput;
    start forward(data: Vec<Datum>, loss: impl Into<LossSpec>) -> BatchOutput;
    start optim_step(params: impl Into<OptimParams>) -> OptimOutput;
    start step(
        data: Vec<Datum>,
        loss: impl Into<LossSpec>,
        options: impl Into<StepOptions>
    ) -> StepOutput;
    start discard_gradient() -> ();
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

    /// Waits until all calls so far have ended; see
    /// [`tinkex::TrainingClient::flush`](crate::TrainingClient::flush). In an async task it only logs a
    /// warning.
    pub fn flush(&self) {
        self.wait_or_warn(crate::TrainingClient::flush);
    }

    /// Saves the weights without a name, and returns a client that samples from them; see
    /// [`tinkex::TrainingClient::save_weights_and_get_sampling_client`](crate::TrainingClient::save_weights_and_get_sampling_client).
    pub fn save_weights_and_get_sampling_client(&self) -> Pending<SamplingClient> {
        self.start_wrapped(crate::TrainingClient::save_weights_and_get_sampling_client)
    }
}

delegate! { SamplingClient:
    start compute_logprobs(tokens: impl Into<ModelInput>) -> Logprobs;
    wait get_sampler() -> SamplerInfo;
    wait close() -> ();
}

#[cfg(feature = "tokenizer")]
delegate! { SamplingClient: wait tokenizer() -> crate::tokenizer::Tokenizer; }

impl SamplingClient {
    /// Samples completions of `prompt`; see
    /// [`tinkex::SamplingClient::sample`](crate::SamplingClient::sample).
    ///
    /// ```no_run
    /// # fn run(sampler: tinkex::blocking::SamplingClient) -> tinkex::Result<()> {
    /// use tinkex::SamplingParams;
    ///
    /// let params = SamplingParams::new().max_tokens(64);
    /// let prompts = [[1, 2], [3, 4]];
    /// // All are in flight before the first is awaited.
    /// let pending = prompts.map(|prompt| sampler.sample(prompt, &params));
    /// for response in pending {
    ///     println!("{:?}", response.wait()?.sequences[0].tokens);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn sample(
        &self,
        prompt: impl Into<ModelInput>,
        options: impl Into<SampleOptions>,
    ) -> Pending<SampleResponse> {
        self.start(|client| client.sample(prompt, options))
    }

    /// Samples one completion of `prompt`, and returns an iterator over its tokens; see
    /// [`tinkex::SamplingClient::sample_stream`](crate::SamplingClient::sample_stream).
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
        options: impl Into<SampleStreamOptions>,
    ) -> BlockingIter<'static, StreamedToken> {
        self.iterate(self.runtime.enter(|| self.client.sample_stream(prompt, options)))
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
    #[cfg(feature = "export")]
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
    #[cfg(feature = "export")]
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

#[cfg(feature = "export")]
impl BlockingCall<AdapterImport> {
    /// Uploads the adapter and waits until the server has imported it.
    ///
    /// # Errors
    /// As [`AdapterImport`]; also in an async task.
    pub fn wait(self) -> Result<AdapterImported> {
        self.runtime.block_on(self.call.into_future())
    }
}

impl BlockingCall<CheckpointDownload> {
    /// Downloads the files and waits until the folder is complete.
    ///
    /// # Errors
    /// As [`CheckpointDownload`]; also in an async task.
    pub fn wait(self) -> Result<DownloadedCheckpoint> {
        self.runtime.block_on(self.call.into_future())
    }
}

#[cfg(feature = "export")]
impl BlockingCall<CheckpointExport> {
    /// Exports the checkpoint and waits until the folder is complete.
    ///
    /// # Errors
    /// As [`CheckpointExport`]; also in an async task.
    pub fn wait(self) -> Result<ExportedModel> {
        self.runtime.block_on(self.call.into_future())
    }
}

impl BlockingCall<FileDownload> {
    /// Downloads the file and returns its size in bytes.
    ///
    /// # Errors
    /// As [`FileDownload`]; also in an async task.
    pub fn wait(self) -> Result<u64> {
        self.runtime.block_on(self.call.into_future())
    }
}

delegate! { AdminClient:
    wait get_billing_usage(starting_on: Timestamp, ending_before: Timestamp) -> BillingUsage;
    wait get_checkpoint_storage(query: &StorageUsageRequest) -> StorageUsage;
    wait get_audit_log(query: &AuditLogRequest) -> AuditLog;
    wait create_key(request: &CreateKey) -> KeyCreated;
    wait list_keys() -> KeyList;
    wait revoke_key(key: impl Into<String>) -> ();
    wait rotate_key(key: impl Into<String>) -> KeyCreated;
    wait list_users() -> UserList;
    wait set_user_limits(user: impl Into<String>, limits: UserLimits) -> ();
    wait start_drain() -> DrainStatus;
    wait cancel_drain() -> DrainStatus;
    wait get_drain_status() -> DrainStatus;
    wait start_backup(id: &str, folder: &str) -> BackupStatus;
    wait get_backup_status() -> BackupStatus;
    wait get_disk_usage() -> DiskUsage;
}
