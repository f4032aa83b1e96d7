//! Queues the requests of a model in call order. Each request is sent by a task of its own.

use std::future::ready;
use std::sync::Arc;

use tinkex_wire::{ModelId, Seq, SubmitRequest};

use crate::call_options::ApplyOptions as _;
use crate::error::Result;
use crate::future::{ApiFuture, Poller, Submitted};
use crate::transport::RequestOptions;
use crate::transport::request::sent_flag::SentFlag;

use super::call_order::{AssignedSeq, Reservation};
use super::{TrainingClient, TrainingShared};

impl TrainingClient {
    /// Reserves a position in the call order, and spawns a task that runs `work` with the
    /// reservation.
    pub(super) fn enqueue_work<T, W>(
        &self,
        work: impl FnOnce(Arc<TrainingShared>, Reservation) -> W,
    ) -> ApiFuture<T>
    where
        T: Send + 'static,
        W: Future<Output = Result<T>> + Send + 'static,
    {
        let shared = Arc::clone(&self.0);
        let work = work(Arc::clone(&shared), shared.call_order.reserve());
        self.start(async move {
            let result = work.await;
            shared.session.connection().record_failure(result)
        })
    }

    /// Spawns a task that runs `work`, and cancels `work` if the client is closed.
    pub(super) fn start<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> ApiFuture<T> {
        let shared = Arc::clone(&self.0);
        let pending_call = shared.pending_calls.begin();
        let _entered = self.0.session.settings().enter_runtime();
        ApiFuture::start(async move {
            let result = shared.session.run_until_closed(work).await;
            drop(pending_call);
            result
        })
        .limit(self.0.options.call_limit())
    }

    /// Queues one request and converts its result with `finish`.
    pub(super) fn enqueue<S, T>(
        &self,
        request: impl FnOnce(ModelId, Seq) -> S + Send + 'static,
        finish: impl FnOnce(S::Output) -> Result<T> + Send + 'static,
    ) -> ApiFuture<T>
    where
        S: SubmitRequest<Output: Send> + Send + Sync + 'static,
        T: Send + 'static,
    {
        let request = move |(), model, seq| request(model, seq);
        self.enqueue_after(ready(Ok(())), request, finish)
    }

    /// Queues one request that is built from the output of `prepare`.
    ///
    /// Reserves the request's position before `prepare` runs, so that the call order is kept.
    pub(super) fn enqueue_after<P, S, T>(
        &self,
        prepare: impl Future<Output = Result<P>> + Send + 'static,
        request: impl FnOnce(P, ModelId, Seq) -> S + Send + 'static,
        finish: impl FnOnce(S::Output) -> Result<T> + Send + 'static,
    ) -> ApiFuture<T>
    where
        P: Send + 'static,
        S: SubmitRequest<Output: Send> + Send + Sync + 'static,
        T: Send + 'static,
    {
        self.enqueue_work(|shared, mut reservation| async move {
            let prepared = prepare.await?;
            reservation.wait().await;
            let request = |model, seq| request(prepared, model, seq);
            finish(shared.send_next(reservation, request).await?)
        })
    }
}

impl TrainingShared {
    /// Sends the request that `request` creates for the next sequence number, and waits for its
    /// result. The position of `reservation` must be current.
    pub(super) async fn send_next<S: SubmitRequest>(
        &self,
        mut reservation: Reservation,
        request: impl FnOnce(ModelId, Seq) -> S,
    ) -> Result<S::Output> {
        let AssignedSeq { seq, sent } = reservation.assign_one();
        let request = request(self.model_id.clone(), seq);
        self.send_numbered(reservation, sent, &request).await
    }

    /// Sends a request that has its sequence number, releases the position of `reservation`, and
    /// waits for the result.
    pub(super) async fn send_numbered<S: SubmitRequest>(
        &self,
        reservation: Reservation,
        sent: SentFlag,
        request: &S,
    ) -> Result<S::Output> {
        let flag = sent.clone();
        let options = RequestOptions { sent: Some(sent), ..self.options.request_options() };
        let submitted = self.submit(request, &options).await;
        if let Err(error) = &submitted
            && error.is_missing_endpoint()
        {
            // A server without the endpoint has not read the sequence number, and would wait for
            // it before it executes later requests.
            flag.reset();
        }
        // Release the position before polling, so that the next request is sent meanwhile.
        drop(reservation);
        self.poller().result::<S>(&submitted?).await
    }

    /// Sends a request, and returns once the server has accepted it.
    pub(super) async fn submit<S: SubmitRequest>(
        &self,
        request: &S,
        options: &RequestOptions,
    ) -> Result<Submitted> {
        Submitted::send(&self.session, request, options).await
    }

    pub(super) fn poller(&self) -> Poller<'_> {
        Poller::new(&self.session, &self.log).with_options(&self.options)
    }
}
