//! One attempt of a request: authenticates, sends, follows redirects and checks the status.

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use ::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use ::http::{Method, Request, Response, Uri};
use bytes::Bytes;
use tinkex_wire::Secret;

use super::encode::{EncodedBody, EncodedRequest};
use super::receive::Receive;
use super::redirect::{self, RedirectChain};
use super::sent_flag::SentFlag;
use crate::error::{Error, ErrorKind};
use crate::hint::Hint;
use crate::http::{HttpFailure, HttpFailureKind};
use crate::instrument::RequestEvents;
use crate::request::header;
use crate::retry::RetryState;
use crate::retry::failed_attempt::{FailedAttempt, Unreached};
use crate::retry::request_policy::RequestCredential;
use crate::{RequestOptions, Transport};

impl Transport {
    /// Authenticates and sends the request. If the server rejects (401) a token that it issued in
    /// exchange for the credential, replaces the token and sends the request once more.
    pub(crate) async fn attempt<B: Receive>(
        &self,
        encoded: &EncodedRequest,
        options: &RequestOptions,
        state: &RetryState<'_>,
        receive: B,
    ) -> std::result::Result<Response<B::Body>, FailedAttempt> {
        let mut token_replaced = false;
        loop {
            let (secret, tokens) = match encoded.policy.credential {
                RequestCredential::Credential => (self.credential.fetch().await, None),
                RequestCredential::ExchangedCredential => {
                    (self.exchange_credential().fetch().await, None)
                }
                RequestCredential::Token => (self.token().await, self.token_cache()),
            };
            // Do not retry, even if the cause is a lost connection: the request for the token was
            // already retried.
            let secret = secret.map_err(FailedAttempt::permanent)?;
            let sent = self.send_with_secret(encoded, options, state, &secret, receive).await;
            match (&sent, tokens) {
                (Err(failed), Some(tokens))
                    if failed.error.status() == Some(401) && !token_replaced =>
                {
                    tracing::debug!(
                        "server rejected the token (401); exchanging the credential again"
                    );
                    tokens.reject(&secret);
                    token_replaced = true;
                }
                _ => return sent,
            }
        }
    }

    /// Sends the request once and follows redirects.
    async fn send_with_secret<B: Receive>(
        &self,
        encoded: &EncodedRequest,
        options: &RequestOptions,
        state: &RetryState<'_>,
        secret: &Secret,
        receive: B,
    ) -> std::result::Result<Response<B::Body>, FailedAttempt> {
        let mut method = encoded.method.clone();
        let mut uri = encoded.uri.clone();
        let mut body = encoded.body.clone();
        let mut body_dropped = false;
        let mut other_origin = false;
        let mut redirects = RedirectChain::default();
        loop {
            let (bytes, file) = match body.clone() {
                EncodedBody::Bytes(bytes) => (bytes, None),
                EncodedBody::WithFile(parts) => (parts.0, Some(parts.1)),
            };
            let mut request = Request::new(bytes);
            *request.method_mut() = method.clone();
            *request.uri_mut() = uri.clone();
            let mut headers = self.headers(encoded, options, state, secret)?;
            if body_dropped {
                headers.remove(CONTENT_TYPE);
                headers.remove(CONTENT_ENCODING);
            }
            *request.headers_mut() =
                if other_origin { redirect::public_headers(&headers) } else { headers };
            let lane = encoded.policy.lane;
            let retry_count = state.retry_count();
            let base_url = self.base_url.as_str();
            let events = RequestEvents::start(&method, &uri, lane, base_url, retry_count);
            let sent_before = options.sent.as_ref().is_some_and(SentFlag::set);
            let timeout = encoded.policy.timeout;
            let sent = receive.send(&*self.http, lane, request, file, timeout).await;
            if let Some(flag) = &options.sent
                && !sent_before
                && is_unread(&sent)
            {
                flag.reset();
            }
            let sent = B::record(sent, events, &self.stats);
            let response = sent.map_err(|failure| self.no_response(failure, &uri))?;
            self.responded.store(true, Ordering::Relaxed);
            self.last_response.record();
            let next = redirects.next(&uri, &response).map_err(FailedAttempt::permanent)?;
            let Some(next) = next else { return check_status::<B>(response) };
            if !redirect::keeps_method(response.status()) && method != Method::GET {
                method = Method::GET;
                body = EncodedBody::Bytes(Bytes::new());
                body_dropped = true;
            }
            // Send secrets and user data to the API server only. A body may contain secrets and
            // user data.
            if next.origin() != self.base_url.origin() {
                if method != Method::GET {
                    let refused =
                        redirect::refused(&format!("a {method} request to another server"));
                    return Err(FailedAttempt::permanent(refused));
                }
                other_origin = true;
            }
            let invalid = |_| FailedAttempt::permanent(redirect::refused("to an invalid URL"));
            uri = next.as_str().parse().map_err(invalid)?;
        }
    }

    /// Converts the failure of a request to `uri` that received no response. If the connection
    /// failed, the error contains the server's address.
    fn no_response(&self, failure: HttpFailure, uri: &Uri) -> FailedAttempt {
        let refused = failure.is_connection_refused();
        let local = is_loopback(uri);
        let unreachable = refused || failure.is_unknown_host();
        let responded = self.responded.load(Ordering::Relaxed);
        let mut mismatch = failure.kind() == HttpFailureKind::WrongProtocol;
        let mut failure = failure;
        if mismatch && responded {
            // The server has responded before, so it speaks this protocol, and only this response
            // was damaged.
            failure = HttpFailure::connect(failure);
            mismatch = false;
        }
        let cause = failure.root_cause();
        let mut error = Error::from(failure);
        if mismatch {
            let cause = match uri.scheme_str() {
                Some("https") => "the server speaks HTTP without TLS",
                _ => "the server does not speak HTTP; it may expect HTTPS",
            };
            error = error.with_message(format!("connection to {} failed: {cause}", origin(uri)));
        } else if error.kind() == ErrorKind::Connect {
            error = error.with_message(format!("connection to {} failed: {cause}", origin(uri)));
        }
        if refused && local {
            error = error.with_hint(Hint::StartServer);
        }
        let mut failed = FailedAttempt::from(error);
        if unreachable && !responded {
            failed.unreached = Some(if local { Unreached::Loopback } else { Unreached::Remote });
        }
        failed
    }
}

/// Returns whether the server has certainly not read the request of this attempt: nothing was sent,
/// or the server refused the request because of the client's credential, account or request rate.
/// After any other failure, including a 5xx, the server may have accepted the request.
fn is_unread<B>(sent: &std::result::Result<Response<B>, HttpFailure>) -> bool {
    match sent {
        Ok(response) => matches!(response.status().as_u16(), 401 | 402 | 403 | 429),
        Err(failure) => {
            failure.is_connection_refused() || failure.kind() == HttpFailureKind::InvalidRequest
        }
    }
}

/// Returns the scheme, host and port of a URI, without a user name and password.
fn origin(uri: &Uri) -> String {
    let scheme = uri.scheme_str().unwrap_or("http");
    let port = uri.port().map_or_else(String::new, |port| format!(":{port}"));
    format!("{scheme}://{}{port}", uri.host().unwrap_or_default())
}

/// Returns whether the host of a URI is this machine.
fn is_loopback(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Returns the response if its status is 2xx, else the failed attempt.
fn check_status<B: Receive>(
    response: Response<B::Body>,
) -> std::result::Result<Response<B::Body>, FailedAttempt> {
    let status = response.status();
    let headers = response.headers();
    header::log_deprecation(headers);
    if status.is_success() {
        return Ok(response);
    }
    let body = B::error_body(response.body());
    let mut failed = FailedAttempt::from_parts(status.as_u16(), headers, body);
    failed.permanent |= B::is_final(status.as_u16());
    Err(failed)
}
