//! Checkpoints.

use futures_util::Stream;
use tinkex_wire::rest::{
    Checkpoint, CheckpointPage, DeleteCheckpoint, ExternalWeightsUrls, ExternalWeightsUrlsRequest,
    ListCheckpoints, ListUserCheckpoints, PublishCheckpoint, SetCheckpointTtl, UnpublishCheckpoint,
};
use tinkex_wire::{
    CopyWeights, ModelId, Secret, TinkerPath, WeightsInfo, WeightsInfoRequest,
    header as wire_header,
};

use crate::error::{Error, ErrorKind, Result};
use crate::transport::{RequestOptions, header};

use super::page::{self, Page};
use super::{RestClient, named};

/// How many checkpoints one request brings: the query is slow, so few and large.
const PAGE: u64 = 1000;

impl RestClient {
    /// All checkpoints of a training run.
    ///
    /// # Errors
    /// If there is no such run.
    pub async fn list_checkpoints(&self, run_id: impl Into<ModelId>) -> Result<CheckpointPage> {
        self.call("list_checkpoints", &ListCheckpoints::new(run_id)).await
    }

    /// One page of all the caller's checkpoints.
    ///
    /// # Errors
    /// If the server cannot be asked.
    pub async fn list_user_checkpoints(
        &self,
        list: &ListUserCheckpoints,
    ) -> Result<CheckpointPage> {
        self.call("list_user_checkpoints", list).await
    }

    /// All the caller's checkpoints, fetched as they are asked for.
    pub fn user_checkpoints(&self) -> impl Stream<Item = Result<Checkpoint>> {
        page::all(0, PAGE, move |offset, limit| {
            let client = self.clone();
            async move {
                let list = ListUserCheckpoints::default().offset(offset).limit(limit);
                let page = client.list_user_checkpoints(&list).await?;
                let total = page.cursor.map(|cursor| cursor.total_count);
                Ok(Page { items: page.checkpoints, total })
            }
        })
    }

    /// What a checkpoint holds. Works for public ones of others too.
    ///
    /// # Errors
    /// If there is none at that address.
    pub async fn get_weights_info(&self, path: &TinkerPath) -> Result<WeightsInfo> {
        let call = WeightsInfoRequest { tinker_path: path.to_string() };
        self.call("get_weights_info_by_tinker_path", &call).await
    }

    /// Deletes a checkpoint.
    ///
    /// # Errors
    /// If there is none at that address.
    pub async fn delete_checkpoint(&self, path: &TinkerPath) -> Result<()> {
        self.call("delete_checkpoint_from_tinker_path", &DeleteCheckpoint::new(path.clone())).await
    }

    /// Lets everyone read a checkpoint.
    ///
    /// # Errors
    /// If there is none at that address.
    pub async fn publish_checkpoint(&self, path: &TinkerPath) -> Result<()> {
        self.call("publish_checkpoint_from_tinker_path", &PublishCheckpoint::new(path.clone()))
            .await
    }

    /// Lets only its owner read a checkpoint again.
    ///
    /// # Errors
    /// If there is none at that address.
    pub async fn unpublish_checkpoint(&self, path: &TinkerPath) -> Result<()> {
        let call = UnpublishCheckpoint::new(path.clone());
        self.call("unpublish_checkpoint_from_tinker_path", &call).await
    }

    /// Sets in how many seconds a checkpoint is deleted; `None` keeps it for ever.
    ///
    /// # Errors
    /// If there is none at that address, or the time is out of the server's range.
    pub async fn set_checkpoint_ttl(
        &self,
        path: &TinkerPath,
        ttl_seconds: Option<u64>,
    ) -> Result<()> {
        let call = SetCheckpointTtl::new(path.clone(), ttl_seconds);
        self.call("set_checkpoint_ttl_from_tinker_path", &call).await
    }

    /// Where to download the files of a checkpoint that was saved for that. The URLs need no
    /// credential and work for a while.
    ///
    /// # Errors
    /// If the checkpoint was not saved for download.
    pub async fn get_external_weights_urls(
        &self,
        path: &TinkerPath,
    ) -> Result<ExternalWeightsUrls> {
        let call = ExternalWeightsUrlsRequest::new(path.clone());
        self.call("get_external_weights_urls", &call).await
    }

    /// Copies a checkpoint into a project, and returns the copy's address.
    ///
    /// A copy that was asked for once is made once, however often the request had to be sent.
    ///
    /// # Errors
    /// If there is neither a destination here nor a project of the client's own, and if the source
    /// may not be read.
    pub async fn copy_weights(&self, copy: CopyCheckpoint) -> Result<TinkerPath> {
        let project = copy.project_id.as_deref().or(self.service.project_id());
        let Some(project) = project else {
            let why = "there is no project to copy into";
            let hint = "name one, or set TINKER_PROJECT_ID";
            return Err(Error::new(ErrorKind::InvalidInput, why).with_hint(hint));
        };
        let mut headers = named("copy_weights");
        if let Some(token) = &copy.source_token {
            header::put_secret(&mut headers, wire_header::WEIGHTS_ACCESS_TOKEN, token)?;
        }
        let call = CopyWeights {
            ttl_seconds: copy.ttl_seconds,
            ..CopyWeights::into_project(copy.source.to_string(), project)
        };
        let key = uuid::Uuid::new_v4().to_string();
        let options =
            RequestOptions { headers, idempotency_key: Some(key), ..RequestOptions::default() };
        let copied = self.service.connection().await?.transport().send(&call, &options).await?;
        Ok(copied.tinker_path.parse()?)
    }
}

/// A checkpoint to copy.
#[derive(Clone, Debug)]
#[must_use]
pub struct CopyCheckpoint {
    source: TinkerPath,
    project_id: Option<String>,
    ttl_seconds: Option<u64>,
    source_token: Option<Secret>,
}

impl CopyCheckpoint {
    /// Copies this one, into the client's own project, to stay there for ever.
    pub fn of(source: TinkerPath) -> Self {
        Self { source, project_id: None, ttl_seconds: None, source_token: None }
    }

    /// Into this project.
    pub fn into_project(mut self, project_id: impl Into<String>) -> Self {
        self.project_id = Some(project_id.into());
        self
    }

    /// To be deleted after so many seconds.
    pub fn ttl_seconds(mut self, seconds: u64) -> Self {
        self.ttl_seconds = Some(seconds);
        self
    }

    /// With a key that may read the source, if the client's own may not.
    pub fn source_token(mut self, token: impl Into<Secret>) -> Self {
        self.source_token = Some(token.into());
        self
    }
}
