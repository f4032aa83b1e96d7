//! Tests of errors: classification, texts and bodies.

use bytes::Bytes;
use serde_json::json;
use tinkex_wire::{ApiResponse as _, SubmitResponse};

use super::*;
use crate::fixture;
use crate::http::{HttpFailure, HttpFailureKind};

/// Covers T2.2.6.
#[test]
fn statuses_map_to_kinds_and_the_body_is_kept() {
    for case in fixture::cases("error_mapping.json") {
        let status = u16::try_from(case["status"].as_u64().unwrap()).unwrap();
        let body = case["body"].as_str().unwrap();
        let error = Error::from_response(status, body.as_bytes(), None);
        let kind = match case["error_kind"].as_str().unwrap() {
            "BadRequestError" | "UnprocessableEntityError" | "APIStatusError" => {
                ErrorKind::Rejected
            }
            "AuthenticationError" => ErrorKind::Auth,
            "BillingError" => ErrorKind::Billing,
            "PermissionDeniedError" => ErrorKind::Permission,
            "NotFoundError" => ErrorKind::NotFound,
            "ConflictError" => ErrorKind::Conflict,
            "RateLimitError" => ErrorKind::RateLimited,
            "InternalServerError" => ErrorKind::Server,
            other => panic!("{other}"),
        };
        assert_eq!(error.kind(), kind, "{case}");
        assert_eq!(json!(error.status()), case["status_code_attr"]);
        assert_eq!(error.body().unwrap_or(""), body);
    }
}

#[test]
fn errors_are_classified_as_retryable_and_as_user_errors() {
    let transport = |kind| Error::from(HttpFailure::new(kind, "scripted"));
    for case in fixture::cases("retry_classification.json") {
        let name = case["error"].as_str().unwrap();
        let error = if let Some(status) = name.strip_prefix("status ") {
            Error::from_response(status.parse().unwrap(), b"", None)
        } else {
            match name {
                "timeout" | "api_timeout" | "transport_timeout" => {
                    transport(HttpFailureKind::Timeout)
                }
                "connection" => transport(HttpFailureKind::Connect),
                // Unlike in the Python SDK, invalid input is a user error (N-08).
                "value_error" => {
                    let error = Error::new(ErrorKind::InvalidInput, "scripted");
                    assert!(error.is_user_error() && !error.is_retryable());
                    continue;
                }
                "generic_sdk_error" => Error::new(ErrorKind::Config, "scripted"),
                "promise_expired(410)" => Error::from_response(410, b"", None).expired(),
                failed if failed.starts_with("request_failed") => {
                    let category = failed.rsplit(['=', '_']).next().unwrap();
                    let category = ErrorCategory::from_name(category);
                    Error::from_failed_request(RequestFailed::new("", category))
                }
                // Not an error of this crate: the transport wraps every error of the HTTP
                // library.
                "raw_connect_error" => continue,
                // Telemetry searches the source chain; its tests cover these cases.
                cause if cause.contains("caused by") => continue,
                other => panic!("no test for {other}"),
            }
        };
        assert_eq!(json!(error.is_user_error()), case["is_user_error"], "{case}");
        // Unlike in the Python SDK (N-13), `is_retryable` can be true for a failed request; the client
        // itself does not use it.
        if error.kind() != ErrorKind::WorkFailed {
            assert_eq!(json!(error.is_retryable()), case["holder_retryable"], "{case}");
        }
    }
}

#[test]
fn display_states_operation_attempts_and_cause() {
    let error = Error::from_response(503, b"{\"detail\":\"busy\"}", None)
        .after(3, Duration::from_secs(41))
        .during("GET /api/v1/sessions");
    assert_eq!(
        error.to_string(),
        "GET /api/v1/sessions failed after 3 attempts (41.0 s): server responded with status 503: busy"
    );
}

#[test]
fn a_conflict_is_recognized_by_status_and_by_code() {
    let taken = br#"{"detail":"checkpoint exists","code":"conflict"}"#;
    for (status, body, kind) in [
        (400, &taken[..], ErrorKind::Conflict),
        (409, b"", ErrorKind::Conflict),
        (400, br#"{"detail":"bad","code":"other"}"#, ErrorKind::Rejected),
    ] {
        assert_eq!(Error::from_response(status, body, None).kind(), kind, "{status}");
    }
    let failed = RequestFailed::new("checkpoint exists", ErrorCategory::User);
    let conflict = failed.clone().code(Some(ErrorCode::Conflict));
    let error = Error::from_failed_request(conflict);
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.is_user_error() && !error.is_retryable());
    assert_eq!(Error::from_failed_request(failed).kind(), ErrorKind::WorkFailed);
}

#[test]
fn the_body_is_available_as_text_and_as_json() {
    let error = Error::from_response(422, b"{\"detail\":[{\"loc\":[\"body\",\"rank\"]}]}", None);
    assert_eq!(error.body_json().unwrap()["detail"][0]["loc"][1], "rank");
    let page = Error::from_response(502, b"<html>bad gateway</html>", None);
    assert_eq!((page.body(), page.body_json()), (Some("<html>bad gateway</html>"), None));
    assert_eq!(Error::from_response(500, b"", None).body_json(), None);
}

#[test]
fn an_html_page_is_named_by_its_title() {
    let page = b"\n<!DOCTYPE html><html><head><TITLE>502 Bad Gateway</TITLE></head></html>";
    let error = Error::from_response(502, page, None);
    let text = "server responded with status 502 and an HTML page (\"502 Bad Gateway\")";
    assert_eq!((error.to_string().as_str(), error.hint()), (text, None));
    let error = Error::from_response(404, b"<html><body>no</body></html>", None);
    assert_eq!(error.to_string(), "server responded with status 404 and an HTML page");
    assert_eq!(error.hint(), Some(Hint::CheckServer));
    let decode = || SubmitResponse::from_body(&Bytes::from_static(b"<")).unwrap_err();
    let error = Error::from_body(decode(), page);
    let text = "server responded with an HTML page (\"502 Bad Gateway\") instead of JSON";
    assert_eq!((error.to_string().as_str(), error.kind()), (text, ErrorKind::Decode));
    assert!(Error::from_body(decode(), b"<1").to_string().starts_with("cannot decode"));
}

#[test]
fn the_alternate_form_contains_the_hint() {
    let error = Error::from_response(401, b"", None).during("GET /api/v1/sessions");
    let plain = "GET /api/v1/sessions failed: server responded with status 401";
    assert_eq!(error.to_string(), plain);
    assert_eq!(format!("{error:#}"), format!("{plain}; hint: {}", Hint::CheckApiKey));
    let without = Error::from_response(503, b"", None);
    assert_eq!(format!("{without:#}"), without.to_string());
}

#[test]
fn kinds_have_distinct_names_and_an_order() {
    let statuses = [400, 401, 402, 403, 404, 409, 429, 500];
    let kinds: std::collections::BTreeSet<_> =
        statuses.map(ErrorKind::from_status).into_iter().collect();
    let names: std::collections::BTreeSet<_> = kinds.iter().map(|kind| kind.as_str()).collect();
    assert_eq!(names.len(), statuses.len());
    assert_eq!(format!("{:>8}", ErrorKind::Auth), "    auth");
}
