//! How each call is treated: its lane, how long it may take, and who may send it again.

use std::time::Duration;

use tinkex_wire::Route;

use super::http::Lane;

/// How a call is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestPolicy {
    pub(crate) lane: Lane,
    pub(crate) timeout: Duration,
    /// How often the same bytes are sent again after a lost connection or a passing failure.
    pub(crate) resends: u32,
    /// Whether it is tried anew for minutes after that, and waits for a billing problem.
    pub(crate) persist: bool,
    pub(crate) signed_by: Signer,
    /// How long after the first attempt another may begin, if somebody is waiting.
    pub(crate) patience: Option<Duration>,
    /// Whether a billing problem is waited out; only together with `persist`.
    pub(crate) waits_for_billing: bool,
}

/// Whose signature a call carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signer {
    /// The credential itself.
    Credential,
    /// The credential that is exchanged for tokens.
    Exchange,
    /// The token it was exchanged for, on servers that want that.
    Token,
}

const RESENDS: u32 = 10;

impl RequestPolicy {
    /// The usual: a minute, resent and persistent, on the lane for training and looking things up.
    const USUAL: Self = Self {
        lane: Lane::Train,
        timeout: Duration::from_secs(60),
        resends: RESENDS,
        persist: true,
        signed_by: Signer::Token,
        patience: None,
        waits_for_billing: true,
    };

    pub(crate) fn of(route: Route) -> Self {
        let usual = Self::USUAL;
        let seconds = Duration::from_secs;
        match route {
            Route::ClientConfig => {
                Self { lane: Lane::Config, signed_by: Signer::Credential, ..usual }
            }
            Route::DynamicConfig => {
                Self { lane: Lane::Session, timeout: seconds(10), resends: 0, ..usual }
            }
            Route::AuthToken => {
                Self { lane: Lane::Auth, persist: false, signed_by: Signer::Exchange, ..usual }
            }
            Route::CreateSession | Route::CreateSamplingSession => {
                Self { lane: Lane::Session, persist: false, ..usual }
            }
            Route::SessionHeartbeat => Self {
                lane: Lane::Session,
                timeout: seconds(10),
                resends: 0,
                persist: false,
                ..usual
            },
            Route::JoinSamplingSession => Self { lane: Lane::Session, ..usual },
            Route::CreateModel | Route::Health => Self { persist: false, ..usual },
            Route::SaveWeights | Route::SaveWeightsForSampler | Route::SaveWeightsExternal => {
                Self { resends: 0, ..usual }
            }
            Route::Sample => Self { lane: Lane::Sample, resends: 0, ..usual },
            Route::RetrieveFuture => {
                Self { lane: Lane::Poll, timeout: seconds(45), resends: 0, persist: false, ..usual }
            }
            Route::RetrieveFutures => Self {
                lane: Lane::PollMany,
                timeout: seconds(45),
                resends: 0,
                persist: false,
                ..usual
            },
            Route::CancelFuture => {
                Self { lane: Lane::Poll, timeout: seconds(30), resends: 0, ..usual }
            }
            Route::Telemetry => {
                Self { lane: Lane::Telemetry, timeout: seconds(5), persist: false, ..usual }
            }
            // Asked once by a person who is waiting.
            Route::GetApiKey | Route::DeleteApiKey => Self {
                timeout: seconds(30),
                resends: 0,
                persist: false,
                signed_by: Signer::Credential,
                ..usual
            },
            _ => usual,
        }
    }
}
