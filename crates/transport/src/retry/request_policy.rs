//! [`RequestPolicy`]: lane, timeout, retries and credential of each route.

use std::time::Duration;

use tinkex_wire::Route;

use super::delay::RetryAfterRule;
use crate::http::Lane;

/// Lane, timeout, retries and credential of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestPolicy {
    pub(crate) lane: Lane,
    /// Timeout of one attempt.
    pub(crate) timeout: Duration,
    /// Maximum number of retries per round.
    pub(crate) max_retries: u32,
    /// Whether further rounds follow a failed one, for up to five minutes, and whether the request
    /// waits for a billing problem to be settled.
    pub(crate) repeat_rounds: bool,
    pub(crate) credential: RequestCredential,
    /// Maximum number of attempts of the call.
    pub(crate) max_attempts: u32,
    /// Time after the start of the call after which no further attempt starts; unlimited if `None`.
    pub(crate) give_up_after: Option<Duration>,
    /// Whether to wait for a billing problem to be settled; has no effect without `repeat_rounds`.
    pub(crate) billing_wait: bool,
    /// What the call does about a `retry-after`.
    pub(crate) retry_after: RetryAfterRule,
    /// How long requests to an unreachable address are retried before the first response; `None` if
    /// the caller has not set it.
    pub(crate) unreached_timeout: Option<Duration>,
}

/// Secret that a request is authenticated with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestCredential {
    /// The client's credential.
    Credential,
    /// The credential that is exchanged for tokens.
    ExchangedCredential,
    /// The token, on servers that exchange credentials; else the credential.
    Token,
}

/// Maximum number of retries per round of most requests.
const MAX_RETRIES: u32 = 10;

impl RequestPolicy {
    const DEFAULT: Self = Self {
        lane: Lane::Train,
        timeout: Duration::from_secs(60),
        max_retries: MAX_RETRIES,
        repeat_rounds: true,
        credential: RequestCredential::Token,
        max_attempts: u32::MAX,
        give_up_after: None,
        billing_wait: true,
        retry_after: RetryAfterRule::Honour { longest: None, until: None },
        unreached_timeout: None,
    };

    /// Returns the policy of a route, as the protocol defines it.
    pub(crate) fn for_route(route: Route) -> Self {
        let default = Self::DEFAULT;
        let seconds = Duration::from_secs;
        match route {
            Route::ClientConfig => {
                Self { lane: Lane::Config, credential: RequestCredential::Credential, ..default }
            }
            Route::DynamicConfig => {
                Self { lane: Lane::Session, timeout: seconds(10), max_retries: 0, ..default }
            }
            Route::AuthToken => Self {
                lane: Lane::Auth,
                repeat_rounds: false,
                credential: RequestCredential::ExchangedCredential,
                ..default
            },
            Route::CreateSession | Route::CreateSamplingSession => {
                Self { lane: Lane::Session, repeat_rounds: false, ..default }
            }
            Route::SessionHeartbeat => Self {
                lane: Lane::Session,
                timeout: seconds(10),
                max_retries: 0,
                repeat_rounds: false,
                ..default
            },
            Route::JoinSamplingSession => Self { lane: Lane::Session, ..default },
            Route::CreateModel | Route::Health => Self { repeat_rounds: false, ..default },
            Route::SaveWeights | Route::SaveWeightsForSampler | Route::SaveWeightsExternal => {
                Self { max_retries: 0, ..default }
            }
            Route::Sample => Self { lane: Lane::Sample, max_retries: 0, ..default },
            // The timeout is the longest time without new data. A request that waits in the
            // server's queue may receive no data for minutes.
            Route::Completions => {
                Self { lane: Lane::Sample, timeout: seconds(300), max_retries: 0, ..default }
            }
            // Long timeout, because the body may have hundreds of megabytes.
            Route::ImportAdapter => Self { timeout: seconds(600), ..default },
            Route::RetrieveFuture => Self {
                lane: Lane::Poll,
                timeout: seconds(45),
                max_retries: 0,
                repeat_rounds: false,
                ..default
            },
            Route::RetrieveFutures => Self {
                lane: Lane::PollMany,
                timeout: seconds(45),
                max_retries: 0,
                repeat_rounds: false,
                ..default
            },
            Route::CancelFuture => {
                Self { lane: Lane::Poll, timeout: seconds(30), max_retries: 0, ..default }
            }
            Route::Telemetry => {
                Self { lane: Lane::Telemetry, timeout: seconds(5), repeat_rounds: false, ..default }
            }
            // No retries: interactive logins send these requests and must report a rejected key or
            // a failure at once.
            Route::GetApiKey | Route::DeleteApiKey => Self {
                timeout: seconds(30),
                max_retries: 0,
                repeat_rounds: false,
                credential: RequestCredential::Credential,
                ..default
            },
            _ => default,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These requests tell whether a key is valid and whether it must be exchanged, so they carry
    /// the key itself, also once the client has a token.
    #[test]
    fn requests_about_a_key_carry_the_key() {
        for route in [Route::ClientConfig, Route::GetApiKey, Route::DeleteApiKey] {
            let credential = RequestPolicy::for_route(route).credential;
            assert_eq!(credential, RequestCredential::Credential, "{route:?}");
        }
        let sample = RequestPolicy::for_route(Route::Sample);
        assert_eq!(sample.credential, RequestCredential::Token);
    }
}
