//! Looks at everything that has to be right, and says what to do where it is not.

mod checks;

use clap::Args;
use serde::Serialize;

use crate::error::{CommandError, Exit};
use crate::format;
use crate::output::Shell;

/// What can be typed after `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Nothing is changed and nothing is tried twice. The exit code is 0 if nothing is wrong, and 1
otherwise; a warning is not wrong.

Examples:
  tinkex doctor             the hosted service, or TINKER_BASE_URL
  tinkex doctor --local     the server on this machine
  tinkex doctor --json      for a program")]
pub(crate) struct DoctorArgs {}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Ok,
    Warning,
    Wrong,
    /// It could not be looked at.
    Unknown,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    what: &'static str,
    verdict: Verdict,
    found: String,
    /// What to do about it.
    advice: Option<String>,
}

impl Finding {
    fn new(what: &'static str, verdict: Verdict, found: impl Into<String>) -> Self {
        Self { what, verdict, found: found.into(), advice: None }
    }

    fn advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }
}

#[derive(Serialize)]
struct DoctorReport {
    ok: bool,
    checks: Vec<Finding>,
}

pub(super) async fn run(shell: &mut Shell<'_>) -> Result<Exit, CommandError> {
    let checks = checks::all(shell).await;
    let ok = checks.iter().all(|finding| finding.verdict != Verdict::Wrong);
    let mut text = String::new();
    for finding in &checks {
        let verdict = match finding.verdict {
            Verdict::Ok => "ok",
            Verdict::Warning => "warning",
            Verdict::Wrong => "wrong",
            Verdict::Unknown => "unknown",
        };
        text += &format!("{verdict:<9}{:<15}{}\n", finding.what, format::visible(&finding.found));
        if let Some(advice) = &finding.advice {
            text += &format!("{:<24}→ {advice}\n", "");
        }
    }
    text += if ok { "nothing is wrong" } else { "something is wrong" };
    shell.text(&text, &DoctorReport { ok, checks })?;
    Ok(if ok { Exit::Success } else { Exit::Failed })
}
