//! Starts of a gateway whose data folder needs a backend that is not configured.

use tinkex_server::{PendingOnStart, Server, StartError};

use super::{Gateway, gateway_options, model};
use crate::harness::{Http, create_model, golden, step};

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_does_not_start_without_the_upstream_of_an_open_run() {
    let Gateway { server, data, upstream } = Gateway::new().await;
    let trained = model(&super::client(&server.base_url())).await;
    let id = trained.model_id().to_string();
    // As in a crash: the session stays open.
    drop(server);
    let renamed = || gateway_options(&data, &[("other", upstream.server.base_url())]);
    let error = Server::start(renamed()).await.unwrap_err();
    let is_named = matches!(&error, StartError::MissingUpstream { name, run: Some(run), runs: 1, .. }
        if name == "up" && *run == id);
    assert!(is_named && error.to_string().contains("upstream \"up\" is not configured"), "{error}");
    let mut dropped = renamed();
    dropped.pending_on_start = PendingOnStart::Missing;
    Server::start(dropped).await.unwrap().stop().await;
    let kept = gateway_options(&data, &[("up", upstream.server.base_url())]);
    Server::start(kept).await.unwrap().stop().await;
    drop(trained);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_does_not_start_without_the_local_model_of_unfinished_requests() {
    let Gateway { server, data, upstream } = Gateway::new().await;
    drop(server);
    let upstreams = [("up", upstream.server.base_url())];
    let with_model = || gateway_options(&data, &upstreams).model("local", golden("qwen3"));
    let server = Server::start(with_model()).await.unwrap();
    let http = Http::new(&server.base_url());
    let mut request = create_model(&http.session().await, 0);
    request["base_model"] = "local".into();
    let (_, created) = http.post("/create_model", request).await;
    let id = http.result(&created).await["model_id"].as_str().unwrap().to_owned();
    // Number 1 is missing, so this request stays queued.
    assert_eq!(http.post("/optim_step", step(&id, 2, 0.1)).await.0, 200);
    server.stop().await;
    let error = Server::start(gateway_options(&data, &upstreams)).await.unwrap_err();
    let is_named = matches!(&error, StartError::MissingModel { name, run: Some(run), requests: 1 }
        if name == "local" && *run == id);
    assert!(is_named, "{error}");
    Server::start(with_model()).await.unwrap().stop().await;
}
