//! Several clients in one process: no shared state beyond the backoff, and no leaks.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tinkex::testing::RecordedCall;
use tinkex::{
    AdamParams, Datum, ErrorKind, LossFn, SampleResponse, SampledSequence, SamplingClient,
    SamplingParams, ServiceClient,
};
use tokio::time::{Instant, sleep};

use crate::numbered_server::{NumberedServer, sample_output};

fn params() -> SamplingParams {
    SamplingParams::new().max_tokens(1)
}

fn service(server: &NumberedServer, key: &str) -> ServiceClient {
    server.builder().api_key(key).build().unwrap()
}

/// Trains and samples concurrently: 10 steps and 120 samples. Returns how many succeeded.
async fn train_and_sample(service: &ServiceClient) -> (usize, SamplingClient) {
    let model = service.create_lora_training_client("base").await.unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let data = || vec![Datum::completion([1, 2], [3]).unwrap(); 4];
    let step = || model.step(data(), LossFn::CrossEntropy, AdamParams::default());
    let steps: Vec<_> = (0..10).map(|_| step()).collect();
    let samples: Vec<_> = (0..120).map(|_| sampler.sample([1, 2, 3], params())).collect();
    let mut done = 0;
    for step in steps {
        step.await.unwrap();
        done += 1;
    }
    done += join_all(samples).await.into_iter().filter(Result::is_ok).count();
    (done, sampler)
}

/// Covers T6.3.1.
#[tokio::test(start_paused = true)]
async fn two_training_and_many_sampling_clients_leave_no_tasks_or_references() {
    let server = NumberedServer::new(json!({}));
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let references = server.references();
    {
        let service = service(&server, "tml-many");
        let create = || async {
            let model = service.create_lora_training_client("base").await.unwrap();
            let data = vec![Datum::completion([1, 2], [3]).unwrap(); 4];
            model.forward_backward(data, LossFn::CrossEntropy).await.unwrap();
            model.optim_step(AdamParams::default()).await.unwrap();
        };
        let samplers = (0..50).map(async |_| {
            let sampler = service.create_sampling_client("base").await.unwrap();
            let samples = (0..10).map(|_| sampler.sample([1], params()));
            let done = join_all(samples).await;
            assert!(done.iter().all(Result::is_ok), "{:?}", done.iter().find(|d| d.is_err()));
            // A dropped sample leaves nothing either.
            drop(sampler.sample([1], params()));
        });
        tokio::join!(create(), create(), join_all(samplers));
        assert!(tasks() > before, "the background tasks run");
    }
    sleep(Duration::from_secs(60)).await;
    assert_eq!(tasks(), before, "a task outlived all clients");
    assert_eq!(server.references(), references, "a client was not dropped");
    assert_eq!(server.requests("/asample").len(), 500);
}

/// Covers T6.3.1.
#[tokio::test(start_paused = true)]
async fn settings_of_two_services_do_not_cross_in_any_request() {
    let server = NumberedServer::new(json!({}));
    let shared = server.builder();
    let names = ["a", "b"];
    let programs = names.map(|name| {
        // Clones of a builder share their HTTP service and its backoffs.
        let builder = shared.clone().api_key(format!("tml-{name}")).header("x-team", name);
        let service = builder.project_id(name).build().unwrap();
        async move {
            let model = service.create_lora_training_client(name).await.unwrap();
            let data = || vec![Datum::completion([1, 2], [3]).unwrap(); 4];
            let step = |_| model.step(data(), LossFn::CrossEntropy, AdamParams::default());
            let samplers = (0..25).map(async |_| {
                let sampler = service.create_sampling_client(name).await.unwrap();
                join_all((0..4).map(|_| sampler.sample([1], params()))).await
            });
            let (steps, samples) = tokio::join!(join_all((0..5).map(step)), join_all(samplers));
            assert!(steps.iter().all(Result::is_ok));
            assert!(samples.iter().flatten().all(Result::is_ok));
        }
    });
    join_all(programs).await;
    let requests = server.requests("");
    for name in names {
        let of_key = |key: &str, path: &str| {
            let key = format!("tml-{key}");
            let is_of_key = |r: &&_| RecordedCall::header(r, "x-api-key") == Some(&key);
            let calls = requests.iter().filter(is_of_key);
            calls.filter(|call| call.path.contains(path)).cloned().collect::<Vec<_>>()
        };
        let calls = of_key(name, "");
        assert!(calls.iter().all(|call| call.header("x-team") == Some(name)), "{name}");
        assert_eq!(of_key(name, "/asample").len(), 100, "{name}");
        assert_eq!(of_key(name, "/forward_backward").len(), 5, "{name}");
        for (path, field) in [
            ("/create_session", "project_id"),
            ("/create_model", "base_model"),
            ("/create_sampling_session", "base_model"),
        ] {
            let bodies = of_key(name, path);
            assert!(!bodies.is_empty(), "{name} {path}");
            assert!(bodies.iter().all(|call| call.json()[field] == name), "{name} {path}");
        }
    }
}

/// Covers P6C.6.
#[tokio::test(start_paused = true)]
async fn keys_of_one_registry_have_their_own_backoffs() {
    let server = NumberedServer::new(json!({}));
    // Clones of a builder share one registry of backoffs.
    let builder = server.builder();
    let sampler = async |key: &str| {
        let service = builder.clone().api_key(key).build().unwrap();
        service.create_sampling_client("base").await.unwrap()
    };
    let limited = sampler("tml-a").await;
    let same_key = sampler("tml-a").await;
    let other_key = sampler("tml-b").await;
    server.samples(vec![json!({"status": 429, "retry-after": "50"})]);
    let waiting = limited.sample([1], params());
    sleep(Duration::from_secs(1)).await;
    let remaining = [&limited, &same_key, &other_key].map(SamplingClient::backoff_remaining);
    let rest = Some(Duration::from_secs(49));
    assert_eq!(remaining, [rest, rest, None]);
    let start = Instant::now();
    other_key.sample([1], params()).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    same_key.sample([1], params()).await.unwrap();
    assert_eq!(start.elapsed(), Duration::from_secs(49));
    waiting.await.unwrap();
}

/// Covers P6C.1, P6C.2.
#[tokio::test(start_paused = true)]
async fn two_services_train_and_sample_without_crosstalk() {
    let one = NumberedServer::new(json!({}));
    let two = NumberedServer::new(json!({}));
    // Clones of a builder share the backoffs of its HTTP service.
    let a = one.builder().api_key("tml-crosstalk-a");
    let b = two.builder().api_key("tml-crosstalk-b");
    let same_server = a.clone().build().unwrap();
    let other_server = b.clone().build().unwrap();
    let a = a.build().unwrap();
    let b = b.build().unwrap();
    one.samples(vec![json!({"status": 429, "retry-after": "50"})]);
    let start = Instant::now();
    let busy = async {
        let result = train_and_sample(&a).await;
        (result, start.elapsed())
    };
    let free = async {
        let (done, sampler) = train_and_sample(&b).await;
        (done, start.elapsed(), sampler.backoff_remaining())
    };
    let observer = async {
        sleep(Duration::from_secs(5)).await;
        let same_server = same_server.create_sampling_client("base").await.unwrap();
        let other_server = other_server.create_sampling_client("base").await.unwrap();
        (same_server.backoff_remaining(), other_server.backoff_remaining())
    };
    let (((a_done, _), a_took), (b_done, b_took, b_backoff), (same_server, other_server)) =
        tokio::join!(busy, free, observer);
    assert_eq!((a_done, b_done), (130, 130), "every request completed");
    assert!(
        same_server.is_some_and(|remaining| remaining > Duration::from_secs(40)),
        "clients of one server and key share the backoff: {same_server:?}"
    );
    assert_eq!((other_server, b_backoff), (None, None), "another server has its own backoff");
    assert!(a_took >= Duration::from_secs(50) && b_took < Duration::from_secs(40), "{b_took:?}");
    for (server, key) in [(&one, "tml-crosstalk-a"), (&two, "tml-crosstalk-b")] {
        let keys: BTreeSet<String> = server
            .requests("")
            .iter()
            .map(|request| request.header("x-api-key").unwrap().to_owned())
            .collect();
        assert_eq!(keys, BTreeSet::from([key.to_owned()]));
        let numbers = server.sequence_numbers("/optim_step");
        assert_eq!(numbers, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]);
    }
}

/// Covers T6.3.2.
#[tokio::test(start_paused = true)]
async fn no_result_is_lost_on_an_unreliable_server() {
    let server = NumberedServer::new(json!({}));
    let outcomes =
        [json!(503), json!("conn"), json!("ok"), json!(429), json!("timeout"), json!("ok")];
    server.samples(outcomes.iter().cycle().take(240).cloned().collect());
    for seq in [3, 7] {
        let responses = vec![json!(500), json!(429), json!("conn"), json!({"metrics": {}})];
        server.respond(&format!("r{seq}"), responses);
    }
    server.reject(5);
    let service = service(&server, "tml-unreliable");
    let model = service.create_lora_training_client("base").await.unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let steps: Vec<_> = (0..10).map(|_| model.optim_step(AdamParams::default())).collect();
    let samples = join_all((0..100).map(|_| sampler.sample([1], params())));
    let (steps, samples) = tokio::join!(join_all(steps), samples);
    assert!(samples.iter().all(Result::is_ok));
    let failed: Vec<_> = steps.iter().filter_map(|step| step.as_ref().err()).collect();
    assert_eq!(failed.len(), 1, "only the rejected request failed");
    assert_eq!(failed[0].kind(), ErrorKind::Rejected);
}

/// Covers T4.2.1, AUD.5, AUD.7.
#[tokio::test(start_paused = true)]
async fn dropped_clients_leave_no_tasks() {
    let server = NumberedServer::new(json!({}));
    let one = service(&server, "tml-dropped");
    for _ in 0..2000 {
        // Each client has its own sequence range, concurrency limit and queue log.
        drop(one.create_sampling_client("base").await.unwrap());
    }
    let alive = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert!(alive < 20, "{alive} tasks are alive");
    drop(one);
    sleep(Duration::from_secs(60)).await;
    let alive = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert_eq!(alive, 0, "all tasks ended with their clients");
}

/// Covers R-RH, AUD.5, AUD.8.
#[tokio::test(start_paused = true)]
async fn concurrent_samples_are_limited() {
    for (server_limit, user_limit, expected) in [(5, None, 5), (5, Some(3), 3), (2, Some(9), 2)] {
        let server = NumberedServer::new(json!({"sample_max_concurrent_requests": server_limit}));
        let mut builder = server.builder().api_key("tml-limited");
        if let Some(user_limit) = user_limit {
            builder = builder.max_concurrent_samples(user_limit);
        }
        let service = builder.build().unwrap();
        let sampler = service.create_sampling_client("base").await.unwrap();
        for seq in 0..20 {
            server.respond(&format!("q{seq}"), vec![json!("hang")]);
        }
        let waiting: Vec<_> = (0..20).map(|_| sampler.sample([1], params())).collect();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(server.requests("/asample").len(), expected);
        // Another sampling client has its own limit.
        let other = service.create_sampling_client("base").await.unwrap();
        let sequence = SampledSequence::default().tokens([7]);
        let response = SampleResponse::default().sequences(vec![sequence]);
        server.respond("q0", vec![sample_output(&response)]);
        other.sample([1], params()).await.unwrap();
        drop(waiting);
    }
}

/// Covers P4C.3, P4C.4.
#[tokio::test(start_paused = true)]
async fn a_sample_does_not_wait_for_training() {
    let server = NumberedServer::new(json!({}));
    let service = service(&server, "tml-independent");
    let model = service.create_lora_training_client("base").await.unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    // One step that never completes, and one that does.
    server.respond("r1", vec![json!("hang")]);
    let stuck = model.optim_step(AdamParams::default());
    let start = Instant::now();
    sampler.sample([1], params()).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    model.optim_step(AdamParams::default()).await.unwrap();
    drop(stuck);
}
