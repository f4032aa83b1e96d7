//! Requests about training runs and sampling sessions.

use futures_util::Stream;
use tinkex_wire::rest::{
    AccessScope, DeleteTrainingRun, GetSampler, GetTrainingRun, ListTrainingRuns, SamplerInfo,
    ShareRun, TrainingRun, TrainingRunPage, UnshareRun,
};
use tinkex_wire::{ModelId, SamplerId, TinkerPath};

use crate::error::{Error, Result, convert};
use crate::future::RequestFuture;

use super::RestClient;
use super::page::{self, ListPage};

/// Training runs per request.
const PAGE_SIZE: u64 = 100;

impl RestClient {
    /// Returns one page of training runs, newest first.
    ///
    /// # Errors
    /// If the request fails.
    pub fn list_training_runs(&self, list: &ListTrainingRuns) -> RequestFuture<TrainingRunPage> {
        self.call("list_training_runs", list.clone())
    }

    /// Returns a stream of all training runs from `list.offset` on, newest first. Pages are fetched
    /// on demand; `list.limit` is ignored.
    pub fn training_runs(&self, list: ListTrainingRuns) -> impl Stream<Item = Result<TrainingRun>> {
        page::all(list.offset, PAGE_SIZE, move |offset, limit| {
            let page = self.list_training_runs(&list.clone().offset(offset).limit(limit));
            async move {
                let page = page.await?;
                Ok(ListPage { items: page.training_runs, total: Some(page.cursor.total_count) })
            }
        })
    }

    /// Returns a training run.
    ///
    /// # Errors
    /// If the run does not exist or is out of scope.
    pub fn get_training_run(
        &self,
        run_id: impl Into<ModelId>,
        access_scope: AccessScope,
    ) -> RequestFuture<TrainingRun> {
        let request = GetTrainingRun::new(run_id).query(access_scope);
        self.call("get_training_run", request)
    }

    /// Deletes a training run and all its checkpoints, permanently. Only `tinkex` servers can.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`](crate::ErrorKind::Conflict) if a client still trains the run;
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if the run does not exist, or if the
    /// server cannot delete runs.
    pub fn delete_training_run(&self, run_id: impl Into<ModelId>) -> RequestFuture<()> {
        self.call("delete_training_run", DeleteTrainingRun::new(run_id))
    }

    /// Lets `user`, or every user if it is `None`, read a run and use its checkpoints. Only `tinkex`
    /// servers can.
    ///
    /// # Errors
    /// If the run does not exist, or belongs to another user.
    pub fn share_training_run(
        &self,
        run_id: impl Into<ModelId>,
        user: Option<String>,
    ) -> RequestFuture<()> {
        self.call("share_training_run", ShareRun::new(run_id, user))
    }

    /// Ends the sharing of a run with `user`, or with everybody if it is `None`.
    ///
    /// # Errors
    /// If the run does not exist, or belongs to another user.
    pub fn unshare_training_run(
        &self,
        run_id: impl Into<ModelId>,
        user: Option<String>,
    ) -> RequestFuture<()> {
        self.call("unshare_training_run", UnshareRun::new(run_id, user))
    }

    /// Returns the training run of a checkpoint.
    ///
    /// # Errors
    /// If the run does not exist or is out of scope.
    pub fn get_training_run_by_path(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        access_scope: AccessScope,
    ) -> RequestFuture<TrainingRun> {
        let request = convert("get_training_run_by_path", path)
            .map(|path| GetTrainingRun::new(path.run().clone()).query(access_scope));
        self.try_call("get_training_run_by_tinker_path", request)
    }

    /// Returns the weights of a sampling session.
    ///
    /// # Errors
    /// If the sampling session does not exist.
    pub fn get_sampler(&self, sampler_id: impl Into<SamplerId>) -> RequestFuture<SamplerInfo> {
        self.call("get_sampler", GetSampler::new(sampler_id))
    }
}
