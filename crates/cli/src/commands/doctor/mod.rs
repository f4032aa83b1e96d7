//! `tinkex doctor`: checks the configuration, the credential and the connection.

mod checks;

use clap::Args;
use serde::Serialize;

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;

/// Arguments of `tinkex doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Changes nothing and does not retry requests. Exits with 0 if all checks pass, possibly with warnings,
and with 1 otherwise.

Examples:
  tinkex doctor             check the hosted service, or TINKER_BASE_URL
  tinkex doctor --local     check the server on this machine
  tinkex doctor --json      print the checks as JSON")]
pub(crate) struct DoctorArgs {}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Ok,
    Warning,
    Wrong,
    /// The check could not be performed.
    Unknown,
}

/// Check and its result.
#[derive(Debug, Serialize)]
struct Finding {
    /// Name of the check.
    what: &'static str,
    verdict: Verdict,
    /// Description of the result.
    found: String,
    /// Advice for a result that is not ok.
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

pub(super) async fn run(context: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let checks = checks::all(context).await;
    let ok = checks.iter().all(|finding| finding.verdict != Verdict::Wrong);
    let mut text = String::new();
    for finding in &checks {
        let verdict = match finding.verdict {
            Verdict::Ok => "ok",
            Verdict::Warning => "warning",
            Verdict::Wrong => "error",
            Verdict::Unknown => "unknown",
        };
        text += &format!(
            "{verdict:<9}{:<15}{}\n",
            finding.what,
            format::escape_controls(&finding.found)
        );
        if let Some(advice) = &finding.advice {
            text += &format!("{:<24}→ {advice}\n", "");
        }
    }
    text += if ok { "all checks passed" } else { "some checks failed" };
    context.text(&text, &DoctorReport { ok, checks })?;
    Ok(if ok { Exit::Success } else { Exit::Failed })
}
