//! [`RewardProgram`]: rewards computed by a program in any language.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use tinkex::Message;
use tinkex_transport::process_group::KillOnDrop;
use tinkex_transport::task::Task;
use tinkex_wire::{JsonObject, StopReason};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::rl::{Completion, Reward, RewardError};

/// Maximum length of a line of the program in bytes.
const MAX_LINE: u64 = 1 << 20;
/// Maximum number of processes that are tried for one completion.
const ATTEMPTS: u32 = 3;
/// Number of lines of standard error that an error message quotes.
const QUOTED_LINES: usize = 5;

/// Program that computes rewards: a long-lived process that reads one JSON object per line on
/// standard input and answers each with one line on standard output.
///
/// ```text
/// {"prompt": "2 + 2 =", "completion": " 4", "metadata": {"answer": 4}, "stop_reason": "stop", …}
/// {"reward": 1.0, "metrics": {"length": 2}}
/// ```
///
/// The answer may also be a number instead of an object. If the prompt is a conversation,
/// `messages` contains the conversation and `prompt` the text of its last message. `metadata`
/// contains the other fields of the prompt.
///
/// Several processes run in parallel. A process that ends, or that does not answer in time, is
/// killed and replaced, and its completion is tried again, at most three times. Dropping this value
/// ends the processes.
///
/// ```no_run
/// use std::time::Duration;
/// use tinkex_recipes::{RewardProgram, Rl};
///
/// let program =
///     RewardProgram::new("python3 reward.py").workers(8).timeout(Duration::from_secs(10));
/// let rl = Rl::new("Qwen/Qwen3-8B").reward_program(program);
/// ```
pub struct RewardProgram {
    command: String,
    folder: Option<PathBuf>,
    workers: usize,
    timeout: Duration,
    on_stderr: Arc<dyn Fn(&str) + Send + Sync>,
    idle: Mutex<Vec<RewardWorker>>,
    permits: Semaphore,
}

/// Running process of the reward program.
struct RewardWorker {
    process: KillOnDrop,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    /// Last lines on standard error.
    quoted: Arc<Mutex<VecDeque<String>>>,
    /// Resolves when standard error was read to its end.
    stderr_end: oneshot::Receiver<()>,
    _stderr: Task,
}

/// Line that the program receives on standard input.
#[derive(Serialize)]
struct RewardRequest<'a> {
    prompt: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    messages: &'a [Message],
    completion: &'a str,
    metadata: &'a JsonObject,
    stop_reason: StopReason,
    turn: u32,
}

/// Line that the program writes to standard output.
#[derive(Deserialize)]
#[serde(untagged)]
enum RewardResponse {
    Number(f64),
    Object {
        reward: f64,
        #[serde(default)]
        metrics: BTreeMap<String, f64>,
    },
}

impl RewardProgram {
    /// Creates a program from a shell command. Processes start when they are needed.
    #[must_use]
    pub fn new(command: impl Into<String>) -> Self {
        Self {
            command: command.into(),
            folder: None,
            workers: 4,
            timeout: Duration::from_secs(60),
            on_stderr: Arc::new(|line| {
                tracing::warn!("reward program: {line}");
            }),
            idle: Mutex::default(),
            permits: Semaphore::new(4),
        }
    }

    /// Sets the working directory of the processes. Defaults to the working directory of this
    /// process.
    #[must_use]
    pub fn current_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Sets the maximum number of processes (default 4).
    #[must_use]
    pub fn workers(mut self, processes: usize) -> Self {
        self.workers = processes.clamp(1, 1024);
        self.permits = Semaphore::new(self.workers);
        self
    }

    /// Sets the maximum time for one answer (default 60 s).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the receiver of the lines that the program writes to standard error. By default they
    /// are logged as warnings.
    #[must_use]
    pub fn on_stderr(mut self, receive: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.on_stderr = Arc::new(receive);
        self
    }

    /// Returns the reward of a completion.
    ///
    /// # Errors
    /// Fails if the program cannot be started, prints something else than a reward, or fails three
    /// times.
    ///
    /// # Cancel safety
    /// A process whose answer is not awaited is killed and replaced.
    pub async fn score(&self, completion: &Completion) -> Result<Reward, RewardError> {
        let request = RewardRequest {
            prompt: &completion.prompt.text,
            messages: &completion.prompt.messages,
            completion: &completion.text,
            metadata: &completion.prompt.metadata,
            stop_reason: completion.stop_reason,
            turn: completion.turn,
        };
        let mut line = serde_json::to_vec(&request)?;
        line.push(b'\n');
        let _permit = self.permits.acquire().await?;
        let mut failures = 0;
        loop {
            let idle = self.lock_idle().pop();
            let mut worker = match idle {
                Some(worker) => worker,
                None => self.spawn().map_err(|error| self.failed(&error.to_string()))?,
            };
            let reason = match timeout(self.timeout, worker.answer(&line)).await {
                Ok(Ok(answer)) => {
                    let reward = self.parse(&answer)?;
                    self.lock_idle().push(worker);
                    return Ok(reward);
                }
                Ok(Err(error)) => worker.failure_reason(&error).await,
                Err(_) => format!(
                    "no answer within {} s; flush standard output after each line",
                    self.timeout.as_secs_f64()
                ),
            };
            failures += 1;
            if failures == ATTEMPTS {
                return Err(self.failed(&format!("{reason} ({ATTEMPTS} attempts)")));
            }
            let reason = reason.lines().next().unwrap_or_default();
            (self.on_stderr)(&format!("restarting: {reason}"));
        }
    }

    fn failed(&self, reason: &str) -> RewardError {
        format!("reward program `{}` failed: {reason}", self.command).into()
    }

    fn parse(&self, answer: &[u8]) -> Result<Reward, RewardError> {
        match serde_json::from_slice(answer) {
            Ok(RewardResponse::Number(value)) => Ok(value.into()),
            Ok(RewardResponse::Object { reward, metrics }) => Ok(metrics
                .into_iter()
                .fold(reward.into(), |reward: Reward, (name, value)| reward.metric(name, value))),
            Err(_) => {
                let text = String::from_utf8_lossy(answer);
                let text: String = text.trim_end().chars().take(200).collect();
                Err(self.failed(&format!(
                    "it printed {text:?}, expected {{\"reward\": NUMBER}}; print other text to \
                     standard error"
                )))
            }
        }
    }

    fn spawn(&self) -> io::Result<RewardWorker> {
        let (shell, flag) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };
        let mut command = Command::new(shell);
        command
            .args([flag, &self.command])
            // Disable buffering in Python, which otherwise writes its output only when a buffer is
            // full.
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        // Start the program in a process group of its own: Ctrl-C must not end the program before
        // the run has stopped.
        #[cfg(unix)]
        command.process_group(0);
        let mut child = command.spawn()?;
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(io::Error::other("the streams of the process are not available"));
        };
        let quoted = Arc::new(Mutex::new(VecDeque::new()));
        let (all_read, stderr_end) = oneshot::channel();
        let forward = forward_stderr(stderr, Arc::clone(&self.on_stderr), Arc::clone(&quoted));
        let forward = async move {
            forward.await;
            drop(all_read);
        };
        Ok(RewardWorker {
            process: KillOnDrop::new(child),
            stdin,
            stdout: BufReader::new(stdout),
            quoted,
            stderr_end,
            _stderr: Task::spawn(forward),
        })
    }

    fn lock_idle(&self) -> MutexGuard<'_, Vec<RewardWorker>> {
        self.idle.lock()
    }
}

impl RewardWorker {
    /// Sends a line and reads the answer.
    async fn answer(&mut self, line: &[u8]) -> io::Result<Vec<u8>> {
        self.stdin.write_all(line).await?;
        self.stdin.flush().await?;
        let mut answer = Vec::new();
        (&mut self.stdout).take(MAX_LINE).read_until(b'\n', &mut answer).await?;
        match answer.last() {
            Some(b'\n') => Ok(answer),
            Some(_) if answer.len() as u64 == MAX_LINE => {
                Err(io::Error::other("it printed a line of more than 1 MiB"))
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Returns the reason why the process did not answer, with its last lines on standard error.
    async fn failure_reason(&mut self, error: &io::Error) -> String {
        let status = timeout(Duration::from_secs(1), self.process.wait()).await;
        let mut reason = match status {
            Ok(Ok(status)) => format!("it ended without an answer: {status}"),
            _ => format!("cannot communicate with it: {error}"),
        };
        // Wait until standard error is read to its end, so that the last lines are complete. Wait
        // at most a second: a child of the process may keep the stream open.
        let _ = timeout(Duration::from_secs(1), &mut self.stderr_end).await;
        let quoted = self.quoted.lock();
        for line in &*quoted {
            reason += &format!("\n  {line}");
        }
        reason
    }
}

/// Forwards the lines on standard error to `on_stderr`, and keeps the last ones for error messages.
async fn forward_stderr(
    stderr: ChildStderr,
    receive: Arc<dyn Fn(&str) + Send + Sync>,
    quoted: Arc<Mutex<VecDeque<String>>>,
) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        receive(text);
        let mut quoted = quoted.lock();
        quoted.push_back(text.to_owned());
        if quoted.len() > QUOTED_LINES {
            quoted.pop_front();
        }
    }
}

impl fmt::Debug for RewardProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RewardProgram")
            .field("command", &self.command)
            .field("workers", &self.workers)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::sync::Arc;

    use futures_util::future::join_all;

    use super::*;
    use crate::rl::RlPrompt;

    fn completion(text: &str) -> Completion {
        Completion::new(RlPrompt::text("p").with("answer", 4), text)
    }

    #[tokio::test]
    async fn rewards_come_from_long_lived_parallel_processes() {
        // Each process prints the number of lines that it has read.
        let program = "n=0; while read -r line; do n=$((n+1)); echo \"{\\\"reward\\\": $n, \
                       \\\"metrics\\\": {\\\"m\\\": 2}}\"; done";
        let program = RewardProgram::new(program).workers(2);
        let completion = completion("x");
        let rewards = join_all((0..10).map(|_| program.score(&completion))).await;
        let total: f64 = rewards.iter().map(|reward| reward.as_ref().unwrap().value).sum();
        let both: f64 = (1..=5).map(f64::from).sum::<f64>() * 2.0;
        let one = (1..=10).map(f64::from).sum::<f64>();
        assert!((both..=one).contains(&total), "{total}");
        assert_eq!(rewards[0].as_ref().unwrap().metrics["m"], 2.0);
        assert!(program.lock_idle().len() <= 2);
    }

    #[tokio::test]
    async fn the_program_receives_prompt_completion_and_metadata() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("line");
        let program = format!("read -r line; printf %s \"$line\" > {}; echo 0.5", file.display());
        let reward = RewardProgram::new(program).score(&completion("c\n")).await.unwrap();
        assert_eq!(reward, Reward::new(0.5));
        let line: serde_json::Value =
            serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let expected = serde_json::json!({
            "prompt": "p", "completion": "c\n", "metadata": {"answer": 4}, "stop_reason": "stop",
            "turn": 0,
        });
        assert_eq!(line, expected);
    }

    #[tokio::test]
    async fn crashed_processes_are_replaced_and_reported() {
        let folder = tempfile::tempdir().unwrap();
        let marker = folder.path().join("crashed");
        let crash_once = format!(
            "read -r line; if [ ! -e {0} ]; then touch {0}; echo broken >&2; exit 3; fi; echo 1",
            marker.display()
        );
        let seen = Arc::new(Mutex::new(Vec::new()));
        let lines = completion("x");
        let log = Arc::clone(&seen);
        let program =
            RewardProgram::new(crash_once).on_stderr(move |line| log.lock().push(line.to_owned()));
        assert_eq!(program.score(&lines).await.unwrap(), Reward::new(1.0));
        let seen = seen.lock().join("\n");
        assert!(seen.contains("broken") && seen.contains("restarting: it ended"), "{seen}");

        let error = RewardProgram::new("echo no >&2; exit 3").score(&lines).await.unwrap_err();
        let error = error.to_string();
        assert!(error.contains("(3 attempts)") && error.contains("exit status: 3"), "{error}");
        let error = RewardProgram::new("read -r line; echo hello").score(&lines).await.unwrap_err();
        assert!(error.to_string().contains("\"hello\""), "{error}");
    }

    #[tokio::test]
    async fn a_program_that_does_not_answer_is_killed() {
        let program =
            RewardProgram::new("exec tail -f /dev/null").timeout(Duration::from_millis(1));
        let error = program.score(&completion("x")).await.unwrap_err().to_string();
        assert!(error.contains("no answer within 0.001 s"), "{error}");
    }
}
