//! Tests of the store: replay after a restart, results, usage, and references to weights.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use bytes::Bytes;
use tinkex_wire::{CheckpointKind, FinishDetails, FinishReason, OptimizerConfig};

use super::*;
use crate::clock::OperatingSystem;
use crate::disk::tests::faults::{open_with_failing_commits, wait_for_writer};
use crate::executor::Executor;
use crate::user::UserId;
use crate::weights::RemoteWeights;

fn local(folder: &str) -> WeightsLocation {
    WeightsLocation::Local(folder.to_owned())
}

fn on_upstream(path: &str) -> WeightsLocation {
    let upstream = "up".to_owned();
    WeightsLocation::Upstream(RemoteWeights { upstream, path: path.to_owned() })
}

fn session(n: usize) -> Record {
    Record::Session(SessionRecord {
        id: "s".into(),
        owner: UserId::default(),
        created_at: 1,
        tags: vec![format!("{n}")],
        metadata_bytes: 0,
        project_id: None,
        display_name: None,
        end: None,
        ended_at: None,
    })
}

fn run() -> Record {
    let lora =
        LoraSettings { rank: 4, seed: 1, train_unembed: true, train_mlp: true, train_attn: true };
    Record::Run(ModelRunRecord {
        id: "s:train:0".into(),
        owner: UserId::default(),
        session: "s".into(),
        number: 0,
        base_model: "m".to_owned(),
        lora,
        optimizer: OptimizerConfig::adamw(),
        metadata_bytes: 0,
        name: None,
        created_at: 1,
        closed: None,
        snapshot: None,
        last_seq: None,
        project_id: None,
        upstream: None,
        dropped_pass: None,
        shared_with: SharedWith::default(),
    })
}

fn request(id: &str, seq: u64) -> RequestRecord {
    RequestRecord {
        number: 0,
        id: id.into(),
        kind: RequestKind::ForwardBackward,
        session: "s".into(),
        scope: SequenceScope::Model("s:train:0".into()),
        seq,
        digest: "d".to_owned(),
        seed: 0,
        samples: 0,
        tokens: 0,
        source: None,
        at: 1,
    }
}

/// Adds a request whose body is its id.
fn add_request(store: &mut Store, row: RequestRecord) {
    let number = store.disk.next_payload_number();
    let body = Bytes::from(row.id.to_string());
    store.add_request(RequestRecord { number, ..row }, vec![], body, ignore_result());
}

/// Records the result of a request and returns its payload number.
fn record_result(store: &mut Store, id: &str, model_changed: bool, payload: &Bytes) -> u64 {
    let meter = UsageMeter::Training;
    let account = Account { owner: UserId::default(), session: "s".into() };
    let key = UsageKey::new(1, &account, "m", meter);
    let request = Arc::clone(&store.requests[id].row);
    let number = store.disk.next_payload_number();
    let size = payload.len();
    let usage = vec![(key, 5)];
    let result = ResultKind::Json;
    let record = ResultRecord { request, number, size, result, model_changed, at: 1, usage };
    store.record_result(record, vec![], payload.clone(), ignore_result());
    number
}

/// Waits until all queued writes are durable.
fn flush(store: &mut Store) {
    let (sender, receiver) = mpsc::channel();
    store.put(vec![session(0)], Box::new(move |written| drop(sender.send(written))));
    receiver.recv().unwrap().unwrap();
}

/// Compacts the payload file and waits for it.
fn compact(store: &mut Store) {
    let (sender, receiver) = mpsc::channel();
    store.disk.compact(0, Box::new(move |result| drop(sender.send(result))));
    receiver.recv().unwrap().unwrap();
}

fn open(folder: &Path) -> Store {
    Store::open(folder, 1 << 20, &Executor::threads(), Arc::new(OperatingSystem)).unwrap()
}

fn model(store: &Store) -> &Tracked<ModelRunRecord> {
    &store.runs[&ModelId::from("s:train:0")]
}

#[test]
fn compaction_preserves_the_state() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.put_unconfirmed(session(0));
    store.put_unconfirmed(run());
    // The first two requests are acknowledged; only "changed" modified the model. "waits" is
    // unfinished.
    for (id, seq) in [("changed", 1), ("other", 2), ("finished", 3), ("waits", 4)] {
        add_request(
            &mut store,
            RequestRecord { at: 1_000 + i64::try_from(seq).unwrap(), ..request(id, seq) },
        );
    }
    let other = store.requests["other"].row.number;
    for (id, changed) in [("changed", true), ("other", false), ("finished", false)] {
        let payload = Bytes::from(format!("result of {id}"));
        let number = record_result(&mut store, id, changed, &payload);
        store.publish(&id.into(), ResultKind::Json, payload, number);
    }
    store.remove_results(vec!["changed".into(), "other".into()]);
    flush(&mut store);
    let before = store.disk.payload_bytes();
    compact(&mut store);
    assert!(store.disk.payload_bytes() < before, "{before}");
    assert!(store.reader().payload(other).is_err());
    drop(store);

    let mut store = open(folder.path());
    assert_eq!(store.sessions.len(), 1);
    assert!(store.requests["finished"].finished_at().is_some());
    let run = model(&store);
    assert_eq!((run.row.last_seq, run.last_used), (Some(3), 1_004));
    assert_eq!(run.changes.keys().copied().collect::<Vec<_>>(), [1]);
    assert_eq!(run.changes[&1].kind, RequestKind::ForwardBackward);
    assert_eq!(store.reader().payload(run.changes[&1].body).unwrap(), "changed");
    assert_eq!(store.usage.values().copied().collect::<Vec<_>>(), [15]);
    assert!(!store.requests.contains_key("other"));
    let RequestPhase::Ready { number, .. } = store.requests["finished"].phase else {
        panic!("no result")
    };
    assert_eq!(store.reader().payload(number).unwrap(), "result of finished");
    let unfinished = store.requeue_unfinished();
    assert_eq!(unfinished.len(), 1);
    let number = unfinished[0].row.number;
    assert_eq!(store.reader().payload(number).unwrap(), "waits");
}

#[test]
fn results_beyond_the_limit_are_evicted_and_stay_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let mut store =
        Store::open(folder.path(), 1_000, &Executor::threads(), Arc::new(OperatingSystem)).unwrap();
    store.put_unconfirmed(run());
    for seq in 1..=5 {
        let id = format!("r{seq}");
        add_request(&mut store, request(&id, seq));
        let payload = Bytes::from(vec![u8::try_from(seq).unwrap(); 400]);
        let number = record_result(&mut store, &id, false, &payload);
        store.publish(&id.as_str().into(), ResultKind::Proto, payload, number);
        assert!(store.result_bytes <= 1_000);
    }
    flush(&mut store);
    let RequestPhase::Ready { payload: None, number, size, .. } = store.requests["r1"].phase else {
        panic!("the oldest result was not evicted")
    };
    assert_eq!(size, 400);
    assert_eq!(store.reader().payload(number).unwrap(), vec![1; 400]);
    assert!(matches!(store.requests["r5"].phase, RequestPhase::Ready { payload: Some(_), .. }));
}

#[test]
fn a_snapshot_replaces_earlier_changes() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.put_unconfirmed(session(0));
    store.put_unconfirmed(run());
    for seq in 1..=3 {
        let id = format!("r{seq}");
        add_request(&mut store, request(&id, seq));
        record_result(&mut store, &id, true, &Bytes::new());
    }
    let row = model(&store).row.clone();
    let snapshot = Some(SnapshotRecord { seq: 2, weights: local("f") });
    store.put_unconfirmed(Record::Run(ModelRunRecord { snapshot, ..row }));
    for _ in 0..2 {
        let run = model(&store);
        assert_eq!(run.changes.keys().copied().collect::<Vec<_>>(), [3]);
        assert_eq!(run.row.last_seq, Some(3));
        assert!(store.weights_in_use().contains(&local("f")));
        drop(store);
        store = open(folder.path());
    }
    // Records of an ended session do not restore its model, even if they were written later.
    let Record::Session(row) = session(0) else { panic!("not a session") };
    let row_of_run = model(&store).row.clone();
    add_request(&mut store, request("late", 4));
    store.put_unconfirmed(Record::Session(SessionRecord { end: Some(SessionEnd::Expired), ..row }));
    store.disk.append(vec![Record::Run(row_of_run)], None, ignore_result());
    record_result(&mut store, "late", true, &Bytes::new());
    store.remove_results(vec!["r1".into(), "r2".into(), "r3".into()]);
    for _ in 0..2 {
        let run = model(&store);
        assert!(run.changes.is_empty() && run.row.snapshot.is_none());
        assert!(store.weights_in_use().is_empty());
        drop(store);
        store = open(folder.path());
    }
    compact(&mut store);
    assert_eq!(store.disk.payload_bytes(), 28, "one empty result and no body");
}

#[test]
fn compaction_keeps_a_result_that_is_being_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.put_unconfirmed(run());
    add_request(&mut store, request("r", 1));
    flush(&mut store);
    record_result(&mut store, "r", false, &Bytes::from_static(b"answer"));
    let before = store.disk.payload_bytes();
    compact(&mut store);
    assert!(store.disk.payload_bytes() <= before + 6, "the body is dropped");
    drop(store);

    let store = open(folder.path());
    let RequestPhase::Ready { number, .. } = store.requests["r"].phase else { panic!("no result") };
    assert_eq!(store.reader().payload(number).unwrap(), "answer");
}

#[test]
fn feeds_are_restored_in_order_of_results() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    for (id, seq) in [("a", 0), ("b", 1), ("c", 2)] {
        let scope = SequenceScope::Sampler("s:sample:0".into());
        add_request(
            &mut store,
            RequestRecord { scope, kind: RequestKind::Sample, ..request(id, seq) },
        );
    }
    for id in ["c", "a", "b"] {
        let payload = Bytes::from_static(b"{}");
        let number = record_result(&mut store, id, false, &payload);
        store.publish(&id.into(), ResultKind::Json, payload, number);
    }
    let feed = |store: &Store| -> Vec<(u64, String)> {
        let feed = &store.feeds[&("s:sample:0".into(), 0)];
        feed.completions.iter().map(|(n, c)| (*n, c.request_id().to_string())).collect()
    };
    let before = feed(&store);
    assert_eq!(before.iter().map(|(_, id)| id.as_str()).collect::<Vec<_>>(), ["c", "a", "b"]);
    drop(store);
    assert_eq!(feed(&open(folder.path())), before);
}

#[test]
fn an_old_session_is_removable_once_nothing_refers_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let Record::Session(row) = session(0) else { panic!("not a session") };
    for (id, ended_at) in [("open", None), ("recent", Some(20)), ("old", Some(10)), ("s", Some(10))]
    {
        let end = ended_at.map(|_| SessionEnd::Expired);
        store.put_unconfirmed(Record::Session(SessionRecord {
            id: id.into(),
            end,
            ended_at,
            ..row.clone()
        }));
    }
    // A run refers to "s".
    store.put_unconfirmed(run());
    assert_eq!(store.removable_sessions(15), ["old"]);
    store.put_unconfirmed(Record::SessionsRemoved { ids: store.removable_sessions(15) });
    for _ in 0..2 {
        let mut ids: Vec<_> = store.sessions.keys().map(|id| id.as_str().to_owned()).collect();
        ids.sort();
        assert_eq!(ids, ["open", "recent", "s"]);
        drop(store);
        store = open(folder.path());
    }
}

fn checkpoint(folder: &str) -> CheckpointRecord {
    let Record::Run(run) = run() else { panic!("not a run") };
    CheckpointRecord {
        path: "tinker://s:train:0/weights/a".parse().unwrap(),
        weights: local(folder),
        request: None,
        seq: None,
        created_at: 1,
        expires_at: None,
        size_bytes: 1,
        public: false,
        metadata_bytes: 0,
        base_model: run.base_model,
        lora: run.lora,
        optimizer: run.optimizer,
    }
}

#[test]
fn undoing_a_change_keeps_a_checkpoint_saved_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let path = checkpoint("old").path;
    let current =
        |store: &Store| store.checkpoints.get(&path).map(|entry| entry.row.weights.clone());
    let changes = [
        Record::Checkpoint(CheckpointRecord { public: true, ..checkpoint("old") }),
        Record::CheckpointDeleted { path: path.clone(), at: 1 },
    ];
    for change in changes {
        store.apply(Record::Checkpoint(checkpoint("old")));
        let undo = store.prepare_undo(std::slice::from_ref(&change));
        store.apply(change.clone());
        undo(&mut store);
        assert_eq!(current(&store), Some(local("old")));
        assert!(!store.checkpoints[&path].row.public);

        let undo = store.prepare_undo(std::slice::from_ref(&change));
        store.apply(change);
        store.apply(Record::Checkpoint(checkpoint("new")));
        undo(&mut store);
        assert_eq!(current(&store), Some(local("new")));
    }
}

#[test]
fn folders_are_kept_until_pending_loads_have_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.apply_all(vec![session(0), run()]);
    let load = RequestRecord {
        kind: RequestKind::LoadWeights,
        source: Some(local("source")),
        ..request("load", 1)
    };
    add_request(&mut store, load);
    assert!(store.weights_in_use().contains(&local("source")));
    let payload = Bytes::from_static(b"{}");
    let number = record_result(&mut store, "load", true, &payload);
    assert!(store.weights_in_use().contains(&local("source")), "the result is not durable yet");
    store.publish(&"load".into(), ResultKind::Json, payload, number);
    assert!(!store.weights_in_use().contains(&local("source")));
}

#[test]
fn starts_of_unfinished_requests_are_counted_over_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.put_unconfirmed(session(0));
    add_request(&mut store, request("a", 1));
    add_request(&mut store, request("b", 2));
    store.put_unconfirmed(Record::RequestsStarted { ids: vec!["b".into()] });
    drop(store);
    let mut store = open(folder.path());
    store.put_unconfirmed(Record::RequestsStarted { ids: vec!["b".into()] });
    drop(store);
    let unfinished = open(folder.path()).requeue_unfinished();
    let starts: Vec<_> = unfinished.iter().map(|r| (r.row.id.as_str(), r.starts)).collect();
    assert_eq!(starts, [("a", 0), ("b", 2)]);
}

#[test]
fn a_deletion_is_remembered_over_restarts_for_a_day() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| TinkerPath::new("s:train:0", CheckpointKind::Training, name).unwrap();
    let mut store = open(folder.path());
    store.put_unconfirmed(Record::CheckpointDeleted { path: path("old"), at: 1 });
    store.put_unconfirmed(Record::CheckpointDeleted { path: path("a"), at: DELETION_RETENTION });
    drop(store);
    let mut store = open(folder.path());
    assert_eq!(store.deleted_checkpoints.len(), 2);
    let at = DELETION_RETENTION + 2;
    store.put_unconfirmed(Record::CheckpointDeleted { path: path("b"), at });
    let deleted = |store: &Store| {
        let mut names: Vec<_> = store.deleted_checkpoints.keys().cloned().collect();
        names.sort();
        names
    };
    assert_eq!(deleted(&store), [path("a"), path("b")]);
    drop(store);
    assert_eq!(deleted(&open(folder.path())), [path("a"), path("b")]);
}

/// If the write of a removal fails and is not retried, the rows of the removed requests and their
/// payloads stay until the next start.
#[test]
fn payloads_of_a_removal_that_failed_are_removed_later() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.put_unconfirmed(run());
    add_request(&mut store, request("r", 1));
    let payload = Bytes::from(vec![7; 10_000]);
    let number = record_result(&mut store, "r", false, &payload);
    store.publish(&"r".into(), ResultKind::Json, payload, number);
    flush(&mut store);
    store.disk.close().unwrap().block();
    let (disk, failing) = open_with_failing_commits(folder.path());
    store.disk = disk;
    failing.store(true, Ordering::Relaxed);
    store.remove_results(vec!["r".into()]);
    assert!(!wait_for_writer(&mut store.disk));
    failing.store(false, Ordering::Relaxed);
    flush_when_possible(&mut store);
    compact(&mut store);
    assert_eq!(store.disk.payload_bytes(), 8, "only the header of the file remains");
}

/// Repeats a write until it is accepted.
fn flush_when_possible(store: &mut Store) {
    loop {
        let (sender, receiver) = mpsc::channel();
        store.put(vec![session(0)], Box::new(move |written| drop(sender.send(written))));
        if receiver.recv().unwrap().is_ok() {
            return;
        }
    }
}

#[test]
fn weights_for_a_sampling_session_have_the_rank_of_their_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let Record::Run(template) = run() else { unreachable!() };
    for (number, rank) in [(0, 4), (1, 16), (2, 8)] {
        let id = format!("s:train:{number}").into();
        let lora = LoraSettings { rank, ..template.lora };
        store.put_unconfirmed(Record::Run(ModelRunRecord { id, number, lora, ..template.clone() }));
    }
    store.put_unconfirmed(Record::Sampler(SamplerRecord {
        id: "s:sample:0".into(),
        session: "s".into(),
        base_model: "m".to_owned(),
        model_path: None,
        weights: Some(on_upstream("tinker://x/weights/a")),
        run: Some("s:train:1".into()),
        clients: 1,
        end: None,
        weights_released: false,
    }));
    flush(&mut store);
    drop(store);
    let store = open(folder.path());
    let (run, lora) = store.origin_of_weights(&on_upstream("tinker://x/weights/a")).unwrap();
    assert_eq!((run.as_str(), lora.rank), ("s:train:1", 16));
    assert_eq!(store.origin_of_weights(&on_upstream("tinker://x/weights/b")), None);
}

#[test]
fn needed_backends_name_the_first_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.put_unconfirmed(session(0));
    let Record::Run(template) = run() else { unreachable!() };
    for (id, upstream) in
        [("s:train:0", None), ("s:train:2", Some("up")), ("s:train:1", Some("up"))]
    {
        let upstream = upstream.map(|name| UpstreamRun { name: name.to_owned(), model: None });
        let row = ModelRunRecord { id: id.into(), upstream, ..template.clone() };
        store.put_unconfirmed(Record::Run(row));
    }
    add_request(&mut store, request("r", 1));
    let needed = store.needed_backends();
    let on_upstream = &needed[&NeededBackend::Upstream("up".to_owned())];
    assert_eq!(on_upstream.run, Some("s:train:1".into()));
    assert_eq!((on_upstream.runs, on_upstream.requests), (2, 0));
    let on_engine = &needed[&NeededBackend::EngineModel("m".to_owned())];
    assert_eq!((on_engine.runs, on_engine.requests), (0, 1));
    assert_eq!(needed.len(), 2);
}

/// Puts records and waits until they are durable.
fn put_durably(store: &mut Store, records: Vec<Record>) {
    let (sender, receiver) = mpsc::channel();
    store.put(records, Box::new(move |written| drop(sender.send(written))));
    receiver.recv().unwrap().unwrap();
}

/// Returns a session with this id and metadata of about `bytes` bytes.
fn session_with_metadata(id: &str, owner: &UserId, bytes: usize) -> Vec<Record> {
    let metadata = serde_json::json!({"text": "x".repeat(bytes)});
    let metadata = MetadataRecord::new(id, metadata.as_object());
    let Record::Session(row) = session(0) else { unreachable!() };
    let row = SessionRecord {
        id: id.into(),
        owner: owner.clone(),
        metadata_bytes: metadata.bytes(),
        ..row
    };
    vec![Record::Session(row), Record::Metadata(metadata)]
}

#[test]
fn metadata_is_removed_with_its_object() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let owner = UserId::default();
    put_durably(&mut store, session_with_metadata("s", &owner, 10));
    let metadata = serde_json::json!({"name": "n"});
    let of = |object: &str| Record::Metadata(MetadataRecord::new(object, metadata.as_object()));
    let path = |name: &str| TinkerPath::new("s:train:0", CheckpointKind::Training, name).unwrap();
    let first = path("a").to_string();
    let second = path("b").to_string();
    put_durably(&mut store, vec![run(), of("s:train:0"), of("s:train:01"), of(&first)]);
    let copied = Record::MetadataCopied { from: path("a"), to: path("b") };
    put_durably(&mut store, vec![copied]);
    let exists = |object: &str| store.disk.metadata().get(object, 1).unwrap().is_some();
    for object in ["s", "s:train:0", "s:train:01", &first, &second] {
        assert!(exists(object), "{object}");
    }
    put_durably(&mut store, vec![Record::CheckpointDeleted { path: path("a"), at: 1 }]);
    let exists = |object: &str| store.disk.metadata().get(object, 1).unwrap().is_some();
    assert!(!exists(&first) && exists(&second));
    put_durably(&mut store, vec![Record::RunDeleted { id: "s:train:0".into() }]);
    put_durably(&mut store, vec![Record::SessionsRemoved { ids: vec!["s".into()] }]);
    let exists = |object: &str| store.disk.metadata().get(object, 1).unwrap().is_some();
    for object in ["s", "s:train:0", &first, &second] {
        assert!(!exists(object), "{object}");
    }
    assert!(exists("s:train:01"), "another run, whose id has the same start");
}

#[test]
fn a_user_without_budget_is_refused_and_other_users_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.limit_records(100_000);
    let ann = UserId::parse("ann").unwrap();
    let bob = UserId::parse("bob").unwrap();
    let create = |store: &mut Store, id: &str, owner: &UserId| {
        let records = session_with_metadata(id, owner, 30_000);
        store.reserve_records(owner, cost_of_records(&records))?;
        put_durably(store, records);
        Ok::<_, ServerError>(())
    };
    for id in ["a", "b", "c"] {
        create(&mut store, id, &ann).unwrap();
    }
    let error = create(&mut store, "d", &ann).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, ServerError::Busy { .. }), "{message}");
    assert!(message.contains("user ann") && message.contains("limit is 100000"), "{message}");
    create(&mut store, "e", &bob).unwrap();
    // The same after a restart.
    drop(store);
    let mut store = open(folder.path());
    store.limit_records(100_000);
    assert!(create(&mut store, "d", &ann).is_err());
    assert_eq!(store.records.used()[&ann].sessions, 3);
    assert_eq!(store.records.used()[&bob].sessions, 1);
}

/// A client cannot delete ended sessions, so they must not use up its budget for ever.
#[tokio::test(start_paused = true)]
async fn ended_sessions_and_received_results_make_room() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let owner = UserId::default();
    put_durably(&mut store, vec![session(0), run()]);
    for n in 0..3 {
        let mut records = session_with_metadata(&format!("ended-{n}"), &owner, 10_000);
        if let Record::Session(row) = &mut records[0] {
            row.end = Some(SessionEnd::Expired);
            row.ended_at = Some(n);
        }
        put_durably(&mut store, records);
    }
    for (id, seq) in [("received", 1), ("not-received", 2)] {
        add_request(&mut store, request(id, seq));
        let payload = Bytes::from_static(b"x");
        let number = record_result(&mut store, id, false, &payload);
        store.publish(&id.into(), ResultKind::Json, payload, number);
    }
    let received = store.requests.get_mut("received").unwrap();
    received.delivered = Some(Duration::ZERO);
    store.limit_records(38_000);
    for _ in 0..90 {
        tokio::time::advance(crate::clock::TICK).await;
        store.clock.tick();
    }
    store.reserve_records(&owner, 10_000).unwrap();
    assert!(!store.requests.contains_key("received"));
    assert!(store.requests.contains_key("not-received"));
    let left: Vec<String> = store.sessions.keys().map(ToString::to_string).collect();
    assert!(left.contains(&"s".to_owned()) && !left.contains(&"ended-0".to_owned()), "{left:?}");
    assert!(left.contains(&"ended-2".to_owned()), "the oldest are removed first: {left:?}");
}

/// Otherwise two users without budget would make the server count for each of their requests.
#[test]
fn records_are_not_counted_for_every_request_of_several_users_without_budget() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let users = ["ann", "bob"].map(|name| UserId::parse(name).unwrap());
    for user in &users {
        put_durably(&mut store, session_with_metadata(user.as_str(), user, 30_000));
    }
    store.limit_records(35_000);
    for user in &users {
        assert!(store.reserve_records(user, 10_000).is_err());
    }
    for user in &users {
        put_durably(&mut store, vec![Record::SessionsRemoved { ids: vec![user.as_str().into()] }]);
        assert!(store.reserve_records(user, 10_000).is_err(), "counted again within a second");
    }
    store.count_records();
    for user in &users {
        store.reserve_records(user, 10_000).unwrap();
    }
}

#[test]
fn texts_count_with_their_length() {
    let Record::Session(row) = session(0) else { unreachable!() };
    let cost = |row: &SessionRecord| cost_of_records(&[Record::Session(row.clone())]);
    let text = || Some("x".repeat(1_000));
    let end = SessionEnd::Finished(FinishDetails::new(FinishReason::Success, text()));
    let long =
        SessionRecord { project_id: text(), display_name: text(), end: Some(end), ..row.clone() };
    assert_eq!(cost(&long) - cost(&row), 3_000);
    let Record::Run(row) = run() else { unreachable!() };
    let cost = |row: &ModelRunRecord| cost_of_records(&[Record::Run(row.clone())]);
    let mut long = row.clone();
    long.optimizer.settings.insert("text".to_owned(), text().into());
    assert!(cost(&long) - cost(&row) >= 1_000);
}

#[test]
fn records_without_an_owner_count_for_no_user() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let path = TinkerPath::new("s:train:0", CheckpointKind::Training, "a").unwrap();
    put_durably(&mut store, vec![Record::CheckpointDeleted { path, at: 1 }]);
    assert_eq!(store.deleted_checkpoints.len(), 1);
    store.count_records();
    assert!(store.records.used().is_empty(), "{:?}", store.records.used());
}

#[test]
fn custom_losses_count_with_their_size() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    put_durably(&mut store, vec![session(0)]);
    store.count_records();
    let before = store.records.used()[&UserId::default()].bytes;
    let scope = SequenceScope::CustomLosses("s".into());
    let kind = RequestKind::CreateCustomLoss;
    let number = store.disk.next_payload_number();
    let row = RequestRecord { number, kind, scope, ..request("loss", 0) };
    let body = Bytes::from(vec![7; 10_000]);
    store.add_request(row, vec![], body, ignore_result());
    flush(&mut store);
    store.count_records();
    let used = store.records.used()[&UserId::default()].bytes - before;
    assert!(used >= 160_000 && used >= cost_of_request(kind, 10_000), "{used} bytes");
}

#[test]
fn old_usage_is_merged_by_day() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let key = |hour, session: &str| {
        let account = Account { owner: UserId::default(), session: session.into() };
        UsageKey::new(hour, &account, "m", UsageMeter::Training)
    };
    let amounts = vec![(key(24, "a"), 1), (key(25, "a"), 2), (key(47, "b"), 4), (key(48, "b"), 8)];
    put_durably(&mut store, vec![Record::Usage(amounts)]);
    assert!(store.has_unmerged_usage(48));
    put_durably(&mut store, vec![Record::UsageMerged { before: 48 }]);
    // Usage that is counted late is added.
    put_durably(&mut store, vec![Record::Usage(vec![(key(30, "c"), 16)])]);
    put_durably(&mut store, vec![Record::UsageMerged { before: 48 }]);
    assert!(!store.has_unmerged_usage(48));
    let expected = [(key(24, MERGED_SESSION), 23), (key(48, "b"), 8)];
    assert_eq!(store.usage, expected.into_iter().collect());
    let usage = store.usage.clone();
    drop(store);
    assert_eq!(open(folder.path()).usage, usage);
}
