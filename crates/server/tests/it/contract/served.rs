//! Which endpoints a server has, asked of the server itself.
//!
//! One that it lacks answers what a path answers that nobody has, or that the method is unknown. One
//! that it has answers in words of its own about the thing that is not there.

use tinkex::BaseUrl;
use tinkex_wire::{JSON, Route};

/// A path that no server has.
const NOWHERE: &str = "/api/v1/no_such_endpoint";

/// The first of these endpoints that the server does not have.
pub(super) async fn first_missing(base: &BaseUrl, routes: &[Route]) -> Option<Route> {
    for route in routes {
        if !find(base, *route).await {
            return Some(*route);
        }
    }
    None
}

/// Whether the server has this endpoint. Asks about things that do not exist, so nothing changes.
pub(super) async fn find(base: &BaseUrl, route: Route) -> bool {
    let params = vec!["none"; route.template().matches('{').count()];
    let path = route.path(&params).unwrap();
    let answer = ask(base, route, &path).await;
    !matches!(answer.0, 405 | 501) && (answer.0 != 404 || answer != ask(base, route, NOWHERE).await)
}

async fn ask(base: &BaseUrl, route: Route, path: &str) -> (u16, String) {
    let url = format!("{}{path}", base.as_str().trim_end_matches('/'));
    let method = route.method().as_str().parse().unwrap();
    let request = crate::harness::plain().request(method, url).header("x-api-key", "tml-local");
    let reply = request.header("content-type", JSON).body("{}").send().await.unwrap();
    (reply.status().as_u16(), reply.text().await.unwrap())
}
