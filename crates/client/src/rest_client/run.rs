//! Training runs and sampling sessions.

use futures_util::Stream;
use tinkex_wire::rest::{
    AccessScope, GetSampler, GetTrainingRun, ListTrainingRuns, SamplerInfo, TrainingRun,
    TrainingRunPage,
};
use tinkex_wire::{ModelId, SamplerId, TinkerPath};

use crate::error::Result;

use super::RestClient;
use super::page::{self, Page};

/// How many runs one request brings.
const PAGE: u64 = 100;

impl RestClient {
    /// One page of training runs, newest first.
    ///
    /// # Errors
    /// If the server cannot be asked.
    pub async fn list_training_runs(&self, list: &ListTrainingRuns) -> Result<TrainingRunPage> {
        self.call("list_training_runs", list).await
    }

    /// All training runs, newest first, fetched as they are asked for. The limit is ignored.
    pub fn training_runs(&self, list: ListTrainingRuns) -> impl Stream<Item = Result<TrainingRun>> {
        page::all(list.offset, PAGE, move |offset, limit| {
            let (client, list) = (self.clone(), list.clone().offset(offset).limit(limit));
            async move {
                let page = client.list_training_runs(&list).await?;
                Ok(Page { items: page.training_runs, total: Some(page.cursor.total_count) })
            }
        })
    }

    /// One training run.
    ///
    /// # Errors
    /// If there is none of that id among those in scope.
    pub async fn get_training_run(
        &self,
        run_id: impl Into<ModelId>,
        access_scope: AccessScope,
    ) -> Result<TrainingRun> {
        let call = GetTrainingRun::new(run_id).query(access_scope);
        self.call("get_training_run", &call).await
    }

    /// The training run that a checkpoint came from.
    ///
    /// # Errors
    /// If there is none among those in scope.
    pub async fn get_training_run_by_path(
        &self,
        path: &TinkerPath,
        access_scope: AccessScope,
    ) -> Result<TrainingRun> {
        let call = GetTrainingRun::new(path.run().clone()).query(access_scope);
        self.call("get_training_run_by_tinker_path", &call).await
    }

    /// What a sampling session samples from.
    ///
    /// # Errors
    /// If there is none of that id.
    pub async fn get_sampler(&self, sampler_id: impl Into<SamplerId>) -> Result<SamplerInfo> {
        self.call("get_sampler", &GetSampler::new(sampler_id)).await
    }
}
