use std::path::Path;
use std::sync::mpsc;

use tinkex_wire::OptimizerConfig;

use super::*;

fn session(n: usize) -> Record {
    Record::Session(Session {
        id: "s".into(),
        created_at: 1,
        tags: vec![format!("{n}")],
        user_metadata: None,
        project_id: None,
        display_name: None,
        end: None,
    })
}

fn run() -> Record {
    let lora = Lora { rank: 4, seed: 1, train_unembed: true, train_mlp: true, train_attn: true };
    Record::Run(Run {
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

fn request(id: &str, seq: u64) -> Request {
    Request {
        id: id.into(),
        kind: Kind::ForwardBackward,
        session: "s".into(),
        line: Line::Model("s:train:0".into()),
        seq,
        digest: "d".to_owned(),
        seed: 0,
        samples: 0,
        at: 1,
    }
}

fn done(id: &str, changed: bool) -> Done {
    let what = What::Training;
    let used = Use { hour: 1, session: "s".into(), base_model: "m".to_owned(), what };
    Done { id: id.into(), answer: Answer::Json, changed, at: 1, used: vec![(used, 5)] }
}

/// Waits until everything so far is on disk.
fn flush(store: &mut Store) {
    let (sent, received) = mpsc::channel();
    store.put(vec![session(0)], Box::new(move |written| drop(sent.send(written))));
    received.recv().unwrap().unwrap();
}

fn open(path: &Path) -> Store {
    Store::open(path, 1 << 20).unwrap()
}

#[test]
fn a_tidied_journal_tells_the_same_story() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut store = open(&path);
    store.note(session(0));
    store.note(run());
    // One that changed the model and was fetched, one that did not, one that waits, one to fetch.
    for (id, seq) in [("changed", 1), ("other", 2), ("answered", 3), ("waits", 4)] {
        store.open_request(request(id, seq), vec![], Bytes::from(id.to_owned()), nothing());
    }
    for (id, changed) in [("changed", true), ("other", false), ("answered", false)] {
        let answer = Bytes::from(format!("answer of {id}"));
        let mut number = 0;
        store.settle(done(id, changed), vec![], answer.clone(), |n| {
            number = n;
            nothing()
        });
        store.show(&id.into(), Answer::Json, answer, number);
    }
    store.forget(vec!["changed".into(), "other".into()]);
    for n in 0..100 {
        store.note(session(n));
    }
    flush(&mut store);
    let before = store.journal.len();
    store.compact(0);
    flush(&mut store);
    assert!(store.journal.len() < before / 2, "{} of {before}", store.journal.len());
    drop(store);

    let mut store = open(&path);
    assert_eq!(store.sessions.len(), 1);
    let run = &store.runs[&ModelId::from("s:train:0")];
    assert_eq!(run.row.last_seq, Some(3));
    assert_eq!(run.since.keys().copied().collect::<Vec<_>>(), [1]);
    let body = store.reader().body(run.since[&1].request).unwrap();
    assert_eq!(body, "changed");
    assert_eq!(store.usage.values().copied().collect::<Vec<_>>(), [15]);
    assert!(!store.requests.contains_key("other"));
    let Phase::Ready { number, .. } = store.requests["answered"].phase else { panic!("lost") };
    assert_eq!(store.reader().body(number).unwrap(), "answer of answered");
    let undone = store.undone().unwrap();
    assert_eq!(undone.len(), 1);
    assert_eq!(undone[0].body, "waits");
}

#[test]
fn answers_beyond_the_limit_leave_memory_and_stay_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(&folder.path().join("journal"), 1_000).unwrap();
    store.note(run());
    for seq in 1..=5 {
        let id = format!("r{seq}");
        store.open_request(request(&id, seq), vec![], Bytes::new(), nothing());
        let answer = Bytes::from(vec![u8::try_from(seq).unwrap(); 400]);
        let mut number = 0;
        store.settle(done(&id, false), vec![], answer.clone(), |n| {
            number = n;
            nothing()
        });
        store.show(&id.as_str().into(), Answer::Proto, answer, number);
        assert!(store.answer_bytes <= 1_000);
    }
    flush(&mut store);
    let Phase::Ready { payload: None, number, size, .. } = store.requests["r1"].phase else {
        panic!("the oldest should have left")
    };
    assert_eq!(size, 400);
    assert_eq!(store.reader().body(number).unwrap(), vec![1; 400]);
    assert!(matches!(store.requests["r5"].phase, Phase::Ready { payload: Some(_), .. }));
}

#[test]
fn a_snapshot_makes_earlier_changes_unnecessary() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(&folder.path().join("journal"));
    store.note(run());
    for seq in 1..=3 {
        let id = format!("r{seq}");
        store.open_request(request(&id, seq), vec![], Bytes::new(), nothing());
        store.settle(done(&id, true), vec![], Bytes::new(), |_| nothing());
    }
    let row = store.runs[&ModelId::from("s:train:0")].row.clone();
    let snapshot = Some(Snapshot { seq: 2, folder: "f".to_owned() });
    store.note(Record::Run(Run { snapshot, ..row }));
    let run = &store.runs[&ModelId::from("s:train:0")];
    assert_eq!(run.since.keys().copied().collect::<Vec<_>>(), [3]);
    assert!(store.folders().contains("f"));
}

#[test]
fn an_answer_on_its_way_to_the_disk_is_not_tidied_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut store = open(&path);
    store.note(run());
    store.open_request(request("r", 1), vec![], Bytes::new(), nothing());
    for n in 0..100 {
        store.note(session(n));
    }
    flush(&mut store);
    let before = store.journal.len();
    store.settle(done("r", false), vec![], Bytes::from_static(b"answer"), |_| nothing());
    store.compact(0);
    flush(&mut store);
    assert!(store.journal.len() < before, "{} of {before}", store.journal.len());
    drop(store);

    let store = open(&path);
    let Phase::Ready { number, .. } = store.requests["r"].phase else { panic!("lost") };
    assert_eq!(store.reader().body(number).unwrap(), "answer");
}
