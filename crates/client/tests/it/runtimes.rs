//! Clients that are used in several tokio runtimes.

use futures_util::FutureExt as _;
use serde_json::json;
use tinkex::rest::ListSessions;
use tinkex::{AdamParams, CallOptions, Env, ErrorKind, SamplingParams, ServiceClient};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Duration, sleep};

use crate::numbered_server::NumberedServer;
use crate::raw_server::{RawServer, json_response};

fn params() -> SamplingParams {
    SamplingParams::new().max_tokens(1)
}

/// Creates a runtime with a paused clock.
fn paused() -> Runtime {
    Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

/// Creates a server that announces results of samples by batch polls, which a background task sends.
fn server() -> NumberedServer {
    let server = NumberedServer::new(json!({"sample_use_retrieve_futures": true}));
    server.dynamic_config(json!({"sample_cancel_enabled": true}));
    server
}

#[test]
fn a_client_works_after_the_runtime_of_its_first_call_ended() {
    let server = server();
    let first = paused();
    let (service, sampler, model) = first.block_on(async {
        let service = server.builder().build().unwrap();
        let sampler = service.create_sampling_client("base").await.unwrap();
        sampler.sample([1], params()).await.unwrap();
        let model = service.create_lora_training_client("base").await.unwrap();
        (service, sampler, model)
    });
    drop(first);
    let heartbeats = server.requests("/session_heartbeat").len();
    paused().block_on(async {
        sampler.sample([1], params()).await.unwrap();
        model.optim_step(AdamParams::default()).await.unwrap();
        sleep(Duration::from_secs(31)).await;
        let now = server.requests("/session_heartbeat").len();
        assert_eq!(now, heartbeats + 3, "heartbeats go on in the second runtime");
        server.respond("q2", vec![json!("conn")]);
        let pending = sampler.sample([1], params());
        sleep(Duration::from_secs(1)).await;
        drop(pending);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(server.requests("/cancel_future").len(), 1, "cancellations go on");
        service.finish().await;
    });
}

#[test]
fn a_sample_completes_after_the_runtime_of_the_batch_poll_ended() {
    let server = server();
    let host = paused();
    let sampler = host.block_on(async {
        let service = server.builder().build().unwrap();
        service.create_sampling_client("base").await.unwrap()
    });
    paused().block_on(async {
        // The host exists but does not run, so nothing announces the result.
        let mut sample = sampler.sample([1], params());
        sleep(Duration::from_secs(60)).await;
        assert!((&mut sample).now_or_never().is_none());
        host.shutdown_background();
        sample.await.unwrap();
    });
}

/// With retries disabled, a connection of the first runtime must not fail the request either.
#[test]
fn connections_of_an_ended_runtime_do_not_break_requests() {
    let servers = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = RawServer::new(|_| json_response(br#"{"sessions":["s"]}"#));
    let server = servers.block_on(server.start());
    let builder = ServiceClient::builder().env(Env::empty()).api_key("tml-x").without_telemetry();
    let service =
        builder.base_url(server.url).options(CallOptions::without_retries()).build().unwrap();
    for _ in 0..3 {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let list = ListSessions::default();
        let sessions = runtime.block_on(async { service.rest().list_sessions(&list).await });
        assert_eq!(sessions.unwrap().sessions.len(), 1);
    }
}

#[test]
fn background_tasks_run_in_the_chosen_runtime_while_it_exists() {
    let server = server();
    let host = paused();
    let handle = host.handle().clone();
    let caller = paused();
    let sampler = caller.block_on(async {
        let service = server.builder().runtime(handle).build().unwrap();
        service.create_sampling_client("base").await.unwrap()
    });
    caller.block_on(async { sleep(Duration::from_secs(60)).await });
    assert_eq!(server.requests("/session_heartbeat").len(), 0, "the host has not run");
    host.block_on(async { sleep(Duration::from_secs(31)).await });
    assert_eq!(server.requests("/session_heartbeat").len(), 3);
    drop(host);
    caller.block_on(async {
        sampler.sample([1], params()).await.unwrap();
        sleep(Duration::from_secs(11)).await;
    });
    assert_eq!(server.requests("/session_heartbeat").len(), 4);
}

/// The runtime ends while the call, whose number is assigned, waits for a token.
#[test]
fn a_call_whose_runtime_ended_before_it_was_sent_uses_no_sequence_number() {
    let server = NumberedServer::new(json!({"pjwt_auth_enabled": true}));
    let first = paused();
    let model = first.block_on(async {
        let model = server.model().await;
        // The tokens of this server have no readable expiry, so that every request needs a new one.
        server.fail("/auth/token", json!("hang"));
        model.optim_step(AdamParams::default()).detach();
        sleep(Duration::from_secs(5)).await;
        model
    });
    drop(first);
    assert_eq!(server.requests("/optim_step").len(), 0);
    server.recover();
    paused().block_on(async { model.optim_step(AdamParams::default()).await }).unwrap();
    assert_eq!(server.requests("/optim_step")[0].json()["seq_id"], 1);
}

/// A future that outlives its runtime says so.
#[test]
fn the_future_of_a_call_whose_runtime_ended_fails() {
    let server = server();
    server.respond("r1", vec![json!("conn")]);
    let first = paused();
    let mut step = None;
    first.block_on(async {
        step = Some(server.model().await.optim_step(AdamParams::default()));
        sleep(Duration::from_secs(5)).await;
    });
    drop(first);
    let error = paused().block_on(step.unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains("runtime ended") && error.hint().is_some(), "{error}");
}
