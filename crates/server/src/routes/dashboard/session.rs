//! Access control of the dashboard: session cookies, and the origin of requests.

use std::sync::Arc;

use http::header::{COOKIE, HOST, ORIGIN};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method};
use tinkex_dashboard::{DashboardAccess, DashboardLogin, SESSION_LIFETIME};
use tinkex_store::error::ServerError;

use super::super::client::RequestClient;
use super::super::error::HttpError;
use super::super::{is_local_host, sent_key};
use crate::keyring::AcceptedKey;
use crate::state::ServerState;

/// Returns the name of the session cookie. Browsers send a cookie to all ports of a host: without
/// the port in the name, two servers on one machine would replace each other's cookies.
fn cookie_name(headers: &HeaderMap) -> String {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let authority = host.and_then(|host| host.parse::<http::uri::Authority>().ok());
    match authority.and_then(|authority| authority.port_u16()) {
        Some(port) => format!("tinkex_session_{port}"),
        None => "tinkex_session".to_owned(),
    }
}

/// Returns the cookie of a new session.
pub(super) fn cookie(parts: &Parts, session: &str) -> Result<HeaderValue, HttpError> {
    set_cookie(parts, session, SESSION_LIFETIME.as_secs())
}

/// Returns a cookie that ends the session of the browser.
pub(super) fn expired_cookie(parts: &Parts) -> Result<HeaderValue, HttpError> {
    set_cookie(parts, "", 0)
}

fn set_cookie(parts: &Parts, value: &str, max_age: u64) -> Result<HeaderValue, HttpError> {
    let name = cookie_name(&parts.headers);
    // A browser does not send a secure cookie over HTTP without TLS.
    let secure = if RequestClient::of(parts).is_secure { "; Secure" } else { "" };
    let text =
        format!("{name}={value}; Path=/; Max-Age={max_age}; HttpOnly; SameSite=Strict{secure}");
    let invalid = |_| ServerError::Internal("cannot create a cookie".to_owned());
    Ok(HeaderValue::try_from(text).map_err(invalid)?)
}

/// Returns the tokens in the session cookies of a request.
pub(super) fn session_tokens(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let name = cookie_name(headers);
    let cookies = headers.get_all(COOKIE).into_iter().filter_map(|value| value.to_str().ok());
    let pairs = cookies.flat_map(|value| value.split(';')).filter_map(|pair| pair.split_once('='));
    pairs.filter(move |(key, _)| key.trim() == name).map(|(_, token)| token.trim())
}

/// Returns the session of a request that has the cookie of a valid session.
fn find_session(access: &DashboardAccess, headers: &HeaderMap, now: u64) -> Option<DashboardLogin> {
    session_tokens(headers).find_map(|token| {
        let key = access.accept_session(token, now)?;
        Some(DashboardLogin::Session { token: token.to_owned(), key })
    })
}

/// Returns whether the `origin` header is the origin of this server; `None` without the header.
fn has_own_origin(headers: &HeaderMap) -> Option<bool> {
    let origin = headers.get(ORIGIN)?.to_str().ok();
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let name = origin
        .and_then(|origin| origin.strip_prefix("http://").or(origin.strip_prefix("https://")));
    Some(name.is_some() && name == host)
}

/// Returns whether the `sec-fetch-site` header of the browser names another site as the sender.
fn is_from_another_site(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    site.is_some_and(|site| site != b"same-origin" && site != b"none")
}

/// Rejects requests that pages of other sites send.
pub(super) fn check_origin(headers: &HeaderMap, method: &Method) -> Result<(), HttpError> {
    let own = has_own_origin(headers);
    // A browser sends the origin with every request that is not GET; a program sends its key.
    let unknown = own.is_none() && method != Method::GET && sent_key(headers).is_none();
    if is_from_another_site(headers) || own == Some(false) || unknown {
        let message = "the dashboard accepts requests of its own page only";
        return Err(ServerError::forbidden(message).into());
    }
    Ok(())
}

/// Checks the session or the API key of a request. If the server has no key, checks the `host`
/// header instead.
pub(super) fn authorize(
    access: &DashboardAccess,
    headers: &HeaderMap,
    now: u64,
) -> Result<DashboardLogin, HttpError> {
    if !access.needs_login() {
        if is_local_host(headers) {
            return Ok(DashboardLogin::Open);
        }
        let message = "this server has no API key and accepts requests for localhost only";
        return Err(ServerError::forbidden(message).into());
    }
    let key = sent_key(headers).and_then(|key| access.accept_key(key));
    let login = key.map(DashboardLogin::Key).or_else(|| find_session(access, headers, now));
    login.ok_or_else(HttpError::login_required)
}

/// Returns the key of the session with which the dashboard page of this server sent the request.
/// Such a request may use the inference endpoints without a key.
pub(in crate::routes) fn session_key(
    state: &ServerState,
    headers: &HeaderMap,
) -> Option<Arc<AcceptedKey>> {
    let same_origin = headers.get("sec-fetch-site").is_some_and(|site| site == "same-origin");
    let own = match has_own_origin(headers) {
        Some(own) => own && !is_from_another_site(headers),
        None => same_origin,
    };
    let access = &state.dashboard.access;
    if !own {
        return None;
    }
    if !access.needs_login() {
        return is_local_host(headers).then(|| state.keyring.administrator());
    }
    let login = find_session(access, headers, super::now(state))?;
    super::key_of(state, &login)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pair =
            |(name, value): &(&'static str, &str)| (name.parse().unwrap(), value.parse().unwrap());
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn pages_of_other_sites_are_rejected() {
        let host = ("host", "127.0.0.1:8080");
        let own = ("origin", "http://127.0.0.1:8080");
        for (extra, method, allowed) in [
            (vec![], Method::GET, true),
            (vec![("sec-fetch-site", "same-origin")], Method::GET, true),
            (vec![("sec-fetch-site", "none")], Method::GET, true),
            (vec![("sec-fetch-site", "cross-site")], Method::GET, false),
            (vec![("sec-fetch-site", "same-site")], Method::GET, false),
            (vec![("origin", "http://127.0.0.1:9090")], Method::GET, false),
            (vec![("origin", "null")], Method::GET, false),
            (vec![], Method::POST, false),
            (vec![("x-api-key", "tml-x")], Method::POST, true),
            (vec![own], Method::POST, true),
            (vec![own, ("sec-fetch-site", "cross-site")], Method::POST, false),
            (vec![("origin", "http://127.0.0.1:8080.example.com")], Method::POST, false),
        ] {
            let sent: Vec<_> = extra.iter().copied().chain([host]).collect();
            assert_eq!(check_origin(&headers(&sent), &method).is_ok(), allowed, "{sent:?}");
        }
    }

    #[test]
    fn the_cookie_is_found_among_others() {
        let access = DashboardAccess::new(Some("tml-secret"));
        let session = access.create_session(access.own_key().unwrap(), 5);
        let sent = |cookie: &str| headers(&[("host", "localhost:8080"), ("cookie", cookie)]);
        let own = format!("a=b; tinkex_session_8080={session}; c=d");
        assert!(authorize(&access, &sent(&own), 5).is_ok());
        let other = format!("tinkex_session_9090={session}");
        assert!(authorize(&access, &sent(&other), 5).is_err());
        assert!(authorize(&access, &sent("tinkex_session_8080"), 5).is_err());
    }

    #[test]
    fn a_cookie_is_not_readable_by_scripts_or_sent_by_other_sites() {
        let (mut parts, ()) = http::Request::new(()).into_parts();
        parts.headers = headers(&[("host", "localhost:8080")]);
        let set = |parts: &Parts| cookie(parts, "abc").unwrap().to_str().unwrap().to_owned();
        let text = set(&parts);
        assert!(text.starts_with("tinkex_session_8080=abc; "), "{text}");
        assert!(text.contains("HttpOnly") && text.contains("SameSite=Strict"), "{text}");
        assert!(!text.contains("Secure"), "{text}");
        parts.extensions.insert(RequestClient { is_secure: true, ..RequestClient::default() });
        assert!(set(&parts).ends_with("; Secure"));
    }
}
