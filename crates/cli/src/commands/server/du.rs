//! `tinkex server du`: sizes of the files of a server.

use clap::{Args, ValueEnum};
use tinkex::rest::DiskUsage;

use super::running::RunningServer;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::table::Table;

/// Arguments of `tinkex server du`.
#[derive(Debug, Args)]
pub(crate) struct DuArgs {
    /// Group by kind, user or run
    #[arg(
        long,
        value_enum,
        value_name = "GROUP",
        default_value = "kind",
        hide_possible_values = true
    )]
    by: Grouping,
    #[command(flatten)]
    server: RunningServer,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Grouping {
    Kind,
    User,
    Run,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: DuArgs,
) -> Result<Exit, CommandError> {
    let client = args.server.client(context).await?;
    let usage = client.get_disk_usage().await?;
    let table = match args.by {
        Grouping::Kind => by_kind(&usage),
        Grouping::User => by_user(&usage),
        Grouping::Run => by_run(&usage),
    };
    let table = table.title(format!("Data folder: {}", format::bytes(usage.bytes)));
    context.table(&table, &usage)?;
    Ok(Exit::Success)
}

fn by_kind(usage: &DiskUsage) -> Table {
    let mut table = Table::new(["Kind", "Number", "Size"]);
    for kind in &usage.kinds {
        table.row([kind.kind.clone(), kind.count.to_string(), format::bytes(kind.bytes)]);
    }
    table
}

fn by_user(usage: &DiskUsage) -> Table {
    let mut table = Table::new(["User", "Runs", "Weights", "Records"]);
    for user in &usage.users {
        table.row([
            user.user.clone(),
            user.runs.to_string(),
            format::bytes(user.bytes),
            format::bytes(user.record_bytes),
        ]);
    }
    table
}

fn by_run(usage: &DiskUsage) -> Table {
    let mut table = Table::new(["Run ID", "Name", "User", "Folders", "Size"]);
    for run in &usage.runs {
        table.row([
            run.run.clone(),
            run.name.clone().unwrap_or_default(),
            run.user.clone(),
            run.folders.to_string(),
            format::bytes(run.bytes),
        ]);
    }
    table
}
