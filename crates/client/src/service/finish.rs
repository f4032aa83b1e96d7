//! Ends a program's use of a server: [`ServiceClient::finish`] and [`ServiceClient::abort`].

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
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

/// Guard that, on drop, wakes the callers that wait for the client to be closed. A guard, so that
/// the callers also wake if the task that closes the client panics or its runtime ends.
struct EndSignal(Arc<ServiceShared>);

impl Drop for EndSignal {
    fn drop(&mut self) {
        self.0.close_finished.send_replace(true);
    }
}

impl ServiceClient {
    /// Completes queued training requests, reports the program as successful to the server, and
    /// closes the client. A program that failed calls
    /// [`finish_with_error`](Self::finish_with_error).
    ///
    /// ```no_run
    /// # async fn train(service: &tinkex::ServiceClient) -> tinkex::Result<()> { Ok(()) }
    /// # async fn run() -> tinkex::Result<()> {
    /// let service = tinkex::ServiceClient::from_env()?;
    /// train(&service).await?;
    /// service.finish().await;
    /// # Ok(()) }
    /// ```
    ///
    /// Waits until every training request that was queued before has been answered, as
    /// [`TrainingClient::flush`](crate::TrainingClient::flush) does for one model, and then
    /// finishes the session. Afterwards all calls of this client, its clones and the clients made
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
    #[must_use = "the program may end before the queued requests do; await the future"]
    pub fn finish(&self) -> impl Future<Output = ()> + Send + use<> {
        self.finish_session(SessionEnd { reason: FinishReason::Success, detail: None })
    }

    /// Completes queued training requests, reports the program as failed with the message of
    /// `error`, and closes the client. Records the error in telemetry, if enabled.
    ///
    /// ```no_run
    /// # async fn train(service: &tinkex::ServiceClient) -> tinkex::Result<()> { Ok(()) }
    /// # async fn run() -> tinkex::Result<()> {
    /// let service = tinkex::ServiceClient::from_env()?;
    /// let result = train(&service).await;
    /// match &result {
    ///     Ok(()) => service.finish().await,
    ///     Err(error) => service.finish_with_error(error).await,
    /// }
    /// result
    /// # }
    /// ```
    ///
    /// Otherwise like [`finish`](Self::finish). The error may be of any type that implements
    /// `Display`, such as `anyhow::Error`.
    ///
    /// # Cancel safety
    /// Finishing continues if the future is dropped.
    #[must_use = "the program may end before the queued requests do; await the future"]
    pub fn finish_with_error<E: fmt::Display + 'static>(
        &self,
        error: &E,
    ) -> impl Future<Output = ()> + Send + use<E> {
        let detail = self.report_program_error(error);
        self.finish_session(SessionEnd { reason: FinishReason::Errored, detail: Some(detail) })
    }

    fn finish_session(&self, end: SessionEnd) -> impl Future<Output = ()> + Send + use<> {
        self.end_once(|shared| async move {
            if let Some(session) = shared.session.get() {
                session.drain().await;
            }
            shared.close(end).await;
        })
    }

    /// Drops queued requests and closes the client.
    ///
    /// Pending and later calls of this client, its clones and the clients made from them fail at
    /// once with [`ErrorKind::Closed`](crate::ErrorKind::Closed). Requests that the server has
    /// accepted are still executed. Reports the session as interrupted if the server responds;
    /// takes at most 5 seconds. Never fails.
    ///
    /// # Cancel safety
    /// Closing continues if the future is dropped.
    #[must_use = "the program may end before the session is closed; await the future"]
    pub fn abort(&self) -> impl Future<Output = ()> + Send + use<> {
        self.0.aborted.store(true, Ordering::Release);
        for transport in self.0.transports() {
            transport.close();
        }
        let end = SessionEnd { reason: FinishReason::Interrupted, detail: None };
        let ended = self.end_once(|shared| async move {
            if timeout(ABORT_TIMEOUT, shared.close(end)).await.is_err() {
                tracing::debug!("cannot report the end of the session in time");
            }
        });
        // `ABORT_TIMEOUT` also limits the wait for an earlier call of `finish` that is still closing
        // the client. The wait needs a timer, hence a task in a runtime.
        let _entered = self.0.settings.enter_runtime();
        let waited = ApiFuture::start(async move {
            let _ = timeout(ABORT_TIMEOUT, ended).await;
            Ok(())
        });
        async {
            // Fails only outside of a runtime: `end_once` has logged a warning.
            let _ = waited.await;
        }
    }

    /// Spawns a task that runs `end`, and returns a future that resolves when the task has ended.
    /// If another call has already spawned such a task, the future waits for that task instead.
    fn end_once<E, F>(&self, end: E) -> impl Future<Output = ()> + Send + use<E, F>
    where
        E: FnOnce(Arc<ServiceShared>) -> F,
        F: Future<Output = ()> + Send + 'static,
    {
        let shared = Arc::clone(&self.0.shared);
        let _entered = self.0.settings.enter_runtime();
        let started = task::require_runtime().map(|()| {
            let is_first = !shared.closed.swap(true, Ordering::AcqRel);
            is_first.then(|| {
                let end_signal = EndSignal(Arc::clone(&shared));
                let work = end(Arc::clone(&shared));
                ApiFuture::start(async move {
                    let _end_signal = end_signal;
                    work.await;
                    Ok(())
                })
            })
        });
        async move {
            let ended = match started {
                Ok(Some(ended)) => ended.await,
                Ok(None) => {
                    let _ = shared.close_finished.subscribe().wait_for(|finished| *finished).await;
                    Ok(())
                }
                Err(error) => Err(error),
            };
            if let Err(error) = ended {
                tracing::warn!(%error, "cannot finish the session");
            }
        }
    }

    /// Records `error`, which ends the program, in telemetry, and returns its message.
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
            // `Session::close` also closes the connection.
            session.close(end.reason, end.detail).await;
        } else if let Some(connection) = self.connection.get() {
            connection.close().await;
        }
        for session in self.restored_sessions() {
            session.leave().await;
        }
    }

    /// Returns the open sessions that other processes created.
    fn restored_sessions(&self) -> Vec<Arc<crate::session::Session>> {
        let restored = self.restored.lock();
        restored.values().filter_map(Weak::upgrade).collect()
    }

    /// Returns the transports of all open connections.
    fn transports(&self) -> Vec<Arc<crate::transport::Transport>> {
        let own = self.connection.get().map(|connection| Connection::transport(connection).clone());
        let restored = self.restored_sessions().into_iter();
        own.into_iter().chain(restored.map(|session| Arc::clone(session.transport()))).collect()
    }
}
