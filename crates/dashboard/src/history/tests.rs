//! Tests of the tables: rows are read back, and the limits are kept.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use tinkex_store::disk::{DATABASE, Disk};
use tinkex_store::executor::Executor;
use tinkex_store::history::{
    CompletionHistory, HistoryRecord, LoggedWeights, OperationHistory, RequestHistory,
    SampleHistory, SampleSource, sequence_hash,
};
use tinkex_store::user::UserId;

use super::*;

fn history(options: HistoryOptions, folder: &Path) -> History {
    History::new(Arc::new(HistoryRecorder::new(options)), folder.join(DATABASE))
}

fn write(disk: &mut Disk, records: Vec<HistoryRecord>) {
    let (sender, receiver) = mpsc::channel();
    let on_written = Box::new(move |written| sender.send(written).unwrap());
    disk.append(records.into_iter().map(HistoryRecord::into_record).collect(), None, on_written);
    receiver.recv().unwrap().unwrap();
}

fn open(folder: &Path) -> Disk {
    Disk::open(folder, &Executor::threads()).unwrap().0
}

fn request(run: &str, seq: u64, kind: &'static str, metrics: &[(&str, f64)]) -> HistoryRecord {
    let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    let computed = Duration::from_millis(20);
    let operation = OperationHistory { kind, computed, tokens: 8, metrics, advantages: Vec::new() };
    let finished_at = i64::try_from(seq).unwrap() * 1_000_000;
    HistoryRecord::Request(RequestHistory {
        run: run.into(),
        seq,
        finished_at,
        queued: 5,
        operation,
        error: None,
    })
}

fn sample(finished_at: i64, prompt: &[u32], tokens: &[u32]) -> HistoryRecord {
    let logprobs = vec![-0.5; tokens.len()];
    let pairs = tokens.iter().flat_map(|token| [(*token, -0.5), (0, -9.0)]).collect();
    let completion = CompletionHistory {
        tokens: tokens.to_vec(),
        logprobs,
        top: Some((2, pairs)),
        stop: "stop",
        sequence_hash: sequence_hash(prompt.iter().chain(tokens).copied()),
    };
    HistoryRecord::Sample(Box::new(SampleHistory {
        finished_at,
        queued: 1,
        computed: 2,
        weights: LoggedWeights {
            base_model: "tiny".to_owned(),
            folder: Some("a_train_0-x".to_owned()),
        },
        owner: UserId::default(),
        session: "s".into(),
        source: SampleSource::Tinker,
        prompt_tokens: prompt.len(),
        prompt: Some(prompt.to_vec()),
        completions: vec![completion],
        error: None,
    }))
}

fn filter() -> SampleFilter {
    SampleFilter { limit: 1_000, ..SampleFilter::default() }
}

#[tokio::test]
async fn rows_are_read_back_while_they_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = open(folder.path());
    let history = history(HistoryOptions::default(), folder.path());
    let run = "a:train:0".into();
    for step in 1..=3_u64 {
        let pass = request("a:train:0", 2 * step, "forward_backward", &[("loss:sum", 16.0)]);
        let other = request("b:train:0", 2 * step, "forward_backward", &[("loss:sum", 1.0)]);
        let optim = request("a:train:0", 2 * step + 1, "optim_step", &[("learning_rate", 0.1)]);
        write(&mut disk, vec![pass, other, optim]);
        let steps = history
            .read(|reader| {
                let summary = &reader.summaries()?[&run];
                assert_eq!(u64::from(summary.steps), step);
                assert_eq!(summary.loss, Some(2.0));
                Ok(reader.columns(&run)?.count("loss per token"))
            })
            .unwrap();
        assert_eq!(steps as u64, step, "points are appended");
    }
    let requests = history.read(|reader| reader.requests(&run, 2)).unwrap();
    let kinds: Vec<&str> = requests.iter().map(|request| request.kind.as_str()).collect();
    assert_eq!(kinds, ["forward_backward", "optim_step"], "the newest, oldest first");
}

#[tokio::test]
async fn the_advantage_of_a_batch_is_found_by_the_sequence() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = open(folder.path());
    let history = history(HistoryOptions::default(), folder.path());
    write(&mut disk, vec![sample(1, &[1, 2], &[3, 4]), sample(2, &[1, 2], &[3, 5])]);
    let mut pass = request("a:train:0", 1, "forward_backward", &[]);
    if let HistoryRecord::Request(pass) = &mut pass {
        pass.operation.advantages = vec![(sequence_hash([1, 2, 3, 5]), 1.5), (7, 9.0)];
    }
    write(&mut disk, vec![pass]);
    let samples = history.read(|reader| reader.samples(&filter())).unwrap();
    let [newest, oldest] = &samples[..] else { panic!("{samples:?}") };
    assert_eq!(newest.completions[0].advantage, Some(1.5));
    assert_eq!(oldest.completions[0].advantage, None);
    assert_eq!(newest.completions[0].top[1], [(5, -0.5), (0, -9.0)]);
    assert_eq!(newest.prompt_hash, oldest.prompt_hash);
    let of_run = SampleFilter { folder_prefix: Some("a_train_0-".to_owned()), ..filter() };
    assert_eq!(history.read(|reader| reader.samples(&of_run)).unwrap().len(), 2);
    let of_other = SampleFilter { folder_prefix: Some("a_train_01-".to_owned()), ..filter() };
    assert!(history.read(|reader| reader.samples(&of_other)).unwrap().is_empty());
}

#[tokio::test]
async fn count_bytes_and_age_are_limited() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = open(folder.path());
    let day = 24 * 3_600 * 1_000_000_i64;
    let records = (1..=50).map(|seq| request("a:train:0", seq, "optim_step", &[])).collect();
    write(&mut disk, records);
    let records = (1..=30).map(|n| sample(n * day, &[1; 100], &[2; 10])).collect();
    write(&mut disk, records);
    let limited = |change: &dyn Fn(&mut HistoryOptions)| {
        let mut options = HistoryOptions::default();
        options.max_age = Duration::from_secs(1_000 * 24 * 3_600);
        change(&mut options);
        history(options, folder.path()).cutoff(100 * day)
    };
    assert_eq!(limited(&|_| {}), None);
    let cutoff = limited(&|options| options.requests = 10).unwrap();
    assert_eq!(cutoff, HistoryCutoff { points: 41, samples: 1 });
    // A sample has 100 tokens of a prompt, 10 tokens and log-probabilities, and 20 alternatives.
    let size = 400 + 40 + 40 + 4 + 160;
    let cutoff = limited(&|options| options.sample_bytes = 5 * size + 1).unwrap();
    assert_eq!(cutoff.samples, 26);
    let cutoff = limited(&|options| options.sample_bytes = 1).unwrap();
    assert_eq!(cutoff.samples, 30, "the newest row stays");
    let aged = |days: u64| {
        let age = Duration::from_secs(days * 24 * 3_600);
        limited(&|options| options.max_age = age).unwrap()
    };
    assert_eq!(aged(80), HistoryCutoff { points: 50, samples: 20 });
    assert_eq!(aged(1), HistoryCutoff { points: 50, samples: 30 });

    write(&mut disk, vec![HistoryRecord::Cutoff(aged(80))]);
    let history = history(HistoryOptions::default(), folder.path());
    let samples = history.read(|reader| reader.samples(&filter())).unwrap();
    assert_eq!((samples.len(), samples[10].id), (11, 20));
    write(&mut disk, vec![sample(31 * day, &[1], &[2])]);
    let newest = history.read(|reader| reader.last_sample(None)).unwrap();
    assert_eq!(newest, 31, "ids continue");
}
