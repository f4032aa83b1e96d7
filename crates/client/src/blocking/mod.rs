//! Blocking interface for scripts and programs without async code (feature `blocking`).
//!
//! The clients of this module wrap the clients of the crate and a runtime on a thread of its own.
//! A call [starts](crate#calls) when its method is called. The method returns the result, or a
//! [`Pending`] value whose [`wait`](Pending::wait) returns the result, so that several requests can
//! be in flight:
//!
//! ```no_run
//! use tinkex::blocking::ServiceClient;
//! use tinkex::{AdamParams, Datum, LossFn, SamplingParams};
//!
//! fn main() -> tinkex::Result<()> {
//!     let service = ServiceClient::from_env()?;
//!     let model = service.create_lora_training_client("Qwen/Qwen3-8B").wait()?;
//!
//!     let data = vec![Datum::completion([1, 2, 3], [4, 5])?];
//!     let pass = model.forward_backward(data, LossFn::CrossEntropy);
//!     let step = model.optim_step(AdamParams::with_learning_rate(1e-4)); // both are in flight
//!     println!("{:?}", pass.wait()?.loss());
//!     step.wait()?;
//!
//!     let sampler = model.save_weights_and_get_sampling_client().wait()?;
//!     let params = SamplingParams::new().max_tokens(64);
//!     let response = sampler.sample([1, 2, 3], params).wait()?;
//!     println!("{:?}", response.sequences[0].tokens);
//!     Ok(())
//! }
//! ```
//!
//! # Where it works
//!
//! On threads that may block: threads without an async runtime, and in a tokio runtime the closures
//! of `tokio::task::spawn_blocking` and `tokio::task::block_in_place`. In an async task, every call
//! that would block returns an error of kind [`ErrorKind::Config`](crate::ErrorKind::Config); use
//! the async clients there.
//!
//! # End of the program
//!
//! The runtime ends with the last client: wait for the requests whose effect matters before that,
//! or end with [`finish`](ServiceClient::finish), which completes all queued work.

mod clients;
mod runtime;

use std::fmt;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, Stream, StreamExt as _};
use parking_lot::Mutex;

use crate::error::Result;
use crate::service::ServiceClientBuilder;

use runtime::RuntimeThread;

/// Blocking form of [`tinkex::ServiceClient`](crate::ServiceClient).
pub type ServiceClient = Blocking<crate::ServiceClient>;
/// Blocking form of [`tinkex::TrainingClient`](crate::TrainingClient).
pub type TrainingClient = Blocking<crate::TrainingClient>;
/// Blocking form of [`tinkex::SamplingClient`](crate::SamplingClient).
pub type SamplingClient = Blocking<crate::SamplingClient>;
/// Blocking form of [`tinkex::RestClient`](crate::RestClient).
pub type RestClient = Blocking<crate::RestClient>;
/// Blocking form of [`tinkex::AdminClient`](crate::AdminClient).
pub type AdminClient = Blocking<crate::AdminClient>;

/// Client of the crate with a runtime on a thread of its own. Cheap to clone.
///
/// [`client`](Self::client) and [`block_on`](Self::block_on) give access to everything of the async
/// client that has no blocking form.
#[derive(Clone)]
pub struct Blocking<C> {
    client: C,
    runtime: RuntimeThread,
}

impl<C> Blocking<C> {
    /// Returns the async client.
    #[must_use]
    pub fn client(&self) -> &C {
        &self.client
    }

    /// Runs a future to its end, for example a call of [`client`](Self::client).
    ///
    /// ```no_run
    /// # fn run(service: tinkex::blocking::ServiceClient) -> tinkex::Result<()> {
    /// let time = service.block_on(async { service.client().server_time().await })?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) in an async task; otherwise the error of the
    /// future.
    pub fn block_on<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        self.runtime.block_on(future)
    }

    /// Starts a call that has no result and waits for it. In an async task, logs a warning instead.
    fn wait_or_warn<F: Future<Output = ()>>(&self, call: impl FnOnce(&C) -> F) {
        let waited = self.block_on(async {
            call(&self.client).await;
            Ok(())
        });
        if let Err(error) = waited {
            tracing::warn!(%error, "the call has no effect");
        }
    }

    /// Wraps another client with the same runtime.
    fn wrap<D>(&self, client: D) -> Blocking<D> {
        Blocking { client, runtime: self.runtime.clone() }
    }

    /// Returns a transfer that is not started yet.
    fn prepare<B>(&self, call: B) -> BlockingCall<B> {
        BlockingCall { call, runtime: self.runtime.clone() }
    }

    /// Starts a request. In an async task nothing is started, and `wait` returns the error.
    fn start<T, F>(&self, call: impl FnOnce(&C) -> F) -> Pending<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let runtime = self.runtime.clone();
        let future: BoxFuture<'static, Result<T>> = match runtime.require_no_async() {
            Ok(()) => Box::pin(runtime.enter(|| call(&self.client))),
            Err(error) => Box::pin(async { Err(error) }),
        };
        Pending::new(future, runtime)
    }

    /// Starts a request whose result is a client.
    fn start_wrapped<D, F>(&self, call: impl FnOnce(&C) -> F) -> Pending<Blocking<D>>
    where
        F: Future<Output = Result<D>> + Send + 'static,
    {
        let runtime = self.runtime.clone();
        self.start(|client| {
            let started = call(client);
            async move { Ok(Blocking { client: started.await?, runtime }) }
        })
    }

    /// Returns an iterator over the items of a stream.
    fn iterate<'a, T>(
        &self,
        stream: impl Stream<Item = Result<T>> + Send + 'a,
    ) -> BlockingIter<'a, T> {
        BlockingIter::new(stream, self.runtime.clone())
    }
}

impl ServiceClient {
    /// Creates a client from environment variables, like
    /// [`tinkex::ServiceClient::from_env`](crate::ServiceClient::from_env).
    ///
    /// # Errors
    /// If no credential is found, a variable is invalid, or the thread cannot be started.
    pub fn from_env() -> Result<Self> {
        Self::from_builder(crate::ServiceClient::builder())
    }

    /// Creates a client with the settings of a builder.
    ///
    /// ```
    /// use tinkex::blocking::ServiceClient;
    ///
    /// let builder = tinkex::ServiceClient::builder().api_key("tml-example");
    /// let service = ServiceClient::from_builder(builder)?;
    /// # Ok::<_, tinkex::Error>(())
    /// ```
    ///
    /// # Errors
    /// If no credential is found, a setting is invalid, or the thread cannot be started.
    pub fn from_builder(builder: ServiceClientBuilder) -> Result<Self> {
        Ok(Self { client: builder.build()?, runtime: RuntimeThread::start()? })
    }
}

impl<C: fmt::Debug> fmt::Debug for Blocking<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Blocking").field(&self.client).finish()
    }
}

/// Request that has started; [`wait`](Self::wait) returns its result.
///
/// Dropping it has the effect of dropping the future of the async client: a training request
/// continues while a client exists, and a sample is cancelled.
#[must_use = "call `wait` for the result"]
pub struct Pending<T> {
    state: Mutex<PendingState<T>>,
    runtime: RuntimeThread,
}

/// Progress of a request, as far as its [`Pending`] value knows.
enum PendingState<T> {
    Waiting(BoxFuture<'static, Result<T>>),
    Ready(Result<T>),
}

impl<T> Pending<T> {
    fn new(future: BoxFuture<'static, Result<T>>, runtime: RuntimeThread) -> Self {
        Self { state: Mutex::new(PendingState::Waiting(future)), runtime }
    }

    /// Returns whether the result has arrived, so that [`wait`](Self::wait) returns at once. Never
    /// blocks.
    ///
    /// ```no_run
    /// # fn run(model: tinkex::blocking::TrainingClient) -> tinkex::Result<()> {
    /// let saved = model.save_state("step-100");
    /// // Do other work.
    /// if saved.is_ready() {
    ///     println!("{}", saved.wait()?);
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let mut state = self.state.lock();
        let PendingState::Waiting(future) = &mut *state else { return true };
        // A task on the runtime's thread makes the progress, so a waker is not needed.
        let mut context = Context::from_waker(Waker::noop());
        let polled = self.runtime.enter(|| future.as_mut().poll(&mut context));
        match polled {
            Poll::Ready(result) => {
                *state = PendingState::Ready(result);
                true
            }
            Poll::Pending => false,
        }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) where blocking is not possible (see the
    /// [module](self#where-it-works)); otherwise the error of the request.
    pub fn wait(self) -> Result<T> {
        match self.state.into_inner() {
            PendingState::Waiting(future) => self.runtime.block_on(future),
            PendingState::Ready(result) => result,
        }
    }

    /// Waits at most `timeout` for the result. If the result has not arrived by then, returns this
    /// value, with which the program can wait again; the request continues.
    ///
    /// ```no_run
    /// # fn run(model: tinkex::blocking::TrainingClient) -> tinkex::Result<()> {
    /// use std::time::Duration;
    ///
    /// let mut saving = model.save_state("step-100");
    /// let path = loop {
    ///     match saving.wait_timeout(Duration::from_secs(10)) {
    ///         Ok(result) => break result?,
    ///         Err(pending) => saving = pending,
    ///     }
    ///     println!("still saving");
    /// };
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The inner result is an error as in [`wait`](Self::wait).
    pub fn wait_timeout(self, timeout: Duration) -> std::result::Result<Result<T>, Self> {
        let Self { state, runtime } = self;
        let mut future = match state.into_inner() {
            PendingState::Waiting(future) => future,
            PendingState::Ready(result) => return Ok(result),
        };
        let waited =
            runtime.block_on(async { Ok(tokio::time::timeout(timeout, &mut future).await.ok()) });
        match waited {
            Ok(Some(result)) => Ok(result),
            Ok(None) => Err(Self::new(future, runtime)),
            Err(error) => Ok(Err(error)),
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

/// Transfer of files that has not started: a download, an export or an import.
///
/// [`with`](Self::with) sets the options by the methods of the async client's builder; `wait`
/// starts the transfer and waits for its result.
#[derive(Clone, Debug)]
#[must_use = "nothing is sent until `wait` is called"]
pub struct BlockingCall<B> {
    call: B,
    runtime: RuntimeThread,
}

impl<B> BlockingCall<B> {
    /// Sets options.
    ///
    /// ```no_run
    /// # fn run(service: tinkex::blocking::ServiceClient) -> tinkex::Result<()> {
    /// let adapter = service
    ///     .rest()
    ///     .download("tinker://run/weights/final", "adapter")
    ///     .with(|download| download.exclude("*.md"))
    ///     .wait()?;
    /// # Ok(()) }
    /// ```
    pub fn with(self, options: impl FnOnce(B) -> B) -> Self {
        Self { call: options(self.call), runtime: self.runtime }
    }
}

/// Iterator over a list of the server, whose pages are fetched on demand, or over the tokens of a
/// sample.
///
/// Ends after the first error. In an async task that is an error of kind
/// [`ErrorKind::Config`](crate::ErrorKind::Config).
pub struct BlockingIter<'a, T> {
    stream: BoxStream<'a, Result<T>>,
    failed: bool,
    runtime: RuntimeThread,
}

impl<'a, T> BlockingIter<'a, T> {
    fn new(stream: impl Stream<Item = Result<T>> + Send + 'a, runtime: RuntimeThread) -> Self {
        Self { stream: stream.boxed(), failed: false, runtime }
    }
}

impl<T> Iterator for BlockingIter<'_, T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        if self.failed {
            return None;
        }
        let stream = &mut self.stream;
        let next = self.runtime.block_on(async { stream.next().await.transpose() }).transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

impl<T> fmt::Debug for BlockingIter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockingIter")
    }
}
