//! Detects which endpoints a server implements.
//!
//! A missing endpoint responds like a path that does not exist, or with "method not allowed". An
//! implemented one responds with its own error about the missing object.

use tinkex_wire::{JSON, Route};

use super::Subject;

/// A path that no server implements.
const UNKNOWN_PATH: &str = "/api/v1/no_such_endpoint";

/// Returns the first of `routes` that the server does not implement.
pub(super) async fn first_missing(subject: &Subject, routes: &[Route]) -> Option<Route> {
    for route in routes {
        if !is_implemented(subject, *route).await {
            return Some(*route);
        }
    }
    None
}

/// Returns whether the server implements an endpoint. The request refers to objects that do not
/// exist, so it changes nothing.
pub(super) async fn is_implemented(subject: &Subject, route: Route) -> bool {
    let params = vec!["none"; route.template().matches('{').count()];
    let path = route.path(&params).unwrap();
    let response = probe(subject, route, &path).await;
    !matches!(response.0, 405 | 501)
        && (response.0 != 404 || response != probe(subject, route, UNKNOWN_PATH).await)
}

async fn probe(subject: &Subject, route: Route, path: &str) -> (u16, String) {
    let url = format!("{}{path}", subject.service.base_url().as_str().trim_end_matches('/'));
    let method = route.method().as_str().parse().unwrap();
    let request = crate::harness::http_client().request(method, url);
    let request = request.header("x-api-key", &subject.api_key);
    let response = request.header("content-type", JSON).body("{}").send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}
