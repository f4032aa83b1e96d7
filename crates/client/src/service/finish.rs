//! Ends a program's use of a server: [`ServiceClient::finish`] and [`ServiceClient::abort`].

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use tinkex_wire::FinishReason;
use tokio::time::timeout;

use crate::connection::Connection;
use crate::error::Error;
use crate::future::ApiFuture;
use crate::task;
use crate::telemetry::safe_message;

use super::{ServiceClient, ServiceShared};

/// Longest time that [`ServiceClient::abort`] takes.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason and detail that the client reports to the server when a session ends.
struct SessionEnd {
    reason: FinishReason,
    detail: Option<String>,
}

/// Error of the program that does not implement [`std::error::Error`], such as `anyhow::Error`.
#[derive(Debug)]
struct ProgramError(String);

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for ProgramError {}

/// Guard that, on drop, wakes the callers that wait for the client to be closed. They wake also if
/// the task that closes it panics or its runtime ends.
struct EndSignal(Arc<ServiceShared>);

impl Drop for EndSignal {
    fn drop(&mut self) {
        self.0.close_finished.send_replace(true);
    }
}

impl ServiceClient {
    /// Completes queued training requests, reports the program's result to the server, and closes
    /// the client.
    ///
    /// Call it at the end of a program with the program's own result, then return that result:
    ///
    /// ```no_run
    /// # async fn train(service: &tinkex::ServiceClient) -> tinkex::Result<()> { Ok(()) }
    /// # async fn run() -> tinkex::Result<()> {
    /// let service = tinkex::ServiceClient::from_env()?;
    /// let result = train(&service).await;
    /// service.finish(&result).await;
    /// result
    /// # }
    /// ```
    ///
    /// Waits until every training request that was queued before has been answered, as
    /// [`TrainingClient::flush`](crate::TrainingClient::flush) does for one model. Then it finishes
    /// the session as successful, or as failed with the message of the error, which is also
    /// recorded in telemetry. Afterwards all calls of this client, its clones and the clients made
    /// from them fail with [`ErrorKind::Closed`](crate::ErrorKind::Closed), as do samples without a
    /// result. A second call waits for the first. If all clients are dropped instead, queued
    /// training requests are completed too, and the server ends the session some time after its
    /// last heartbeat.
    ///
    /// Never fails: if the end of the session cannot be reported, a warning is logged. Waits as
    /// long as the server responds, and gives up at the latest 6 minutes after its last response;
    /// [`abort`](Self::abort) from another task ends the wait at once.
    ///
    /// # Cancel safety
    /// Finishing continues if the future is dropped.
    pub fn finish<T, E: fmt::Display + 'static>(
        &self,
        result: &std::result::Result<T, E>,
    ) -> impl Future<Output = ()> + Send + use<T, E> {
        let end = match result {
            Ok(_) => SessionEnd { reason: FinishReason::Success, detail: None },
            Err(error) => {
                let detail = self.report_program_error(error);
                SessionEnd { reason: FinishReason::Errored, detail: Some(detail) }
            }
        };
        let service = self.clone();
        async move {
            service
                .end_once(|shared| async move {
                    if let Some(session) = shared.session.get() {
                        session.drain().await;
                    }
                    shared.close(end).await;
                })
                .await;
        }
    }

    /// Drops queued requests and closes the client.
    ///
    /// Pending calls of this client, its clones and the clients made from them fail with
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) at once, and so do later ones. Requests that
    /// the server has accepted are still executed. Reports the session as interrupted if the server
    /// responds; takes at most 5 seconds. Never fails.
    ///
    /// # Cancel safety
    /// Closing continues if the future is dropped.
    pub async fn abort(&self) {
        self.0.aborted.store(true, Ordering::Release);
        for transport in self.0.transports() {
            transport.close();
        }
        if let Err(error) = task::require_runtime() {
            tracing::warn!(%error, "cannot finish the session");
            return;
        }
        let end = SessionEnd { reason: FinishReason::Interrupted, detail: None };
        let ended = self.end_once(|shared| async move {
            if timeout(ABORT_TIMEOUT, shared.close(end)).await.is_err() {
                tracing::debug!("cannot report the end of the session in time");
            }
        });
        // The limit applies also if `finish` was called before and is still closing.
        let _ = timeout(ABORT_TIMEOUT, ended).await;
    }

    /// Runs `end` in a task of its own and waits for it. If another call has started such a task,
    /// waits for that one instead.
    async fn end_once<F>(&self, end: impl FnOnce(Arc<ServiceShared>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        if let Err(error) = task::require_runtime() {
            tracing::warn!(%error, "cannot finish the session");
            return;
        }
        if self.0.closed.swap(true, Ordering::AcqRel) {
            let _ = self.0.close_finished.subscribe().wait_for(|finished| *finished).await;
            return;
        }
        let shared = Arc::clone(&self.0.shared);
        let end_signal = EndSignal(Arc::clone(&shared));
        let work = end(shared);
        let ended = ApiFuture::start(async move {
            let _end_signal = end_signal;
            work.await;
            Ok(())
        });
        if let Err(error) = ended.await {
            tracing::warn!(%error, "cannot finish the session");
        }
    }

    /// Records the error that ends the program in telemetry, and returns its message.
    fn report_program_error<E: fmt::Display + 'static>(&self, error: &E) -> String {
        type Boxed = Box<dyn StdError>;
        type BoxedSend = Box<dyn StdError + Send + Sync>;
        let any: &dyn Any = error;
        if let Some(error) = any.downcast_ref::<Error>() {
            self.report(error);
            return safe_message(error);
        }
        // The alternate form of `anyhow::Error` includes its causes.
        let text = format!("{error:#}");
        if let Some(error) = any.downcast_ref::<Boxed>() {
            self.report(&**error);
        } else if let Some(error) = any.downcast_ref::<BoxedSend>() {
            self.report(&**error);
        } else {
            self.report(&ProgramError(text.clone()));
        }
        text
    }
}

impl ServiceShared {
    /// Finishes the session and closes all connections.
    async fn close(&self, mut end: SessionEnd) {
        if self.aborted.load(Ordering::Acquire) {
            end = SessionEnd { reason: FinishReason::Interrupted, detail: None };
        }
        if let Some(session) = self.session.get() {
            // Closes the connection too.
            session.close(end.reason, end.detail).await;
        } else if let Some(connection) = self.connection.get() {
            connection.close().await;
        }
        for session in self.restored_sessions() {
            session.leave().await;
        }
    }

    /// Returns the open sessions of other processes.
    fn restored_sessions(&self) -> Vec<Arc<crate::session::Session>> {
        let restored = self.restored.lock().unwrap_or_else(PoisonError::into_inner);
        restored.values().filter_map(Weak::upgrade).collect()
    }

    /// Returns the transports of all open connections.
    fn transports(&self) -> Vec<Arc<crate::transport::Transport>> {
        let own = self.connection.get().map(|connection| Connection::transport(connection).clone());
        let restored = self.restored_sessions().into_iter();
        own.into_iter().chain(restored.map(|session| Arc::clone(session.transport()))).collect()
    }
}
