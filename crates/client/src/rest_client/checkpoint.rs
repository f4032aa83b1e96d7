//! Requests about checkpoints.

use std::time::Duration;

use futures_util::Stream;
use tinkex_wire::rest::{
    Checkpoint, CheckpointPage, DeleteCheckpoint, ExternalWeightsUrls, ExternalWeightsUrlsRequest,
    ListCheckpoints, ListUserCheckpoints, PublishCheckpoint, SetCheckpointTtl, UnpublishCheckpoint,
};
use tinkex_wire::{
    CopyWeights, ModelId, Secret, TinkerPath, WeightsInfo, WeightsInfoRequest,
    header as wire_header,
};

use crate::call_options::ApplyOptions as _;
use crate::error::{Error, ErrorKind, Result, convert};
use crate::future::RequestFuture;
use crate::transport::RequestOptions;
use crate::transport::request::header;

use super::page::{self, ListPage};
use super::{RestClient, method_headers, send};

/// Checkpoints per request: few and large pages, because the query is slow on the server.
const PAGE_SIZE: u64 = 1000;

impl RestClient {
    /// Returns all checkpoints of a training run.
    ///
    /// # Errors
    /// If the run does not exist.
    pub fn list_checkpoints(&self, run_id: impl Into<ModelId>) -> RequestFuture<CheckpointPage> {
        self.call("list_checkpoints", ListCheckpoints::new(run_id))
    }

    /// Returns one page of the user's checkpoints.
    ///
    /// # Errors
    /// If the request fails.
    pub fn list_user_checkpoints(
        &self,
        list: &ListUserCheckpoints,
    ) -> RequestFuture<CheckpointPage> {
        self.call("list_user_checkpoints", *list)
    }

    /// Returns a stream of all of the user's checkpoints. Pages are fetched on demand.
    pub fn user_checkpoints(&self) -> impl Stream<Item = Result<Checkpoint>> {
        page::all(0, PAGE_SIZE, move |offset, limit| {
            let list = ListUserCheckpoints::default().offset(offset).limit(limit);
            let page = self.list_user_checkpoints(&list);
            async move {
                let page = page.await?;
                let total = page.cursor.map(|cursor| cursor.total_count);
                Ok(ListPage { items: page.checkpoints, total })
            }
        })
    }

    /// Returns the base model and adapter settings of a checkpoint, which may be a public
    /// checkpoint of another user.
    ///
    /// # Errors
    /// If the checkpoint does not exist.
    pub fn get_weights_info(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> RequestFuture<WeightsInfo> {
        let request =
            convert("get_weights_info", path).map(|path| WeightsInfoRequest::new(path.to_string()));
        self.try_call("get_weights_info_by_tinker_path", request)
    }

    /// Deletes a checkpoint.
    ///
    /// # Errors
    /// If the checkpoint does not exist.
    pub fn delete_checkpoint(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> RequestFuture<()> {
        let request = convert("delete_checkpoint", path).map(DeleteCheckpoint::new);
        self.try_call("delete_checkpoint_from_tinker_path", request)
    }

    /// Makes a checkpoint readable by everyone.
    ///
    /// # Errors
    /// If the checkpoint does not exist.
    pub fn publish_checkpoint(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> RequestFuture<()> {
        let request = convert("publish_checkpoint", path).map(PublishCheckpoint::new);
        self.try_call("publish_checkpoint_from_tinker_path", request)
    }

    /// Makes a published checkpoint private again.
    ///
    /// # Errors
    /// If the checkpoint does not exist.
    pub fn unpublish_checkpoint(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> RequestFuture<()> {
        let request = convert("unpublish_checkpoint", path).map(UnpublishCheckpoint::new);
        self.try_call("unpublish_checkpoint_from_tinker_path", request)
    }

    /// Sets the time, in whole seconds, after which the server deletes a checkpoint; `None` keeps
    /// it indefinitely.
    ///
    /// # Errors
    /// If the checkpoint does not exist, or the server does not accept the time.
    pub fn set_checkpoint_ttl(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        ttl: Option<Duration>,
    ) -> RequestFuture<()> {
        let ttl_seconds = ttl.map(|ttl| ttl.as_secs());
        let request = convert("set_checkpoint_ttl", path)
            .map(|path| SetCheckpointTtl::new(path, ttl_seconds));
        self.try_call("set_checkpoint_ttl_from_tinker_path", request)
    }

    /// Returns the download URLs of external weights, or of sampler weights if the server offers
    /// them for download. The URLs need no credential and expire.
    ///
    /// # Errors
    /// If the checkpoint does not exist or the server does not offer it for download.
    pub fn get_external_weights_urls(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> RequestFuture<ExternalWeightsUrls> {
        let request =
            convert("get_external_weights_urls", path).map(ExternalWeightsUrlsRequest::new);
        self.try_call("get_external_weights_urls", request)
    }

    /// Copies a checkpoint into a project and returns the path of the copy. Retries do not create
    /// further copies.
    ///
    /// # Errors
    /// If neither `copy` nor the client names a project, or the source cannot be read.
    pub fn copy_weights(&self, copy: CopyCheckpoint) -> RequestFuture<TinkerPath> {
        let rest = self.clone();
        self.service.start(async move { rest.send_copy(copy).await })
    }

    async fn send_copy(&self, copy: CopyCheckpoint) -> Result<TinkerPath> {
        let source = copy.source?;
        let project = copy.project_id.as_deref().or(self.service.project_id());
        let Some(project) = project else {
            let message = format!("cannot copy {source}: no target project is set");
            let hint = "Pass a project, or set TINKER_PROJECT_ID.";
            let error = Error::new(ErrorKind::InvalidInput, message).with_hint(hint);
            return Err(error.during("copy_weights"));
        };
        let mut headers = method_headers("copy_weights");
        if let Some(token) = &copy.source_token {
            header::put_secret(&mut headers, wire_header::WEIGHTS_ACCESS_TOKEN, token)?;
        }
        let request = CopyWeights::into_project(source.to_string(), project)
            .ttl_seconds(copy.ttl.map(|ttl| ttl.as_secs()));
        let key = uuid::Uuid::new_v4().to_string();
        let options = RequestOptions {
            headers,
            idempotency_key: Some(key),
            ..self.service.options().request_options()
        };
        let copied = send(&self.service, &request, &options).await?;
        Ok(copied.tinker_path.parse()?)
    }
}

/// Parameters of [`RestClient::copy_weights`].
#[derive(Clone, Debug)]
#[must_use = "pass it to `RestClient::copy_weights`"]
pub struct CopyCheckpoint {
    /// Path, or the error if the argument is not one; `copy_weights` returns it.
    source: Result<TinkerPath>,
    project_id: Option<String>,
    ttl: Option<Duration>,
    source_token: Option<Secret>,
}

impl CopyCheckpoint {
    /// Copies `source` into the client's project, without expiry.
    /// [`RestClient::copy_weights`] reports an invalid path.
    pub fn new(source: impl TryInto<TinkerPath, Error: Into<Error>>) -> Self {
        let source = convert("copy_weights", source);
        Self { source, project_id: None, ttl: None, source_token: None }
    }

    /// Sets the target project.
    pub fn into_project(mut self, project_id: impl Into<String>) -> Self {
        self.project_id = Some(project_id.into());
        self
    }

    /// Sets the time, in whole seconds, after which the server deletes the copy.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Sets a key or access token that may read the source, if the client's own key may not.
    pub fn source_token(mut self, token: impl Into<Secret>) -> Self {
        self.source_token = Some(token.into());
        self
    }
}
