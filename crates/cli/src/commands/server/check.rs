//! `tinkex server check`: verifies and repairs a data folder.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use tinkex_server::{
    DataFolderReport, FileReport, FileState, StartError, WeightsState, check_data_folder,
};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::local;

/// Arguments of `tinkex server check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Data folder [default: the folder that --local uses]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Copy what can be read to new files and keep the damaged files beside them
    #[arg(long)]
    repair: bool,
}

#[derive(Serialize)]
struct CheckOutput<'a> {
    data_dir: &'a Path,
    intact: bool,
    #[serde(flatten)]
    report: &'a DataFolderReport,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: &CheckArgs,
) -> Result<Exit, CommandError> {
    let data = match &args.data_dir {
        Some(folder) => context.environment.path(folder),
        None => local::data_folder(&context.environment.variables)?,
    };
    let folder = data.clone();
    let repair = args.repair;
    let checked = tokio::task::spawn_blocking(move || check_data_folder(&folder, repair)).await;
    let checked = checked.map_err(|error| CommandError::new(Exit::Failed, error.to_string()))?;
    let report = checked.map_err(|error| {
        let message = format!("cannot check the data folder: {error}");
        let failed = CommandError::new(Exit::Failed, message);
        match error {
            StartError::DataDirInUse(_) => failed.hint("Stop the server first."),
            _ => failed,
        }
    })?;
    let intact = report.is_intact();
    let output = CheckOutput { data_dir: &data, intact, report: &report };
    context.text(&describe(&data, &report), &output)?;
    Ok(match (intact, report.repairs.is_empty(), report.lost.is_empty()) {
        (true, _, _) | (false, false, true) => Exit::Success,
        (false, false, false) => Exit::Partial,
        (false, true, _) => Exit::Failed,
    })
}

/// Returns the report as text.
fn describe(data: &Path, report: &DataFolderReport) -> String {
    let mut lines = Vec::new();
    describe_file(&mut lines, "database", "rows", &report.database);
    describe_file(&mut lines, "payloads", "payloads", &report.payloads);
    let count = |state| report.weights.iter().filter(|folder| folder.state == state).count();
    let lost = count(WeightsState::Damaged) + count(WeightsState::Missing);
    let state = if lost == 0 { "intact" } else { "damaged" };
    lines.push(format!(
        "{:<10}{state:<10}{} intact, {} without a digest, {} damaged, {} missing",
        "weights",
        count(WeightsState::Intact),
        count(WeightsState::Unverified),
        count(WeightsState::Damaged),
        count(WeightsState::Missing),
    ));
    if !report.lost.is_empty() {
        lines.push("lost:".to_owned());
        let lost = report.lost.iter().map(|lost| format!("  {}: {}", lost.object, lost.reason));
        lines.extend(lost);
    }
    if report.database.state != FileState::Intact {
        let usable = report.weights.iter().filter(|folder| !folder.state.is_lost());
        let folders: Vec<String> = usable
            .map(|folder| data.join("weights").join(&folder.folder).display().to_string())
            .collect();
        if !folders.is_empty() {
            lines.push("checkpoints that `tinkex export FOLDER --to DIR` takes out:".to_owned());
            lines.extend(folders.into_iter().map(|folder| format!("  {folder}")));
        }
    }
    if !report.repairs.is_empty() {
        lines.push("repaired:".to_owned());
        lines.extend(report.repairs.iter().map(|repair| format!("  {repair}")));
    }
    let lines: Vec<String> = lines.iter().map(|line| format::escape_controls(line)).collect();
    lines.join("\n")
}

fn describe_file(lines: &mut Vec<String>, name: &str, unit: &str, file: &FileReport) {
    let state = match file.state {
        FileState::Intact => "intact",
        FileState::Damaged => "damaged",
        FileState::Missing => "missing",
    };
    lines.push(format!("{name:<10}{state:<10}{} readable {unit}", file.readable));
    lines.extend(file.problems.iter().map(|problem| format!("{:<20}{problem}", "")));
}
