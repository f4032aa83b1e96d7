//! Tests with paused time and clocks that are set.

use std::path::Path;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use tinkex_store::clock::{ManualClocks, TICK};
use tinkex_store::store::SharedWith;
use tinkex_store::store::{
    CheckpointRecord, LoraSettings, ModelRunRecord, RequestRecord, ResultKind, ResultRecord,
    SequenceScope, UnixMicros,
};
use tinkex_store::user::UserId;
use tinkex_wire::OptimizerConfig;

use super::*;
use crate::ServerOptions;
use crate::environment::Environment;
use crate::models::BaseModels;
use crate::state::ServerState;

const SECOND: UnixMicros = 1_000_000;
const DAY: UnixMicros = 86_400 * SECOND;
const START: UnixMicros = 20_000 * DAY;

/// Opens a data folder as a server does, without worker and listener.
fn open(folder: &Path, clocks: &Arc<ManualClocks>) -> Arc<ServerState> {
    let clocks: Arc<ManualClocks> = Arc::clone(clocks);
    let environment = Environment { clocks, ..Environment::of_this_machine() };
    let Environment { executor, clocks, .. } = &environment;
    let store = Store::open(folder, 1 << 20, executor, Arc::clone(clocks)).unwrap();
    std::fs::create_dir_all(folder.join("tokenizer")).unwrap();
    let options = ServerOptions::new(folder);
    let weights = folder.join("weights");
    let models = BaseModels::find(&folder.join("tokenizer"), &options).unwrap();
    Arc::new(ServerState::new(options, store, models, weights, environment))
}

/// Makes everything durable and ends the server.
fn stop(state: &Arc<ServerState>) {
    state.store().save_clock();
    state.close().unwrap().block();
}

/// Lets the process run for some seconds.
async fn run_for(state: &Arc<ServerState>, seconds: u32) {
    for _ in 0..seconds {
        tokio::time::advance(TICK).await;
        state.clock.tick();
    }
}

/// Adds a session with a run and a finished request.
fn add_session(state: &Arc<ServerState>) {
    let mut store = state.store();
    let created_at = store.clock.now();
    store.put_unconfirmed(Record::Session(SessionRecord {
        id: "s".into(),
        owner: UserId::default(),
        created_at,
        tags: Vec::new(),
        metadata_bytes: 0,
        project_id: None,
        display_name: None,
        end: None,
        ended_at: None,
    }));
    add_run(&mut store, "s:train:0");
    let request = RequestRecord {
        number: store.disk.next_payload_number(),
        id: "r".into(),
        kind: RequestKind::ForwardBackward,
        session: "s".into(),
        scope: SequenceScope::Model("s:train:0".into()),
        seq: 0,
        digest: "d".to_owned(),
        seed: 0,
        samples: 0,
        tokens: 0,
        source: None,
        at: created_at,
    };
    store.add_request(request, vec![], Bytes::new(), Box::new(|_| {}));
    let request = Arc::clone(&store.requests["r"].row);
    let number = store.disk.next_payload_number();
    let result = ResultKind::Json;
    let usage = Vec::new();
    let record = ResultRecord {
        request,
        number,
        size: 0,
        result: result.clone(),
        model_changed: false,
        at: created_at,
        usage,
    };
    store.record_result(record, vec![], Bytes::new(), Box::new(|_| {}));
    store.publish(&"r".into(), result, Bytes::new(), number);
}

const LORA: LoraSettings =
    LoraSettings { rank: 4, seed: 1, train_unembed: true, train_mlp: true, train_attn: true };

fn add_run(store: &mut Store, id: &str) {
    let created_at = store.clock.now();
    store.put_unconfirmed(Record::Run(ModelRunRecord {
        id: id.into(),
        owner: UserId::default(),
        session: "s".into(),
        number: 0,
        base_model: "m".to_owned(),
        lora: LORA,
        optimizer: OptimizerConfig::adamw(),
        metadata_bytes: 0,
        name: None,
        created_at,
        closed: None,
        snapshot: None,
        last_seq: None,
        project_id: None,
        upstream: None,
        dropped_pass: None,
        shared_with: SharedWith::default(),
    }));
}

fn path(name: &str) -> TinkerPath {
    format!("tinker://s:train:0/weights/{name}").parse().unwrap()
}

/// Adds a checkpoint that expires in an hour.
fn add_checkpoint(state: &Arc<ServerState>, name: &str) {
    let mut store = state.store();
    let created_at = store.clock.now();
    let expires_at = Some(store.clock.in_seconds(3_600));
    store.put_unconfirmed(Record::Checkpoint(CheckpointRecord {
        path: path(name),
        weights: WeightsLocation::Local(name.to_owned()),
        request: None,
        seq: None,
        created_at,
        expires_at,
        size_bytes: 1,
        public: false,
        metadata_bytes: 0,
        base_model: "m".to_owned(),
        lora: LORA,
        optimizer: OptimizerConfig::adamw(),
    }));
}

/// Returns whether the session is silent and whether the result still exists.
fn status(state: &Arc<ServerState>) -> (bool, bool) {
    state.expiry.remove_records();
    (state.expiry.is_silent(&"s".into()), state.store().requests.contains_key("r"))
}

#[tokio::test(start_paused = true)]
async fn sessions_and_results_expire_after_their_timeouts() {
    let folder = tempfile::tempdir().unwrap();
    let state = open(folder.path(), &ManualClocks::new(START, "boot", 0));
    add_session(&state);
    run_for(&state, 899).await;
    assert_eq!(status(&state), (false, true));
    run_for(&state, 1).await;
    assert_eq!(status(&state), (true, true));
    state.store().touch(&"s".into());
    run_for(&state, 2_699).await;
    assert_eq!(status(&state), (true, true));
    run_for(&state, 1).await;
    assert_eq!(status(&state), (true, false));
}

#[tokio::test(start_paused = true)]
async fn a_stopped_process_expires_neither_live_sessions_nor_unfetched_results() {
    let folder = tempfile::tempdir().unwrap();
    let state = open(folder.path(), &ManualClocks::new(START, "boot", 0));
    add_session(&state);
    add_checkpoint(&state, "c");
    run_for(&state, 890).await;
    // SIGSTOP for a day. The expiry task may run before the task that ticks the clock.
    tokio::time::advance(Duration::from_secs(86_400)).await;
    assert_eq!(status(&state), (false, true));
    assert!(state.store().checkpoints.is_empty(), "the time to live of a checkpoint passes");
    // The session has seven seconds left, but clients get a minute to reconnect.
    run_for(&state, 59).await;
    assert_eq!(status(&state), (false, true));
    run_for(&state, 1).await;
    assert_eq!(status(&state), (true, true));
}

#[tokio::test(start_paused = true)]
async fn a_wall_clock_that_is_set_expires_nothing_and_immortalises_nothing() {
    for set_by in [-400 * DAY, -3 * DAY, 3 * DAY, 400 * DAY] {
        let folder = tempfile::tempdir().unwrap();
        let clocks = ManualClocks::new(START, "boot", 0);
        let state = open(folder.path(), &clocks);
        add_session(&state);
        add_checkpoint(&state, "c");
        let deleted = Record::CheckpointDeleted { path: path("deleted"), at: state.clock.now() };
        state.store().put_unconfirmed(deleted);
        // The clock is set while the server runs.
        clocks.wall.fetch_add(set_by, Ordering::Relaxed);
        run_for(&state, 60).await;
        assert_eq!(status(&state), (false, true));
        assert_eq!(state.clock.now(), START + 60 * SECOND);
        clocks.since_boot.store(60 * SECOND, Ordering::Relaxed);
        stop(&state);

        // The wall clock is still wrong at the next start, or is set again.
        for wall in [START + set_by, START - set_by] {
            clocks.wall.store(wall, Ordering::Relaxed);
            clocks.since_boot.fetch_add(60 * SECOND, Ordering::Relaxed);
            let state = open(folder.path(), &clocks);
            assert_eq!(status(&state), (false, true), "{set_by}");
            assert!(state.store().checkpoint(&path("c")).is_some());
            assert!(state.store().deleted_checkpoints.contains_key(&path("deleted")));
            // New objects are newer than old ones.
            let mut store = state.store();
            let before = store.runs["s:train:0"].last_used;
            add_run(&mut store, "s:train:1");
            assert!(store.runs["s:train:1"].last_used > before);
            drop(store);
            stop(&state);
        }
        clocks.since_boot.store(3_600 * SECOND, Ordering::Relaxed);
        let state = open(folder.path(), &clocks);
        state.expiry.remove_records();
        assert!(state.store().checkpoints.is_empty(), "its hour has passed");
        stop(&state);
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_reboot_the_time_does_not_go_back() {
    let folder = tempfile::tempdir().unwrap();
    let state = open(folder.path(), &ManualClocks::new(START, "first", 500 * SECOND));
    add_checkpoint(&state, "c");
    stop(&state);
    let state = open(folder.path(), &ManualClocks::new(START - 3 * DAY, "second", 5 * SECOND));
    assert!((START..START + SECOND).contains(&state.clock.now()));
    run_for(&state, 3_601).await;
    state.expiry.remove_records();
    assert!(state.store().checkpoints.is_empty());
    stop(&state);
}

/// Adds a sampling session with weights in the folder `weights`; without a name if `run` is given.
fn add_sampler(state: &Arc<ServerState>, id: &str, weights: &str, run: Option<&str>) {
    state.store().put_unconfirmed(Record::Sampler(SamplerRecord {
        id: id.into(),
        session: "s".into(),
        base_model: "m".to_owned(),
        model_path: None,
        weights: Some(WeightsLocation::Local(weights.to_owned())),
        run: run.map(Into::into),
        clients: 1,
        end: None,
        weights_released: false,
    }));
}

/// Adds a sample without an outcome.
fn add_sample(state: &Arc<ServerState>, sampler: &str) {
    let mut store = state.store();
    let request = RequestRecord {
        number: store.disk.next_payload_number(),
        id: format!("sample of {sampler}").into(),
        kind: RequestKind::Sample,
        session: "s".into(),
        scope: SequenceScope::Sampler(sampler.into()),
        seq: 0,
        digest: "d".to_owned(),
        seed: 0,
        samples: 1,
        tokens: 0,
        source: None,
        at: store.clock.now(),
    };
    store.add_request(request, vec![], Bytes::new(), Box::new(|_| {}));
}

/// Returns the ids of the sampling sessions that can be sampled from, and the folders in use.
fn samplers(state: &Arc<ServerState>) -> (Vec<String>, Vec<String>) {
    state.expiry.remove_records();
    let store = state.store();
    let open = store.samplers.keys().filter(|id| store.open_sampler(id).is_ok());
    let mut open: Vec<String> = open.map(ToString::to_string).collect();
    let in_use = store.weights_in_use().into_iter();
    let mut folders: Vec<String> = in_use.filter_map(WeightsLocation::into_local).collect();
    open.sort();
    folders.sort();
    (open, folders)
}

#[tokio::test(start_paused = true)]
async fn unused_weights_without_a_name_are_released() {
    let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
    let folder = tempfile::tempdir().unwrap();
    let clocks = ManualClocks::new(START, "boot", 0);
    let state = open(folder.path(), &clocks);
    add_session(&state);
    add_sampler(&state, "busy", "a", Some("s:train:0"));
    add_sampler(&state, "named", "b", None);
    add_sampler(&state, "unused", "c", Some("s:train:0"));
    add_sampler(&state, "used", "d", Some("s:train:0"));
    add_sample(&state, "busy");
    run_for(&state, 3_600).await;
    state.store().touch_sampler(&"used".into());
    run_for(&state, 5 * 3_600 - 1).await;
    let all = (texts(&["busy", "named", "unused", "used"]), texts(&["a", "b", "c", "d"]));
    assert_eq!(samplers(&state), all);
    run_for(&state, 1).await;
    let open_ones = (texts(&["busy", "named", "used"]), texts(&["a", "b", "d"]));
    assert_eq!(samplers(&state), open_ones);
    let error = state.store().open_sampler(&"unused".into()).unwrap_err().to_string();
    assert!(error.contains("it was not used for a long time"), "{error}");
    stop(&state);

    // The next process remembers the end, and measures the time of the others anew.
    let state = open(folder.path(), &clocks);
    run_for(&state, 6 * 3_600 - 1).await;
    assert_eq!(samplers(&state), open_ones);
    run_for(&state, 1).await;
    assert_eq!(samplers(&state), (texts(&["busy", "named"]), texts(&["a", "b"])));
    stop(&state);
}

/// A killed server continues to wait for the samples of a closed sampling session.
#[tokio::test(start_paused = true)]
async fn the_weights_of_a_closed_sampling_session_are_kept_for_its_samples() {
    let folder = tempfile::tempdir().unwrap();
    let clocks = ManualClocks::new(START, "boot", 0);
    let state = open(folder.path(), &clocks);
    add_session(&state);
    add_sampler(&state, "closed", "a", Some("s:train:0"));
    add_sample(&state, "closed");
    let row = state.store().samplers["closed"].row.clone();
    let row = SamplerRecord { end: Some(SamplerEnd::Closed), ..row };
    state.store().put_unconfirmed(Record::Sampler(row));
    assert_eq!(samplers(&state), (vec![], vec!["a".to_owned()]));
    stop(&state);
    let state = open(folder.path(), &clocks);
    assert_eq!(samplers(&state), (vec![], vec!["a".to_owned()]));
    let id = "sample of closed".into();
    let failed = Outcome::failed(FailureCategory::User, "");
    state.expiry.context.outcomes.record_locking(&id, failed);
    // The outcome is visible once it is durable.
    while state.store().requests[&id].finished_at().is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!(samplers(&state), (vec![], vec![]));
    stop(&state);
}

#[tokio::test]
async fn an_unreferenced_folder_is_removed_although_it_shares_a_prefix_with_one_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let state = open(folder.path(), &ManualClocks::new(START, "boot", 0));
    add_checkpoint(&state, "run-v1.5");
    let kept = ["run-v1.5", ".run-v1.5.a8Xf2k", ".run-v1.5.tinkex-replaced"];
    let removed = ["run-v1.55", "run-v1.5.a8Xf2k", ".run-v1.55.a8Xf2k", ".run-v1.a8Xf2k", "run"];
    let names = kept.iter().chain(&removed).map(ToString::to_string).collect();
    assert_eq!(state.expiry.unreferenced(names).await.unwrap(), removed);
    stop(&state);
}
