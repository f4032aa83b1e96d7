//! Users: no user sees or changes the objects of another user, on any route of the server.

use serde_json::{Value, json};
use tinkex_autodiff::{GraphArg, GraphNode, LossGraph};
use tinkex_wire::{Datum, ForwardBackward, LossFn, Route, Seq};

use crate::harness::{Http, TestServer, create_model, http_client, step};

const ADMINISTRATOR: &str = "tml-administrator-0123456789";

/// Returns a server with a key.
pub(crate) async fn key_server() -> TestServer {
    TestServer::with(|options| *options = options.clone().api_key(ADMINISTRATOR)).await
}

/// Returns a client with the key of the administrator.
pub(crate) fn administrator(test_server: &TestServer) -> Http {
    Http::with_key(&test_server.server.base_url(), ADMINISTRATOR)
}

/// Creates a key and returns it.
pub(crate) async fn create_key(test_server: &TestServer, request: Value) -> String {
    let (status, body) = administrator(test_server).post("/keys", request).await;
    assert_eq!(status, 200, "{body}");
    body["key"].as_str().unwrap().to_owned()
}

/// Creates a key with a role and returns a client that uses it.
pub(crate) async fn user(test_server: &TestServer, name: &str, user: &str, role: &str) -> Http {
    let request = json!({"name": name, "user": user, "role": role});
    let key = create_key(test_server, request).await;
    Http::with_key(&test_server.server.base_url(), &key)
}

/// Ids of the objects of a user.
struct Objects {
    session: String,
    run: String,
    /// Names of the checkpoints: for training and for sampling.
    weights: String,
    sampler_weights: String,
    sampler: String,
    request: String,
}

impl Objects {
    /// Lets a user create one object of each kind.
    async fn create(http: &Http) -> Self {
        let session = http.session().await;
        let run = http.model(&session).await;
        http.result(&pass(http, &run, 1).await).await;
        http.save(&run, 2, "w").await;
        let save = json!({"model_id": run, "path": "s", "seq_id": 3});
        let (status, saved) = http.post("/save_weights_for_sampler", save).await;
        assert_eq!(status, 200, "{saved}");
        http.result(&saved).await;
        let sampler = http.sampler(&session).await;
        let (status, sampled) = http.post("/asample", sample(&sampler, 0)).await;
        assert_eq!(status, 200, "{sampled}");
        http.proto_result(&sampled).await;
        let request = sampled["request_id"].as_str().unwrap().to_owned();
        let (weights, sampler_weights) = ("w".to_owned(), "s".to_owned());
        Self { session, run, weights, sampler_weights, sampler, request }
    }

    /// Returns well-formed ids of objects that do not exist.
    fn unknown() -> Self {
        let session = "00000000-0000-4000-8000-000000000000";
        Self {
            session: session.to_owned(),
            run: format!("{session}:train:0"),
            weights: "w".to_owned(),
            sampler_weights: "s".to_owned(),
            sampler: format!("{session}:sample:0"),
            request: "0".repeat(32),
        }
    }

    fn path(&self) -> String {
        format!("tinker://{}/weights/{}", self.run, self.weights)
    }

    fn sampler_path(&self) -> String {
        format!("tinker://{}/sampler_weights/{}", self.run, self.sampler_weights)
    }

    /// Replaces the ids in a text by names, so that responses can be compared.
    fn anonymous(&self, text: &str) -> String {
        let ids = [(&self.request, "REQUEST"), (&self.session, "SESSION")];
        ids.iter().fold(text.to_owned(), |text, (id, name)| text.replace(id.as_str(), name))
    }
}

async fn pass(http: &Http, run: &str, seq: u64) -> Value {
    let (status, future) =
        http.send("POST", "/api/v1/forward_backward", &[], batch(run, seq)).await;
    assert_eq!(status, 200, "{future}");
    future
}

fn batch(run: &str, seq: u64) -> Vec<u8> {
    let data = vec![Datum::completion([5, 6, 7], [8, 9, 10]).unwrap()];
    let pass = ForwardBackward::new(run, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
    pass.to_proto().unwrap().to_vec()
}

fn sample(sampler: &str, seq: u64) -> Value {
    json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 2, "seed": 1}, "num_samples": 1,
        "sampling_session_id": sampler, "seq_id": seq,
    })
}

fn custom_loss(session: &str) -> Value {
    let graph = LossGraph::new(vec![
        GraphNode::placeholder("logprobs"),
        GraphNode::method("total", "sum", [GraphArg::node("logprobs")]),
        GraphNode::output(GraphArg::node("total"), [("custom/a:sum", GraphArg::node("total"))]),
    ]);
    json!({
        "session_id": session, "custom_loss_seq_id": 0, "name": "a",
        "inputs": [{"name": "logprobs", "rank": 1}], "graph": graph,
    })
}

/// What another user gets from a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Isolation {
    /// The response for a request that names objects of another user is the response for objects
    /// that do not exist; the owner gets 200.
    Hidden,
    /// As `Hidden`, and the request has no effect for an unknown object, so that everybody gets 200.
    Ignored,
    /// The response contains objects of the caller only.
    Own,
    /// The response is the same for everybody.
    Same,
    /// Only an administrator may use the route.
    Administrator,
}

/// Returns the isolation of a route, and the path and body of a request that names `objects`. The
/// match is exhaustive: a route added to the protocol does not compile until it is tested.
fn case(route: Route, objects: &Objects) -> (Isolation, String, Vec<u8>) {
    use Isolation::{Administrator, Hidden, Ignored, Own, Same};
    let Objects { session, run, weights, sampler_weights, sampler, request } = objects;
    let checkpoint = [run.as_str(), "weights", weights];
    let path = |params: &[&str]| route.path(params).unwrap();
    let json = |value: Value| value.to_string().into_bytes();
    let with = |isolation, params: &[&str], body: Value| (isolation, path(params), json(body));
    let without = |isolation, params: &[&str]| (isolation, path(params), Vec::new());
    let of_model = |fields: Value| {
        let mut body = json!({"model_id": run});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        with(Hidden, &[], body)
    };
    match route {
        Route::ClientConfig => with(Same, &[], json!({"sdk_version": "0.36.0"})),
        Route::DynamicConfig | Route::AuthToken => with(Same, &[], json!({})),
        Route::Health | Route::ServerCapabilities => without(Same, &[]),
        Route::Telemetry => {
            let batch = json!({"session_id": session, "platform": "x", "sdk_version": "1", "events": [], "process_uuid": "0"});
            with(Ignored, &[], batch)
        }
        Route::CreateSession => with(Own, &[], json!({"tags": [], "sdk_version": "0.36.0"})),
        Route::SessionHeartbeat => with(Hidden, &[], json!({"session_id": session})),
        Route::FinishSession => with(Hidden, &[session], json!({"reason": {"type": "success"}})),
        Route::CreateModel => with(Hidden, &[], create_model(session, 7)),
        Route::GetInfo => of_model(json!({})),
        Route::ForwardBackward => (Hidden, path(&[]), batch(run, 4)),
        Route::OptimStep => with(Hidden, &[], step(run, 5, 0.1)),
        Route::DiscardGradient => of_model(json!({"seq_id": 6})),
        Route::SaveWeights => of_model(json!({"path": "x", "seq_id": 7})),
        Route::SaveWeightsForSampler => of_model(json!({"path": "y", "seq_id": 8})),
        Route::SaveWeightsExternal => of_model(json!({"path": "z", "seq_id": 9})),
        Route::LoadWeights => {
            let body = json!({
                "session_id": session, "model_seq_id": 8, "path": objects.path(), "optimizer": false,
            });
            with(Hidden, &[], body)
        }
        Route::CreateCustomLoss => with(Hidden, &[], custom_loss(session)),
        Route::CreateSamplingSession => {
            let body = json!({
                "session_id": session, "sampling_session_seq_id": 3,
                "model_path": objects.sampler_path(),
            });
            with(Hidden, &[], body)
        }
        Route::JoinSamplingSession => with(Hidden, &[], json!({"sampling_session_id": sampler})),
        Route::Sample => with(Hidden, &[], sample(sampler, 1)),
        Route::RetrieveFuture => with(Hidden, &[], json!({"request_id": request})),
        Route::RetrieveFutures => {
            let target = json!({
                "type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0,
            });
            let body = json!({
                "target": target, "prev_cursor": 0, "retrieved_request_ids": [request],
                "timeout": 0.0,
            });
            with(Hidden, &[], body)
        }
        Route::CancelFuture => with(Ignored, &[], json!({"request_id": request})),
        Route::WeightsInfo => with(Hidden, &[], json!({"tinker_path": objects.path()})),
        Route::CopyWeights => {
            let body = json!({"source_path": objects.path(), "destination_project_id": "p"});
            with(Hidden, &[], body)
        }
        Route::ListTrainingRuns
        | Route::ListUserCheckpoints
        | Route::ListSessions
        | Route::StorageUsage
        | Route::AuditLog
        | Route::GetApiKey => without(Own, &[]),
        Route::SearchSessions => {
            with(Own, &[], json!({"owner": {"type": "accessible"}, "limit": 100}))
        }
        Route::BillingUsage => {
            let period = "starting_on=2026-11-10T00:00:00Z&ending_before=2026-11-20T00:00:00Z";
            (Own, format!("{}?{period}", path(&[])), Vec::new())
        }
        Route::GetTrainingRun
        | Route::ListCheckpoints
        | Route::DeleteTrainingRun
        | Route::ShareRun
        | Route::UnshareRun => without(Hidden, &[run]),
        Route::DeleteCheckpoint | Route::PublishCheckpoint | Route::UnpublishCheckpoint => {
            without(Hidden, &checkpoint)
        }
        Route::SetCheckpointTtl => with(Hidden, &checkpoint, json!({"ttl_seconds": 7_200})),
        Route::ExternalWeightsUrls => without(Hidden, &[run, "sampler_weights", sampler_weights]),
        Route::GetSession => without(Hidden, &[session]),
        Route::AssignSessionProject => with(Hidden, &[session], json!({"project_id": "p"})),
        Route::TraceExport => without(Same, &[session]),
        Route::GetSampler | Route::CloseSampler => without(Hidden, &[sampler]),
        // The id of an import is chosen by the user: another test checks that users do not share
        // the ids.
        Route::ImportAdapter => (Same, format!("{}?name=../x", path(&["a"])), Vec::new()),
        Route::Completions => {
            let body = json!({"model": objects.sampler_path(), "prompt": [5], "max_tokens": 1});
            with(Hidden, &[], body)
        }
        Route::UnloadModel => with(Same, &[], json!({"model_id": run})),
        // Every key may revoke itself: another test does.
        Route::DeleteApiKey => (Administrator, "/api/v1/keys".to_owned(), Vec::new()),
        Route::ListKeys
        | Route::ListUsers
        | Route::StartDrain
        | Route::CancelDrain
        | Route::GetDrainStatus
        | Route::StartBackup
        | Route::GetBackupStatus
        | Route::GetDiskUsage => without(Administrator, &[]),
        Route::CreateKey => with(Administrator, &[], json!({"name": "x", "role": "admin"})),
        Route::RevokeKey | Route::RotateKey => without(Administrator, &["alice"]),
        Route::SetUserLimits => with(Administrator, &["alice"], json!({"queued": 0})),
    }
}

/// Routes that remove objects. Their owner uses them last, in this order.
const REMOVALS: [Route; 4] =
    [Route::CloseSampler, Route::DeleteCheckpoint, Route::FinishSession, Route::DeleteTrainingRun];

/// Sends the request of a route.
async fn send(http: &Http, route: Route, path: &str, body: &[u8]) -> (u16, String) {
    let method = match route {
        Route::DeleteApiKey => "GET",
        _ => route.method().as_str(),
    };
    http.text(method, path, body.to_vec()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_route_shows_or_changes_the_objects_of_another_user() {
    let test_server = key_server().await;
    let alice = user(&test_server, "alice", "alice", "user").await;
    let bob = user(&test_server, "bob", "bob", "user").await;
    let reader = user(&test_server, "alice-reader", "alice", "read").await;
    let objects = Objects::create(&alice).await;
    let unknown = Objects::unknown();
    let routes: Vec<Route> = Route::ALL.iter().chain(Route::EXTENSIONS).copied().collect();
    for &route in &routes {
        let (isolation, path, body) = case(route, &objects);
        let (_, unknown_path, unknown_body) = case(route, &unknown);
        let (status, text) = send(&bob, route, &path, &body).await;
        let context = format!("{route}: {status} {text}");
        match isolation {
            Isolation::Hidden | Isolation::Ignored => {
                let (missing, missing_text) = send(&bob, route, &unknown_path, &unknown_body).await;
                let found = (status, objects.anonymous(&text));
                assert_eq!(found, (missing, unknown.anonymous(&missing_text)), "{context}");
                let is_hidden = matches!(status, 404 | 410);
                assert_eq!(is_hidden, isolation == Isolation::Hidden, "{context}");
            }
            Isolation::Own => {
                assert_eq!(status, 200, "{context}");
                for secret in [&objects.session, &objects.request, &"alice".to_owned()] {
                    assert!(!text.contains(secret.as_str()), "{context}");
                }
            }
            Isolation::Same => {
                let (other, other_text) = send(&alice, route, &path, &body).await;
                assert_eq!((status, &text), (other, &other_text), "{context}");
            }
            Isolation::Administrator => {
                assert_eq!(status, 403, "{context}");
                assert_eq!(send(&alice, route, &path, &body).await.0, 403, "{route}");
            }
        }
    }
    // A key that may only read: nothing that would create or change an object.
    for &route in &routes {
        let (isolation, path, body) = case(route, &objects);
        let (status, text) = send(&reader, route, &path, &body).await;
        let is_change = !matches!(
            route,
            Route::GetInfo
                | Route::WeightsInfo
                | Route::RetrieveFuture
                | Route::RetrieveFutures
                | Route::ClientConfig
                | Route::DynamicConfig
                | Route::Telemetry
                | Route::AuthToken
                | Route::SearchSessions
                | Route::DeleteApiKey
        ) && route.method().as_str() != "GET";
        let is_forbidden = is_change || isolation == Isolation::Administrator;
        assert_eq!(status == 403, is_forbidden, "{route}: {status} {text}");
    }
    // The same requests of the owner succeed after the attempts of the other users.
    let others = routes.iter().filter(|route| !REMOVALS.contains(route));
    for &route in others.chain(&REMOVALS) {
        let (isolation, path, body) = case(route, &objects);
        if matches!(isolation, Isolation::Hidden | Isolation::Ignored | Isolation::Own) {
            let (status, text) = send(&alice, route, &path, &body).await;
            assert_eq!(status, 200, "{route}: {text}");
        }
    }
}

/// Requests beside the table of routes that name objects: inference, dashboard, metrics.
fn other_requests(objects: &Objects) -> Vec<(&'static str, String, Value)> {
    let mut all = Vec::new();
    let names = [objects.sampler_path(), objects.run.clone(), objects.sampler.clone()];
    for prefix in ["/v1", "/oai/api/v1"] {
        for model in &names {
            let prompt = json!({"model": model, "prompt": [5], "max_tokens": 1});
            all.push(("POST", format!("{prefix}/completions"), prompt));
            let encoded = model.replace('/', "%2F");
            all.push(("GET", format!("{prefix}/models/{encoded}"), Value::Null));
        }
    }
    for model in &names {
        let chat = json!({"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
        for path in ["/v1/chat/completions", "/v1/messages"] {
            all.push(("POST", path.to_owned(), chat.clone()));
        }
        let count = json!({"model": model, "messages": [{"role": "user", "content": "a"}]});
        all.push(("POST", "/v1/messages/count_tokens".to_owned(), count));
    }
    for document in ["run", "metrics", "requests"] {
        all.push(("GET", format!("/ui/api/{document}?id={}", objects.run), Value::Null));
    }
    all.push(("POST", "/ui/api/download".to_owned(), json!({"path": objects.sampler_path()})));
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn inference_dashboard_and_metrics_show_only_the_objects_of_the_user() {
    let test_server = key_server().await;
    let alice = user(&test_server, "alice", "alice", "user").await;
    let bob = user(&test_server, "bob", "bob", "user").await;
    let objects = Objects::create(&alice).await;
    let unknown = Objects::unknown();
    for ((method, path, body), (_, unknown_path, unknown_body)) in
        other_requests(&objects).into_iter().zip(other_requests(&unknown))
    {
        let (status, text) = bob.text(method, &path, body.to_string().into_bytes()).await;
        let unknown_body = unknown_body.to_string().into_bytes();
        let (missing, missing_text) = bob.text(method, &unknown_path, unknown_body).await;
        let found = (status, objects.anonymous(&text));
        assert_eq!(found, (missing, unknown.anonymous(&missing_text)), "{method} {path}");
        assert_eq!(status, 404, "{method} {path}: {text}");
        let (own, text) = alice.text(method, &path, body.to_string().into_bytes()).await;
        // The tiny model has no chat template.
        let no_template = path.contains("chat") || path.contains("messages");
        assert!(own == 200 || no_template && own == 400, "{method} {path}: {own} {text}");
    }
    let administrator = administrator(&test_server);
    let lists = ["/v1/models", "/ui/api/info", "/ui/api/runs", "/ui/api/samples", "/metrics"];
    for path in lists {
        let (status, text) = bob.text("GET", path, vec![]).await;
        assert_eq!(status, 200, "{path}: {text}");
        for secret in [objects.session.as_str(), "alice"] {
            assert!(!text.contains(secret), "{path}: {text}");
        }
        if path != "/ui/api/info" {
            for owner in [&alice, &administrator] {
                let (_, text) = owner.text("GET", path, vec![]).await;
                let is_shown = text.contains(&objects.session) || text.contains("alice");
                assert!(is_shown, "{path}: {text}");
            }
        }
    }
    let (_, figures) = bob.text("GET", "/metrics", vec![]).await;
    assert!(figures.contains("tinkex_user_requests{user=\"bob\"} 0"), "{figures}");
    assert!(!figures.contains("tinkex_http_requests_total"), "{figures}");
    assert_eq!(bob.get("/ui/api/server").await.0, 404);
    assert_eq!(administrator.get("/ui/api/server").await.0, 200);
    // The stream of changes begins with the runs that the reader may see.
    let url = test_server.server.base_url();
    let events = http_client().get(format!("{url}/ui/api/events?last=0-0"));
    let key = create_key(&test_server, json!({"name": "b", "user": "bob", "role": "read"})).await;
    let mut events = events.header("x-api-key", &key).send().await.unwrap();
    let own = Objects::create(&bob).await;
    let mut text = String::new();
    while !text.contains(&own.run) {
        let chunk = events.chunk().await.unwrap().expect("the stream ended");
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert!(!text.contains(&objects.session), "{text}");
    // The key of the stream is revoked: the stream ends, and so does a poll that waits.
    assert_eq!(administrator.send("DELETE", "/api/v1/keys/b", &[], vec![]).await.0, 200);
    while events.chunk().await.is_ok_and(|chunk| chunk.is_some()) {}
    assert_eq!(Http::with_key(&url, &key).get("/ui/api/runs").await.0, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_runs_and_published_checkpoints_can_be_read_but_not_changed() {
    let test_server = key_server().await;
    let alice = user(&test_server, "alice", "alice", "user").await;
    let bob = user(&test_server, "bob", "bob", "user").await;
    let carol = user(&test_server, "carol", "carol", "user").await;
    let objects = Objects::create(&alice).await;
    let run = format!("/api/v1/training_runs/{}", objects.run);
    let share = |user: &str| format!("{run}/share?user={user}");
    assert_eq!(alice.send("PUT", &share("bob"), &[], vec![]).await.0, 200);
    assert_eq!(bob.get(&run).await.0, 200);
    assert_eq!(carol.get(&run).await.0, 404);
    assert_eq!(bob.send("DELETE", &run, &[], vec![]).await.0, 403);
    assert_eq!(bob.send("PUT", &share("carol"), &[], vec![]).await.0, 403);
    let (_, listed) = bob.text("GET", "/api/v1/training_runs", vec![]).await;
    assert!(!listed.contains(&objects.run), "own runs only: {listed}");
    let accessible = "/api/v1/training_runs?access_scope=accessible";
    assert!(bob.text("GET", accessible, vec![]).await.1.contains(&objects.run));
    let session = bob.session().await;
    let sampler = json!({
        "session_id": session, "sampling_session_seq_id": 0, "model_path": objects.sampler_path(),
    });
    assert_eq!(bob.post("/create_sampling_session", sampler.clone()).await.0, 200);
    assert_eq!(alice.send("DELETE", &share("bob"), &[], vec![]).await.0, 200);
    assert_eq!(bob.get(&run).await.0, 404);
    // A published checkpoint can be used, and its run stays hidden.
    let info = json!({"tinker_path": objects.path()});
    assert_eq!(carol.post("/weights_info", info.clone()).await.0, 404);
    let publish = format!("{run}/checkpoints/weights/w/publish");
    assert_eq!(alice.send("POST", &publish, &[], vec![]).await.0, 200);
    assert_eq!(carol.post("/weights_info", info.clone()).await.0, 200);
    assert_eq!(carol.get(&run).await.0, 404);
    assert_eq!(carol.send("DELETE", &publish, &[], vec![]).await.0, 403);
    let copy = json!({"source_path": objects.path(), "destination_project_id": "p"});
    let (status, copied) = carol.post("/copy_weights", copy).await;
    assert_eq!(status, 200, "{copied}");
    assert_eq!(
        bob.post("/weights_info", json!({"tinker_path": copied["tinker_path"]})).await.0,
        404
    );
    assert_eq!(alice.send("DELETE", &publish, &[], vec![]).await.0, 200);
    assert_eq!(carol.post("/weights_info", info).await.0, 404);
    // The audit log says who did what.
    let events = |log: &Value| -> Vec<String> {
        let entries = log["entries"].as_array().unwrap().iter();
        entries.map(|entry| entry["event"].as_str().unwrap().to_owned()).collect()
    };
    let (_, log) = alice.get("/api/v1/audit").await;
    let expected = ["run.share", "run.unshare", "checkpoint.publish", "checkpoint.unpublish"];
    assert_eq!(events(&log), expected);
    assert_eq!(log["entries"][0]["event_details"]["user"], "alice");
    let (_, log) = administrator(&test_server).get("/api/v1/audit?event_type=organizations").await;
    assert_eq!(events(&log), ["key.create"; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_stored_as_digests_and_take_effect_at_once() {
    let test_server = key_server().await;
    let url = test_server.server.base_url();
    let key = create_key(&test_server, json!({"name": "alice", "role": "user"})).await;
    let alice = Http::with_key(&url, &key);
    let session = alice.session().await;
    let administrator = administrator(&test_server);
    let (_, listed) = administrator.text("GET", "/api/v1/keys", vec![]).await;
    assert!(listed.contains("alice") && !listed.contains(&key), "{listed}");
    for (request, status) in [
        (json!({"name": "alice", "role": "user"}), 400),
        (json!({"name": "first", "role": "user"}), 400),
        (json!({"name": "a b", "role": "user"}), 400),
        (json!({"name": "b", "role": "owner"}), 422),
        (json!({"name": "b", "role": "user", "lifetime_seconds": 0}), 400),
        (json!({"name": "b", "role": "user", "user": "../x"}), 400),
    ] {
        let (found, body) = administrator.post("/keys", request.clone()).await;
        assert_eq!(found, status, "{request}: {body}");
    }
    // A restart keeps the keys, and the data folder does not contain them.
    let TestServer { server, data } = test_server;
    server.stop().await;
    for entry in std::fs::read_dir(data.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let content = std::fs::read(&path).unwrap();
            let found = content.windows(key.len()).any(|part| part == key.as_bytes());
            assert!(!found, "{}", path.display());
        }
    }
    let options = crate::harness::options(data.path()).api_key(ADMINISTRATOR);
    let server = tinkex_server::Server::start(options).await.unwrap();
    let url = server.base_url();
    let administrator = Http::with_key(&url, ADMINISTRATOR);
    let alice = Http::with_key(&url, &key);
    assert_eq!(alice.get(&format!("/api/v1/sessions/{session}")).await.0, 200);
    // Rotation replaces the key, also for a poll that waits for a result.
    let run = alice.model(&session).await;
    let (_, waiting) = alice.post("/optim_step", step(&run, 5, 0.1)).await;
    let poll = json!({"request_id": waiting["request_id"]});
    let poll = alice.post("/retrieve_future", poll);
    let rotate =
        async { administrator.send("POST", "/api/v1/keys/alice/rotate", &[], vec![]).await };
    let ((polled, _), (status, rotated)) = tokio::join!(poll, rotate);
    assert_eq!((polled, status), (401, 200), "{rotated}");
    let session = format!("/api/v1/sessions/{session}");
    assert_eq!(alice.get(&session).await.0, 401);
    let alice = Http::with_key(&url, rotated["key"].as_str().unwrap());
    assert_eq!(alice.get(&session).await.0, 200);
    // Every key can revoke itself, except for the first key.
    assert_eq!(alice.send("DELETE", "/api/v1/auth/apikey/me", &[], vec![]).await.0, 200);
    assert_eq!(alice.get(&session).await.0, 401);
    assert_eq!(administrator.send("DELETE", "/api/v1/auth/apikey/me", &[], vec![]).await.0, 400);
    assert_eq!(administrator.get(&session).await.0, 200, "administrators see everything");
}

/// Bug: the rotated key has the id of the old one, so URLs that the old key requested stayed valid.
#[tokio::test(flavor = "multi_thread")]
async fn download_urls_end_when_their_key_is_rotated_or_revoked() {
    let test_server = key_server().await;
    let administrator = administrator(&test_server);
    let alice = user(&test_server, "alice", "alice", "user").await;
    let session = alice.session().await;
    let run = alice.model(&session).await;
    let save = json!({"model_id": run, "path": "x", "seq_id": 1});
    let (status, saved) = alice.post("/save_weights_external", save).await;
    assert_eq!(status, 200, "{saved}");
    alice.result(&saved).await;
    let urls =
        format!("/api/v1/training_runs/{run}/checkpoints/external_weights/x/external_weights_urls");
    let mut owner = alice;
    for (method, path) in [("POST", "/api/v1/keys/alice/rotate"), ("DELETE", "/api/v1/keys/alice")]
    {
        let (status, granted) = owner.get(&urls).await;
        assert_eq!(status, 200, "{granted}");
        let url = find_url(&granted).unwrap();
        let download = async || http_client().get(&url).send().await.unwrap().status();
        assert_eq!(download().await, 200);
        let (status, ended) = administrator.send(method, path, &[], vec![]).await;
        assert_eq!(status, 200, "{ended}");
        assert_eq!(download().await, 404, "{method}");
        let key = ended["key"].as_str().unwrap_or_default();
        owner = Http::with_key(&test_server.server.base_url(), key);
    }
}

/// Returns the first URL in a response.
fn find_url(response: &Value) -> Option<String> {
    match response {
        Value::String(text) => text.starts_with("http").then(|| text.clone()),
        Value::Array(items) => items.iter().find_map(find_url),
        Value::Object(fields) => fields.values().find_map(find_url),
        _ => None,
    }
}

/// Bug: the results of other users who had sampled from the run were removed with it.
#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_shared_run_keeps_the_results_of_other_users() {
    let test_server = key_server().await;
    let alice = user(&test_server, "alice", "alice", "user").await;
    let bob = user(&test_server, "bob", "bob", "user").await;
    let objects = Objects::create(&alice).await;
    let run = format!("/api/v1/training_runs/{}", objects.run);
    assert_eq!(alice.send("PUT", &format!("{run}/share"), &[], vec![]).await.0, 200);
    let session = bob.session().await;
    let create = json!({
        "session_id": session, "sampling_session_seq_id": 0, "model_path": objects.sampler_path(),
    });
    let (status, sampler) = bob.post("/create_sampling_session", create).await;
    assert_eq!(status, 200, "{sampler}");
    let sampler = sampler["sampling_session_id"].as_str().unwrap();
    let (status, sampled) = bob.post("/asample", sample(sampler, 0)).await;
    assert_eq!(status, 200, "{sampled}");
    bob.proto_result(&sampled).await;
    let finish = format!("/api/v1/sessions/{}/finish", objects.session);
    let body = json!({"reason": {"type": "success"}, "detail": null}).to_string().into_bytes();
    assert_eq!(alice.send("POST", &finish, &[], body).await.0, 200);
    assert_eq!(alice.send("DELETE", &run, &[], vec![]).await.0, 200);
    bob.proto_result(&sampled).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_requests_of_another_user_do_not_reject_sequence_numbers() {
    let test_server = key_server().await;
    let alice = user(&test_server, "alice", "alice", "user").await;
    let bob = user(&test_server, "bob", "bob", "user").await;
    let session = alice.session().await;
    let run = alice.model(&session).await;
    assert_eq!(bob.post("/optim_step", step(&run, 1, 0.1)).await.0, 404);
    let (_, waiting) = alice.post("/optim_step", step(&run, 2, 0.1)).await;
    // Number 1 is still expected: otherwise the next request would arrive too late.
    let first = pass(&alice, &run, 1).await;
    alice.result(&waiting).await;
    alice.proto_result(&first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dashboard_session_has_the_user_of_its_key() {
    let test_server = key_server().await;
    let url = test_server.server.base_url();
    let key = create_key(&test_server, json!({"name": "bob", "role": "user"})).await;
    let session = administrator(&test_server).session().await;
    administrator(&test_server).model(&session).await;
    let login = http_client().post(format!("{url}/ui/api/login")).header("origin", &url);
    let login = login.body(json!({"key": key}).to_string()).send().await.unwrap();
    assert_eq!(login.status(), 200);
    let cookie = login.headers()["set-cookie"].to_str().unwrap().split(';').next().unwrap();
    let runs = async || {
        let request = http_client().get(format!("{url}/ui/api/runs")).header("cookie", cookie);
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    assert_eq!(runs().await, (200, "{\"runs\":[]}".to_owned()));
    let revoke = administrator(&test_server);
    assert_eq!(revoke.send("DELETE", "/api/v1/keys/bob", &[], vec![]).await.0, 200);
    assert_eq!(runs().await.0, 401);
}
