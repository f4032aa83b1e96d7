//! `tinkex server`: administration of a server.

mod backup;
mod check;
mod drain;
mod du;
mod running;

use clap::Subcommand;

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};

#[derive(Debug, Subcommand)]
pub(crate) enum ServerCommand {
    /// Make a running server refuse new work, before it is stopped
    #[command(after_help = "\
Accepted requests are executed, and clients can poll their results, download and finish. New work is
refused with status 503, which clients retry until another process serves the address. Stopping the
server with SIGTERM does the same for the time of `serve --drain-timeout`.

Examples:
  tinkex server drain --wait               until nothing runs, then stop the server
  tinkex server drain --wait=10m           for at most ten minutes
  tinkex server drain --undo               accept work again
  tinkex server drain --base-url https://tinkex.example.com --api-key-file admin.key")]
    Drain(drain::DrainArgs),
    /// Verify the data folder of a stopped server, and repair it
    #[command(after_help = "\
Verifies the database, the checksums of stored requests and results, and the digests of all weights. The
check changes nothing. --repair copies everything that can be read to new files and keeps the damaged
files beside them, with names that end in .damaged.

A server starts with damaged payloads and weights too: only the requests, runs and checkpoints that need
them fail. It does not start with a damaged database.

Exits with 0 if everything is intact or was repaired without a loss, with 6 if it was repaired and
something is lost, and with 1 otherwise.

Examples:
  tinkex server check
  tinkex server check --data-dir /var/lib/tinkex --format json
  tinkex server check --data-dir /var/lib/tinkex --repair")]
    Check(check::CheckArgs),
    /// Copy the data folder of a running server
    #[command(after_help = "\
The backup has the state of one moment, while the server continues. Weights that the newest backup in
the folder already has are linked instead of copied. It contains prompts and the API key: only you can
read it. Run the command on the machine of the server.

Examples:
  tinkex server backup /backups/tinkex
  tinkex server backup /backups/tinkex --data-dir /var/lib/tinkex")]
    Backup(backup::BackupArgs),
    /// Make a data folder from a backup
    #[command(after_help = "\
Checks the digest of every file. Existing data is never overwritten.

Examples:
  tinkex server restore /backups/tinkex --data-dir /var/lib/tinkex-restored
  tinkex server restore /backups/tinkex/2026-11-18T15-04-05Z --data-dir restored")]
    Restore(backup::RestoreArgs),
    /// Show the sizes of the files of a running server
    #[command(after_help = "\
Examples:
  tinkex server du
  tinkex server du --by run
  tinkex server du -f json")]
    Du(du::DuArgs),
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: ServerCommand,
) -> Result<Exit, CommandError> {
    match command {
        ServerCommand::Check(args) => check::run(context, &args).await,
        ServerCommand::Drain(args) => drain::run(context, args).await,
        ServerCommand::Backup(args) => backup::back_up(context, args).await,
        ServerCommand::Restore(args) => backup::restore(context, &args),
        ServerCommand::Du(args) => du::run(context, args).await,
    }
}
