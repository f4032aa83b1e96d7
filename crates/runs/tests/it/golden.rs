//! The run folders of version 0.1.0 in `tests/golden/0.1.0`, one per method, are read and written
//! without a difference. These folders stay unchanged for good: they show that a newer program
//! still reads the runs of 0.1.0.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tinkex_runs::{
    Advantage, DpoSettings, EVALUATIONS_FILE, EvaluationLine, EvaluationSettings, EventLogFormat,
    LearnedMessages, LongExamples, LossOption, LossSettings, METRICS_FILE, MethodSettings,
    MetricsLine, RUN_FILE, RewardSettings, RlSettings, RunFolder, RunRecord, RunSettings,
    SAMPLES_FILE, SampleLine, SampleSettings, SavedCheckpoint, Schedule, SettingChange,
    SftSettings, StartCheckpoint, metric,
};
use tinkex_wire::{AdamParams, SamplingParams, StopReason, Timestamp, TinkerPath};

/// Files of a golden folder, as the types of the crate.
struct GoldenRun {
    method: &'static str,
    record: RunRecord,
    metrics: Vec<MetricsLine>,
    samples: Vec<SampleLine>,
    evaluations: Vec<EvaluationLine>,
}

fn folder(method: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/0.1.0").join(method)
}

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_unix_micros((1_763_400_000 + seconds) * 1_000_000).unwrap()
}

fn path(text: &str) -> TinkerPath {
    format!("tinker://0b6f6b1e-5a0c-5a6e-9d3f-2f1f0c8f7a11:train:0/{text}").parse().unwrap()
}

fn saved(step: u64, reward: Option<f64>) -> SavedCheckpoint {
    let mut checkpoint = SavedCheckpoint::new(step, path(&format!("weights/step-{step:06}")));
    checkpoint.reward = reward;
    checkpoint
}

/// Returns a finished supervised run that was extended, with every optional setting.
fn sft() -> GoldenRun {
    let mut settings = RunSettings::new(
        "Qwen/Qwen3-8B",
        MethodSettings::Sft(SftSettings {
            batch_size: 4,
            max_tokens: Some(2048),
            long_examples: LongExamples::Reject,
            learned_messages: LearnedMessages::Last,
        }),
    );
    settings.start = Some(StartCheckpoint {
        checkpoint: "tinker://a:train:0/weights/final".parse().unwrap(),
        with_optimizer: true,
    });
    settings.tokenizer = Some("Qwen/Qwen3-8B".to_owned());
    settings.rank = 32;
    settings.seed = 7;
    settings.steps = 3;
    settings.optimizer = AdamParams::with_learning_rate(2e-4);
    settings.schedule = Schedule::Cosine;
    settings.warmup_steps = 1;
    settings.data.files = vec!["/data/animals.jsonl".into(), "/data/more.jsonl.gz".into()];
    settings.data.digest = "cbf29ce484222325".to_owned();
    settings.evaluation = Some(EvaluationSettings {
        file: Some("/data/held-out.jsonl".into()),
        digest: Some("af63bd4c8601b7df".to_owned()),
        fraction: None,
        every: 1,
    });
    settings.checkpoints.every = 1;
    settings.samples = Some(SampleSettings { prompts: "/data/prompts.jsonl".into(), every: 2 });
    settings.event_log = Some(EventLogFormat::Tensorboard);
    settings.plot = Some("/plots/animals.png".into());
    let mut record = RunRecord::new("animals", settings);
    record.created = time(0);
    record.changes = vec![SettingChange::Steps { time: time(60), at_step: 2, from: 2, to: 3 }];
    record.progress.run_id = Some(path("weights/x").run().clone());
    record.progress.checkpoints = vec![saved(2, None), saved(3, None)];
    record.progress.sampler = Some(path("sampler_weights/step-000003"));
    record.progress.finished = true;

    let step = |step: u64, loss: f64| {
        MetricsLine::new(step)
            .with(metric::EPOCH, 0.25)
            .with(metric::LOSS, loss)
            .with(metric::LEARNING_RATE, 2e-4)
            .with(metric::TOKENS, 512.0)
            .with(metric::TOKENS_PER_SECOND, 1024.5)
    };
    let mut sample = SampleLine::new(2, "What does a cow say?", "Moo.");
    sample.tokens = 3;
    GoldenRun {
        method: "sft",
        record,
        metrics: vec![
            MetricsLine::new(0).with(metric::EVAL_LOSS, 3.5),
            step(1, 3.25),
            step(2, 2.125),
            step(3, 1.5),
            MetricsLine::new(3).with(metric::EVAL_LOSS, 1.75),
        ],
        samples: vec![sample],
        evaluations: vec![EvaluationLine {
            time: time(120),
            checkpoint: path("sampler_weights/step-000003"),
            file: "/data/questions.jsonl".to_owned(),
            examples: 4,
            tokens: 20,
            loss: 0.5,
            scored_by: Some("exact".to_owned()),
            answers: 4,
            score: Some(0.75),
        }],
    }
}

/// Returns a stopped preference run, with only the fields that every run has.
fn dpo() -> GoldenRun {
    let mut settings = RunSettings::new("tinkex/tiny", MethodSettings::Dpo(DpoSettings::default()));
    settings.steps = 6;
    settings.optimizer = AdamParams::with_learning_rate(1e-3);
    settings.schedule = Schedule::Linear;
    settings.data.files = vec!["/data/pairs.jsonl".into()];
    settings.data.digest = "cbf29ce484222325".to_owned();
    settings.evaluation =
        Some(EvaluationSettings { fraction: Some(0.25), every: 0, ..Default::default() });
    settings.checkpoints.every = 1;
    let mut record = RunRecord::new("pairs", settings);
    record.created = time(0);
    record.progress.run_id = Some(path("weights/x").run().clone());
    record.progress.checkpoints = vec![saved(1, None)];
    let preferences =
        [("accuracy", 1.0), ("chosen_reward", 0.25), ("margin", 0.5), ("rejected_reward", -0.25)];
    let preferences = preferences.map(|(name, value)| (name.to_owned(), value));
    GoldenRun {
        method: "dpo",
        record,
        metrics: vec![
            MetricsLine::new(0)
                .with(metric::EVAL_LOSS, 0.75)
                .with_all(metric::EVAL_PREFIX, preferences.clone()),
            MetricsLine::new(1)
                .with(metric::EPOCH, 0.5)
                .with(metric::LOSS, 0.6875)
                .with(metric::LEARNING_RATE, 1e-3)
                .with(metric::TOKENS, 100.0)
                .with(metric::TOKENS_PER_SECOND, 50.25)
                .with_all("", preferences),
        ],
        samples: Vec::new(),
        evaluations: Vec::new(),
    }
}

/// Returns a reinforcement-learning run with a program as the reward and a loss with options.
fn rl() -> GoldenRun {
    let mut loss = LossSettings::new("ppo");
    loss.options.insert("clip_high_threshold".to_owned(), LossOption::Number(1.3));
    let mut settings = RunSettings::new(
        "tinkex/tiny",
        MethodSettings::Rl(RlSettings {
            reward: RewardSettings::Program { command: "python3 reward.py".to_owned() },
            prompts_are_messages: true,
            group_size: 4,
            groups_per_batch: 2,
            loss,
            advantage: Advantage::GroupNormalized,
            kl_coefficient: 0.01,
            max_policy_age: 1,
            sampling: SamplingParams::new().max_tokens(12).stop("\n"),
        }),
    );
    settings.steps = 2;
    settings.optimizer = AdamParams::with_learning_rate(3e-3);
    settings.data.files = vec!["/data/prompts.jsonl".into()];
    settings.data.digest = "cbf29ce484222325".to_owned();
    settings.checkpoints.every = 1;
    let mut record = RunRecord::new("prompts", settings);
    record.created = time(0);
    record.progress.run_id = Some(path("weights/x").run().clone());
    record.progress.checkpoints = vec![saved(1, Some(0.5))];
    let mut sample = SampleLine::new(1, "Who are you?", "A MODEL.");
    sample.tokens = 4;
    sample.stop_reason = StopReason::Length;
    sample.group = Some(0);
    sample.reward = Some(1.0);
    sample.advantage = Some(0.5);
    sample.metrics = BTreeMap::from([("letters".to_owned(), 6.0)]);
    sample.policy_step = Some(0);
    GoldenRun {
        method: "rl",
        record,
        metrics: vec![
            MetricsLine::new(0).with(metric::EVAL_REWARD, 0.25),
            MetricsLine::new(1)
                .with(metric::EPOCH, 0.5)
                .with(metric::LOSS, -0.125)
                .with(metric::LEARNING_RATE, 3e-3)
                .with(metric::TOKENS, 96.0)
                .with(metric::TOKENS_PER_SECOND, 48.5)
                .with(metric::REWARD, 0.5)
                .with(metric::REWARD_STD, 0.5)
                .with(metric::KL, 0.0)
                .with(metric::KL_REFERENCE, 0.0625)
                .with(metric::ENTROPY, 1.5)
                .with(metric::POLICY_AGE, 0.0)
                .with(metric::GROUPS, 2.0)
                .with(metric::SKIPPED_GROUPS, 0.0)
                .with(metric::COMPLETION_TOKENS, 12.0)
                .with(metric::TRUNCATED, 1.0)
                .with(metric::SAMPLING_SECONDS, 1.25)
                .with(metric::REWARD_SECONDS, 0.0)
                .with(metric::TRAINING_SECONDS, 0.75)
                .with_all(metric::REWARD_PREFIX, [("letters".to_owned(), 6.0)]),
        ],
        samples: vec![sample],
        evaluations: Vec::new(),
    }
}

fn lines<T: DeserializeOwned>(file: &Path) -> Vec<T> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn to_lines<T: Serialize>(lines: &[T]) -> String {
    lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect()
}

/// Upgrade test: add the folders of later versions beside these, and keep these.
#[test]
fn run_folders_of_0_1_0_are_read() {
    for golden in [sft(), dpo(), rl()] {
        let folder = folder(golden.method);
        assert_eq!(RunFolder::read(&folder).unwrap(), golden.record);
        assert_eq!(lines::<MetricsLine>(&folder.join(METRICS_FILE)), golden.metrics);
        assert_eq!(lines::<SampleLine>(&folder.join(SAMPLES_FILE)), golden.samples);
        assert_eq!(lines::<EvaluationLine>(&folder.join(EVALUATIONS_FILE)), golden.evaluations);
    }
}

#[test]
fn written_run_folders_equal_the_folders_of_0_1_0() {
    for golden in [sft(), dpo(), rl()] {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let mut written = RunFolder::new(&path, golden.record).unwrap();
        written.store().unwrap();
        let mut metrics = written.metrics(0, |_| ()).unwrap();
        for line in &golden.metrics {
            metrics.append(line).unwrap();
        }
        let folder = folder(golden.method);
        let text = |file: &Path| std::fs::read_to_string(file).unwrap_or_default();
        for name in [RUN_FILE, METRICS_FILE] {
            assert_eq!(text(&path.join(name)), text(&folder.join(name)), "{}", golden.method);
        }
        assert_eq!(to_lines(&golden.samples), text(&folder.join(SAMPLES_FILE)));
        assert_eq!(to_lines(&golden.evaluations), text(&folder.join(EVALUATIONS_FILE)));
    }
}
