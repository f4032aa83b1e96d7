//! Attacks with valid requests: one very large training pass, and many samples.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{AttackCounts, Target};
use crate::api::{Api, datum, encode_pass, text};
use crate::load::{Role, measure};

/// Timeout of one request of an attacker.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Number of samples that wait at the same time.
const QUEUED_SAMPLES: u64 = 60;

/// Tokens of a long sample, and samples of one request.
const LONG_SAMPLE: u32 = 1_500;
const SAMPLES_PER_REQUEST: u32 = 16;

/// Tokens of a long prompt: almost the context of the model.
const LONG_PROMPT: u32 = 2_000;

/// Number of users with a mixed load.
const USERS: usize = 100;

/// Number of long prompts, and of results that are not read.
const LONG_PROMPTS: u64 = 200;
const UNREAD_RESULTS: u64 = 1_000;

/// Turns the error of a preparation into a violation: the attack did not take place.
fn finish(result: Result<AttackCounts, String>) -> AttackCounts {
    result.unwrap_or_else(|error| AttackCounts {
        violations: vec![format!("the attack failed: {error}")],
        ..AttackCounts::default()
    })
}

/// Sends the largest training pass that the server accepts.
pub(super) async fn pass(target: Arc<Target>) -> AttackCounts {
    finish(try_pass(&target).await)
}

async fn try_pass(target: &Target) -> Result<AttackCounts, String> {
    let api = target.api();
    let session = api.session(TIMEOUT).await?;
    let model = api.model(&session, TIMEOUT).await?;
    let mut counts = AttackCounts::default();
    let one = encode_pass(&model, 1, vec![datum(1_024, 0)?])?.len();
    for mebibytes in [64, 32, 16] {
        let count = ((mebibytes << 20) - (64 << 10)) / one;
        let data: Result<Vec<_>, _> = (0..).take(count).map(|n| datum(1_024, n)).collect();
        let body = encode_pass(&model, 1, data?)?;
        let headers = [("content-type", "application/x-protobuf")];
        let path = "/api/v1/forward_backward";
        let sent = api.http.call("POST", path, &headers, &body, TIMEOUT).await?;
        counts.count(Some(sent.status));
        if sent.is_success() {
            counts.accepted.push(text(&sent.json(), "request_id")?);
            break;
        }
    }
    if counts.accepted.is_empty() {
        return Err("no pass was accepted".to_owned());
    }
    let step = json!({
        "model_id": model, "seq_id": 2, "type": "optim_step",
        "adam_params": {"learning_rate": 1e-3},
    });
    let step = api.request("optim_step", &step, TIMEOUT).await?;
    counts.accepted.push(text(&step, "request_id")?);
    counts.requests += 1;
    tokio::time::sleep(target.time_left()).await;
    Ok(counts)
}

/// Queues many long samples of one session.
pub(super) async fn starvation(target: Arc<Target>) -> AttackCounts {
    let request = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": LONG_SAMPLE, "stop": []},
        "num_samples": SAMPLES_PER_REQUEST,
    });
    finish(samples(&target, request, QUEUED_SAMPLES).await)
}

/// Sends many prompts that are as long as the context allows.
pub(super) async fn prefill(target: Arc<Target>) -> AttackCounts {
    let tokens: Vec<u32> = (0..LONG_PROMPT).map(|n| n % 90 + 5).collect();
    let request = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": {"max_tokens": 1, "stop": []},
    });
    finish(samples(&target, request, LONG_PROMPTS).await)
}

/// Lets many users complete prompts, read streams, sample, train and look at the dashboard.
pub(super) async fn many_users(target: Arc<Target>) -> AttackCounts {
    finish(try_many_users(&target).await)
}

async fn try_many_users(target: &Target) -> Result<AttackCounts, String> {
    let administrator = Api::new(&target.address, Some(&target.administrator));
    let mut groups: Vec<(Role, Vec<String>)> =
        (0..10).map(|n| (Role::of_client(n), Vec::new())).collect();
    for user in 0..USERS {
        let key = administrator.user(&format!("user-{user}"), &target.administrator).await?;
        groups[user % 10].1.push(key);
    }
    let mut users = JoinSet::new();
    for (role, keys) in groups {
        let address = target.address.clone();
        let end = target.end;
        users.spawn(async move { measure(&address, &keys, &[role], end).await });
    }
    let mut counts = AttackCounts::default();
    while let Some(ended) = users.join_next().await {
        for client in ended.map_err(|error| error.to_string())??.clients {
            counts.requests += client.times.len() as u64;
            // These users are honest, too.
            counts.violations.extend(client.failures);
        }
    }
    Ok(counts)
}

/// Requests large results and never reads them.
pub(super) async fn unread_results(target: Arc<Target>) -> AttackCounts {
    let tokens: Vec<u32> = (0..500).map(|n| n % 90 + 5).collect();
    let request = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": {"max_tokens": 1, "stop": []},
        "prompt_logprobs": true, "topk_prompt_logprobs": 100,
    });
    finish(samples(&target, request, UNREAD_RESULTS).await)
}

/// Sends up to `count` copies of a sample, whose first token differs so that no prefix is shared.
async fn samples(target: &Target, mut request: Value, count: u64) -> Result<AttackCounts, String> {
    let api: Api = target.api();
    let session = api.session(TIMEOUT).await?;
    request["sampling_session_id"] = json!(api.sampler(&session, TIMEOUT).await?);
    let mut counts = AttackCounts::default();
    for seq in 0..count {
        if target.has_ended() {
            break;
        }
        request["seq_id"] = json!(seq);
        request["prompt"]["chunks"][0]["tokens"][0] = json!(seq % 200 + 5);
        let sent = api.http.post("/api/v1/asample", &request, TIMEOUT).await?;
        counts.count(Some(sent.status));
        if sent.is_success() {
            counts.accepted.push(text(&sent.json(), "request_id")?);
        } else {
            // The number of a refused request stays free, and later requests would wait for it.
            break;
        }
    }
    tokio::time::sleep(target.time_left()).await;
    Ok(counts)
}
