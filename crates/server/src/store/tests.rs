use std::path::Path;
use std::sync::mpsc;

use bytes::Bytes;
use tinkex_wire::OptimizerConfig;

use super::*;

fn session(n: usize) -> Record {
    Record::Session(SessionRecord {
        id: "s".into(),
        created_at: 1,
        tags: vec![format!("{n}")],
        user_metadata: None,
        project_id: None,
        display_name: None,
        end: None,
        ended_at: None,
    })
}

fn run() -> Record {
    let lora = LoraSettings { rank: 4, seed: 1, train_unembed: true, train_mlp: true, train_attn: true };
    Record::Run(RunRecord {
        id: "s:train:0".into(),
        session: "s".into(),
        number: 0,
        base_model: "m".to_owned(),
        lora,
        optimizer: OptimizerConfig::adamw(),
        user_metadata: None,
        created_at: 1,
        closed: None,
        snapshot: None,
        last_seq: None,
        project_id: None,
    })
}

fn request(id: &str, seq: u64) -> RequestRecord {
    RequestRecord {
        number: 0,
        id: id.into(),
        kind: RequestKind::ForwardBackward,
        session: "s".into(),
        line: SequenceScope::Model("s:train:0".into()),
        seq,
        digest: "d".to_owned(),
        seed: 0,
        samples: 0,
        at: 1,
    }
}

/// Takes requests in whose bodies are their ids.
fn open_request(store: &mut Store, row: RequestRecord) {
    let (number, body) = (store.disk.number(), Bytes::from(row.id.to_string()));
    store.open_request(RequestRecord { number, ..row }, vec![], body, nothing());
}

/// Carries a request out; returns the number of its answer.
fn record_outcome(store: &mut Store, id: &str, changed: bool, answer: &Bytes) -> u64 {
    let what = UsageMeter::Training;
    let used = UsageKey { hour: 1, session: "s".into(), base_model: "m".to_owned(), what };
    let (request, number) = (Arc::clone(&store.requests[id].row), store.disk.number());
    let (size, used) = (answer.len(), vec![(used, 5)]);
    let done = ResultRecord { request, number, size, answer: ResultKind::Json, changed, at: 1, used };
    store.record_outcome(done, vec![], answer.clone(), nothing());
    number
}

/// Waits until everything so far is on disk.
fn flush(store: &mut Store) {
    let (sent, received) = mpsc::channel();
    store.put(vec![session(0)], Box::new(move |written| drop(sent.send(written))));
    received.recv().unwrap().unwrap();
}

/// Waits until what is not needed has been dropped.
fn tidy(store: &mut Store) {
    let (sent, received) = mpsc::channel();
    store.disk.tidy(0, Box::new(move |tidied| drop(sent.send(tidied))));
    received.recv().unwrap().unwrap();
}

fn open(folder: &Path) -> Store {
    Store::open(folder, 1 << 20).unwrap()
}

fn model(store: &Store) -> &Tracked<RunRecord> {
    &store.runs[&ModelId::from("s:train:0")]
}

#[test]
fn a_tidied_disk_tells_the_same_story() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.note(session(0));
    store.note(run());
    // ActiveSample that changed the model and was fetched, one that did not, one that waits, one to fetch.
    for (id, seq) in [("changed", 1), ("other", 2), ("answered", 3), ("waits", 4)] {
        open_request(
            &mut store,
            RequestRecord { at: 1_000 + i64::try_from(seq).unwrap(), ..request(id, seq) },
        );
    }
    let other = store.requests["other"].row.number;
    for (id, changed) in [("changed", true), ("other", false), ("answered", false)] {
        let answer = Bytes::from(format!("answer of {id}"));
        let number = record_outcome(&mut store, id, changed, &answer);
        store.show(&id.into(), ResultKind::Json, answer, number);
    }
    store.forget(vec!["changed".into(), "other".into()]);
    flush(&mut store);
    let before = store.disk.payload_bytes();
    tidy(&mut store);
    assert!(store.disk.payload_bytes() < before, "{before}");
    assert!(store.reader().payload(other).is_err());
    drop(store);

    let restart = now();
    let mut store = open(folder.path());
    assert_eq!(store.sessions.len(), 1);
    // Nobody could fetch it while there was no server.
    assert!(store.requests["answered"].answered_at() >= Some(restart));
    let run = model(&store);
    assert_eq!((run.row.last_seq, run.last_used), (Some(3), 1_004));
    assert_eq!(run.changes.keys().copied().collect::<Vec<_>>(), [1]);
    assert_eq!(run.changes[&1].kind, RequestKind::ForwardBackward);
    assert_eq!(store.reader().payload(run.changes[&1].body).unwrap(), "changed");
    assert_eq!(store.usage.values().copied().collect::<Vec<_>>(), [15]);
    assert!(!store.requests.contains_key("other"));
    let RequestPhase::Ready { number, .. } = store.requests["answered"].phase else { panic!("lost") };
    assert_eq!(store.reader().payload(number).unwrap(), "answer of answered");
    let undone = store.undone();
    assert_eq!(undone.len(), 1);
    assert_eq!(undone[0].body.as_ref().unwrap(), "waits");
}

#[test]
fn answers_beyond_the_limit_leave_memory_and_stay_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), 1_000).unwrap();
    store.note(run());
    for seq in 1..=5 {
        let id = format!("r{seq}");
        open_request(&mut store, request(&id, seq));
        let answer = Bytes::from(vec![u8::try_from(seq).unwrap(); 400]);
        let number = record_outcome(&mut store, &id, false, &answer);
        store.show(&id.as_str().into(), ResultKind::Proto, answer, number);
        assert!(store.answer_bytes <= 1_000);
    }
    flush(&mut store);
    let RequestPhase::Ready { payload: None, number, size, .. } = store.requests["r1"].phase else {
        panic!("the oldest should have left")
    };
    assert_eq!(size, 400);
    assert_eq!(store.reader().payload(number).unwrap(), vec![1; 400]);
    assert!(matches!(store.requests["r5"].phase, RequestPhase::Ready { payload: Some(_), .. }));
}

#[test]
fn a_snapshot_makes_earlier_changes_unnecessary() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.note(session(0));
    store.note(run());
    for seq in 1..=3 {
        let id = format!("r{seq}");
        open_request(&mut store, request(&id, seq));
        record_outcome(&mut store, &id, true, &Bytes::new());
    }
    let row = model(&store).row.clone();
    let snapshot = Some(SnapshotRecord { seq: 2, folder: "f".to_owned() });
    store.note(Record::Run(RunRecord { snapshot, ..row }));
    for _ in 0..2 {
        let run = model(&store);
        assert_eq!(run.changes.keys().copied().collect::<Vec<_>>(), [3]);
        assert_eq!(run.row.last_seq, Some(3));
        assert!(store.folders().contains("f"));
        drop(store);
        store = open(folder.path());
    }
    // Nothing brings a model back whose session is over, whatever was written after its end.
    let Record::Session(row) = session(0) else { panic!("it is one") };
    let row_of_run = model(&store).row.clone();
    open_request(&mut store, request("late", 4));
    store.note(Record::Session(SessionRecord { end: Some(SessionEnd::Expired), ..row }));
    store.disk.append(vec![Record::Run(row_of_run)], None, nothing());
    record_outcome(&mut store, "late", true, &Bytes::new());
    store.forget(vec!["r1".into(), "r2".into(), "r3".into()]);
    for _ in 0..2 {
        let run = model(&store);
        assert!(run.changes.is_empty() && run.row.snapshot.is_none());
        assert!(store.folders().is_empty());
        drop(store);
        store = open(folder.path());
    }
    tidy(&mut store);
    assert_eq!(store.disk.payload_bytes(), 28, "an empty answer and no body");
}

#[test]
fn an_answer_on_its_way_to_the_disk_is_not_tidied_away() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.note(run());
    open_request(&mut store, request("r", 1));
    flush(&mut store);
    record_outcome(&mut store, "r", false, &Bytes::from_static(b"answer"));
    let before = store.disk.payload_bytes();
    tidy(&mut store);
    assert!(store.disk.payload_bytes() <= before + 6, "the body went");
    drop(store);

    let store = open(folder.path());
    let RequestPhase::Ready { number, .. } = store.requests["r"].phase else { panic!("lost") };
    assert_eq!(store.reader().payload(number).unwrap(), "answer");
}

#[test]
fn feeds_come_back_in_the_order_of_the_answers() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    for (id, seq) in [("a", 0), ("b", 1), ("c", 2)] {
        let line = SequenceScope::Sampler("s:sample:0".into());
        open_request(&mut store, RequestRecord { line, kind: RequestKind::Sample, ..request(id, seq) });
    }
    for id in ["c", "a", "b"] {
        let answer = Bytes::from_static(b"{}");
        let number = record_outcome(&mut store, id, false, &answer);
        store.show(&id.into(), ResultKind::Json, answer, number);
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
fn a_session_that_was_over_long_ago_leaves_once_nothing_refers_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let Record::Session(row) = session(0) else { panic!("it is one") };
    for (id, ended_at) in [("open", None), ("recent", Some(20)), ("old", Some(10)), ("s", Some(10))]
    {
        let end = ended_at.map(|_| SessionEnd::Expired);
        store.note(Record::Session(SessionRecord { id: id.into(), end, ended_at, ..row.clone() }));
    }
    // There is a run of "s".
    store.note(run());
    assert_eq!(store.left(15), ["old"]);
    store.note(Record::SessionsRemoved { ids: store.left(15) });
    for _ in 0..2 {
        let mut ids: Vec<_> = store.sessions.keys().map(|id| id.as_str().to_owned()).collect();
        ids.sort();
        assert_eq!(ids, ["open", "recent", "s"]);
        drop(store);
        store = open(folder.path());
    }
}

fn checkpoint(folder: &str) -> CheckpointRecord {
    let Record::Run(run) = run() else { panic!("a run") };
    CheckpointRecord {
        path: "tinker://s:train:0/weights/a".parse().unwrap(),
        folder: folder.to_owned(),
        request: None,
        seq: None,
        created_at: 1,
        expires_at: None,
        size_bytes: 1,
        public: false,
        user_metadata: None,
        base_model: run.base_model,
        lora: run.lora,
        optimizer: run.optimizer,
    }
}

#[test]
fn a_change_that_was_refused_takes_nothing_along_that_was_saved_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    let path = checkpoint("old").path;
    let there = |store: &Store| store.checkpoints.get(&path).map(|entry| entry.row.folder.clone());
    let changes = [
        Record::Checkpoint(CheckpointRecord { public: true, ..checkpoint("old") }),
        Record::CheckpointDeleted { path: path.clone() },
    ];
    for change in changes {
        store.apply(Record::Checkpoint(checkpoint("old")));
        let undo = store.before(std::slice::from_ref(&change));
        store.apply(change.clone());
        undo(&mut store);
        assert_eq!(there(&store).as_deref(), Some("old"));
        assert!(!store.checkpoints[&path].row.public);

        let undo = store.before(std::slice::from_ref(&change));
        store.apply(change);
        store.apply(Record::Checkpoint(checkpoint("new")));
        undo(&mut store);
        assert_eq!(there(&store).as_deref(), Some("new"));
    }
}

#[test]
fn nobody_was_silent_while_the_machine_slept() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.apply_all(vec![session(0), run()]);
    open_request(&mut store, request("r", 1));
    let answer = Bytes::from_static(b"answer");
    let number = record_outcome(&mut store, "r", false, &answer);
    store.show(&"r".into(), ResultKind::Json, answer, number);
    let times =
        |store: &Store| (store.sessions["s"].last_used, store.requests["r"].answered_at().unwrap());
    let before = times(&store);
    store.slept(5);
    assert_eq!(times(&store), (before.0 + 5, before.1 + 5));
}

#[test]
fn folders_stay_until_what_was_promised_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path());
    store.apply_all(vec![session(0), run()]);
    open_request(&mut store, request("pass", 2));
    assert!(!store.has_loads());
    open_request(&mut store, RequestRecord { kind: RequestKind::LoadWeights, ..request("load", 1) });
    assert!(store.has_loads());
    let answer = Bytes::from_static(b"{}");
    let number = record_outcome(&mut store, "load", true, &answer);
    assert!(store.has_loads(), "until the disk has it");
    store.show(&"load".into(), ResultKind::Json, answer, number);
    assert!(!store.has_loads());
}
