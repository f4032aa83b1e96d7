//! Shutdown under load, and starts without a base model that unfinished requests need.

use tinkex_server::{PendingOnStart, Server, ServerOptions, StartError};

use crate::harness::{Http, MODEL, TestServer, options, step};

#[tokio::test(flavor = "multi_thread")]
async fn a_server_stops_under_load() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let base = test_server.server.base_url();
    let (started, mut progress) = tokio::sync::mpsc::channel::<()>(64);
    let clients = (1..9).map(|n| {
        let base = &base;
        let model = &model;
        let started = &started;
        async move {
            let client = crate::harness::http_client();
            for seq in (n..).step_by(8) {
                let request = step(model, seq, 0.0).to_string();
                let url = format!("{base}/api/v1/optim_step");
                // Fails once the server has stopped.
                if client.post(url).body(request).send().await.is_err() {
                    return;
                }
                let _ = started.try_send(());
            }
        }
    });
    let stop = async {
        progress.recv().await.unwrap();
        test_server.server.stop().await
    };
    tokio::join!(stop, futures_util::future::join_all(clients));
    // The data folder is intact.
    let server = Server::start(options(test_server.data.path())).await.unwrap();
    assert_eq!(Http::new(&server.base_url()).get("/api/v1/healthz").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_requests_need_their_base_model() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    // Number 1 is missing, so this request stays queued.
    let (status, future) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    assert_eq!(status, 200);
    test_server.server.stop().await;
    let error = Server::start(ServerOptions::new(test_server.data.path())).await.unwrap_err();
    let matches =
        matches!(&error, StartError::MissingModel { name, requests: 1, .. } if name == MODEL);
    assert!(matches && error.to_string().contains("\"tiny\" is not available"), "{error}");
    let mut options = options(test_server.data.path());
    options.timeouts.sequence_gap = std::time::Duration::ZERO;
    let server = Server::start(options).await.unwrap();
    let result = Http::new(&server.base_url()).result(&future).await;
    assert!(result["metrics"].is_object(), "{result}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_pending_fails_the_requests_without_their_base_model() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, done) = http.post("/optim_step", step(&model, 1, 0.1)).await;
    http.result(&done).await;
    // Number 2 is missing, so this request stays queued.
    let (_, future) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    let request = serde_json::json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "seq_id": 0,
        "sampling_params": {"max_tokens": 2}, "sampling_session_id": http.sampler(&session).await,
    });
    let (_, sample) = http.post("/asample", request).await;
    test_server.server.stop().await;

    let mut without = ServerOptions::new(test_server.data.path());
    without.pending_on_start = PendingOnStart::Missing;
    without.timeouts.sequence_gap = std::time::Duration::ZERO;
    let server = Server::start(without).await.unwrap();
    let http = Http::new(&server.base_url());
    let failed = http.result(&future).await;
    assert!(failed["error"].as_str().unwrap().contains("--model tiny=FOLDER"), "{failed}");
    // The sample may have finished before the shutdown.
    let poll = serde_json::json!({"request_id": sample["request_id"]});
    assert_eq!(http.post("/retrieve_future", poll).await.0, 200);
    assert_eq!(http.get(&format!("/api/v1/training_runs/{model}")).await.1["base_model"], MODEL);
    server.stop().await;

    // The run continues once its base model is available again.
    let server = Server::start(options(test_server.data.path())).await.unwrap();
    let http = Http::new(&server.base_url());
    let (_, next) = http.post("/optim_step", step(&model, 4, 0.1)).await;
    let result = http.result(&next).await;
    assert!(result["metrics"].is_object(), "{result}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_pending_all_fails_every_unfinished_request() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    // Number 1 is missing, so these requests stay queued.
    let (_, step_2) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    let (_, step_3) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    test_server.server.stop().await;

    let start = |pending| {
        let mut options = options(test_server.data.path());
        options.pending_on_start = pending;
        options.timeouts.sequence_gap = std::time::Duration::ZERO;
        Server::start(options)
    };
    let check = async |http: &Http| {
        for future in [&step_2, &step_3] {
            let failed = http.result(future).await;
            assert_eq!(failed["category"], "server", "{failed}");
            assert!(failed["error"].as_str().unwrap().contains("--fail-pending=all"), "{failed}");
        }
    };
    let server = start(PendingOnStart::All).await.unwrap();
    let http = Http::new(&server.base_url());
    check(&http).await;
    // New requests are executed.
    let (_, next) = http.post("/optim_step", step(&model, 4, 0.1)).await;
    assert!(http.result(&next).await["metrics"].is_object());
    server.stop().await;

    // The failures are durable.
    let server = start(PendingOnStart::None).await.unwrap();
    check(&Http::new(&server.base_url())).await;
}
