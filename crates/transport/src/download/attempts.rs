//! [`Attempts`]: counts failed attempts of downloads and hub requests, and waits between them.

use std::time::Duration;

use tokio::time::Instant;
use url::Url;

use crate::error::Result;
use crate::http::Lane;
use crate::retry::delay;
use crate::retry::failed_attempt::FailedAttempt;
use crate::targets;

/// Shortest wait that is logged as a warning: a user would otherwise see no reason for it.
const LONG_WAIT: Duration = Duration::from_secs(15);

/// Retry state of one operation: counts the failures since the last progress.
#[derive(Debug)]
pub struct Attempts {
    max_retries: u32,
    /// Time after the first attempt after which no further attempt starts; unlimited if `None`.
    time_limit: Option<Duration>,
    start: Instant,
    failures: u32,
}

impl Attempts {
    /// Allows `max_retries` consecutive failures to be retried.
    pub fn new(max_retries: u32) -> Self {
        Self { max_retries, time_limit: None, start: Instant::now(), failures: 0 }
    }

    /// Sets the time after the first attempt after which no further attempt starts.
    pub fn within(mut self, time_limit: Option<Duration>) -> Self {
        self.time_limit = time_limit;
        self
    }

    /// Resets the count of consecutive failures.
    pub fn record_progress(&mut self) {
        self.failures = 0;
    }

    /// Records a failed attempt and waits before the next one. The retry is logged with `lane` and
    /// the origin of `url`, the URL that was requested last.
    ///
    /// # Errors
    /// The error of the attempt, if it is not retryable or no retry is left.
    pub async fn wait_before_retry(
        &mut self,
        failed: FailedAttempt,
        lane: Lane,
        url: &Url,
    ) -> Result<()> {
        self.failures += 1;
        let retry_after = delay::to_duration(failed.retry_after);
        let wait = delay::before_retry(self.failures - 1, retry_after, fastrand::f64());
        let late =
            self.time_limit.is_some_and(|limit| self.start.elapsed().saturating_add(wait) > limit);
        if late || self.failures > self.max_retries || !failed.is_retryable() {
            return Err(failed.error.after(self.failures, self.start.elapsed()));
        }
        let error = failed.error;
        let status = error.status();
        let seconds = wait.as_secs_f64();
        let attempt = self.failures;
        // Do not log the whole URL: a signed query grants access like a credential.
        let lane = lane.as_str();
        let origin = url.origin().ascii_serialization();
        if wait >= LONG_WAIT {
            tracing::warn!(
                target: targets::RETRY, lane, origin, %error, status, seconds, attempt,
                "retrying request"
            );
        } else {
            tracing::debug!(
                target: targets::RETRY, lane, origin, %error, status, seconds, attempt,
                "retrying request"
            );
        }
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::*;
    use crate::error::{Error, ErrorKind};

    fn lost() -> FailedAttempt {
        Error::new(ErrorKind::Connect, "connection lost").into()
    }

    async fn wait(attempts: &mut Attempts, failed: FailedAttempt) -> Result<()> {
        let url = Url::parse("https://files.test/a").unwrap();
        attempts.wait_before_retry(failed, Lane::File, &url).await
    }

    #[tokio::test(start_paused = true)]
    async fn only_consecutive_failures_are_limited() {
        let mut attempts = Attempts::new(2);
        for _ in 0..3 {
            wait(&mut attempts, lost()).await.unwrap();
            wait(&mut attempts, lost()).await.unwrap();
            attempts.record_progress();
        }
        wait(&mut attempts, lost()).await.unwrap();
        wait(&mut attempts, lost()).await.unwrap();
        let error = wait(&mut attempts, lost()).await.unwrap_err();
        assert_eq!((error.kind(), error.attempts()), (ErrorKind::Connect, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn permanent_errors_and_the_time_limit_end_the_retries() {
        let refused = FailedAttempt::from_parts(403, &HeaderMap::new(), b"");
        let error = wait(&mut Attempts::new(5), refused).await.unwrap_err();
        assert_eq!(error.status(), Some(403));
        let mut attempts = Attempts::new(100).within(Some(Duration::from_secs(20)));
        let start = Instant::now();
        while wait(&mut attempts, lost()).await.is_ok() {}
        assert!(start.elapsed() <= Duration::from_secs(20));
    }

    #[tokio::test(start_paused = true)]
    async fn the_delay_that_the_server_asks_for_is_respected() {
        let headers = [(http::header::RETRY_AFTER, http::HeaderValue::from_static("7"))];
        let busy = FailedAttempt::from_parts(503, &headers.into_iter().collect(), b"");
        let start = Instant::now();
        wait(&mut Attempts::new(1), busy).await.unwrap();
        assert_eq!(start.elapsed(), Duration::from_secs(7));
    }
}
