//! [`BodyReader`]: reads a request body within its deadline.
//!
//! Every request body is read by this type, so that no client can hold a connection by sending a
//! body slowly.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use tinkex_store::error::ServerError;
use tokio::time::{Instant, timeout_at};

use super::IncomingBody;
use super::error::HttpError;

/// Minimum rate at which a body must arrive, in bytes per second, after the first timeout.
const MIN_RATE: u64 = 64 << 10;

/// Reads the data of a body. The body must arrive within the timeout, plus one second for each
/// [`MIN_RATE`] bytes that have arrived, and no part may take longer than the timeout.
pub(super) struct BodyReader<'a, B> {
    body: &'a mut B,
    timeout: Duration,
    /// Time at which the body must have arrived, without the time for the bytes that arrived.
    deadline: Instant,
    /// Number of bytes that have arrived.
    received: u64,
}

impl<'a, B: IncomingBody> BodyReader<'a, B> {
    /// Starts the deadline.
    pub(super) fn new(body: &'a mut B, timeout: Duration) -> Self {
        Self { body, timeout, deadline: Instant::now() + timeout, received: 0 }
    }

    /// Returns the next part of the body, or `None` at its end.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, HttpError> {
        let earned = Duration::from_millis(self.received.saturating_mul(1_000) / MIN_RATE);
        let deadline = (self.deadline + earned).min(Instant::now() + self.timeout);
        loop {
            let frame = match timeout_at(deadline, self.body.frame()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => {
                    let message = format!("cannot read the body: {error}");
                    return Err(ServerError::invalid(message).into());
                }
                Err(_) => return Err(HttpError::body_timeout(self.timeout)),
            };
            // Ignore trailers.
            let Ok(data) = frame.into_data() else { continue };
            self.received += data.len() as u64;
            return Ok(Some(data));
        }
    }

    /// Waits for work of the server. The time does not count for the deadline.
    pub(super) async fn pause<T>(&mut self, work: impl Future<Output = T>) -> T {
        let started = Instant::now();
        let output = work.await;
        self.deadline += started.elapsed();
        output
    }

    /// Reads the rest of a body of at most `limit` bytes.
    pub(super) async fn read_to_end(mut self, limit: usize) -> Result<Vec<u8>, HttpError> {
        let mut content = Vec::new();
        while let Some(data) = self.next().await? {
            if content.len() + data.len() > limit {
                return Err(super::body::too_large(limit).into());
            }
            content.extend_from_slice(&data);
        }
        Ok(content)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use http::StatusCode;
    use hyper::body::{Body, Frame};
    use tokio::time::{Interval, interval};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Endless body: `size` bytes in each period.
    struct Trickle {
        interval: Interval,
        size: usize,
    }

    impl Body for Trickle {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            let size = self.size;
            let tick = self.interval.poll_tick(context);
            tick.map(|_| Some(Ok(Frame::data(Bytes::from(vec![0; size])))))
        }
    }

    /// Reads up to a minute of bodies and returns the status with which reading failed.
    async fn status(period: Duration, size: usize, limit: usize) -> StatusCode {
        let mut body = Trickle { interval: interval(period), size };
        let started = Instant::now();
        let error = BodyReader::new(&mut body, TIMEOUT).read_to_end(limit).await.unwrap_err();
        assert!(started.elapsed() <= 3 * TIMEOUT);
        error.status
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_has_one_deadline() {
        let second = Duration::from_secs(1);
        assert_eq!(status(second, 1, 1 << 20).await, StatusCode::REQUEST_TIMEOUT);
        assert_eq!(status(31 * second, 1 << 20, 8 << 20).await, StatusCode::REQUEST_TIMEOUT);
        // A large body takes longer than the timeout, at more than the minimum rate.
        let rate = usize::try_from(MIN_RATE).unwrap();
        assert_eq!(status(second, rate, 80 * rate).await, StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_the_server_does_not_count() {
        let mut body = Trickle { interval: interval(Duration::from_secs(1)), size: 1 };
        let mut reader = BodyReader::new(&mut body, TIMEOUT);
        assert!(reader.next().await.unwrap().is_some());
        reader.pause(tokio::time::sleep(2 * TIMEOUT)).await;
        assert!(reader.next().await.unwrap().is_some());
    }
}
