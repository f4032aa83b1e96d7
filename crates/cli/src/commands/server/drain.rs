//! `tinkex server drain`.

use std::time::Duration;

use clap::Args;
use tinkex::rest::DrainStatus;
use tokio::time::{Instant, sleep};

use super::running::RunningServer;
use crate::args::duration;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;

/// Interval at which `--wait` asks for the status.
const INTERVAL: Duration = Duration::from_millis(500);

/// Arguments of `tinkex server drain`.
#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Wait until the server executes nothing, for at most DURATION if it is given
    #[arg(
        long,
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        value_parser = duration,
        conflicts_with = "undo"
    )]
    wait: Option<Option<Duration>>,
    /// Accept new work again
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    server: RunningServer,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: DrainArgs,
) -> Result<Exit, CommandError> {
    let client = args.server.client(context).await?;
    if args.undo {
        let status = client.cancel_drain().await?;
        context.text("The server accepts new work.", &status)?;
        return Ok(Exit::Success);
    }
    let mut status = client.start_drain().await?;
    if let Some(limit) = args.wait {
        let start = Instant::now();
        while !status.may_stop && limit.is_none_or(|limit| start.elapsed() < limit) {
            sleep(INTERVAL).await;
            status = client.get_drain_status().await?;
            if !status.draining {
                let message = "the drain was cancelled by another command or by a restart";
                return Err(CommandError::new(Exit::Failed, message));
            }
        }
    }
    context.text(&describe(&status), &status)?;
    let is_late = args.wait.is_some() && !status.may_stop;
    Ok(if is_late { Exit::Temporary } else { Exit::Success })
}

fn describe(status: &DrainStatus) -> String {
    if status.may_stop {
        return "The server refuses new work and executes nothing: it may be stopped.".to_owned();
    }
    let requests = format::count(status.requests, "accepted request");
    let inference = format::count(status.inference_requests, "inference request");
    format!(
        "The server refuses new work. It still has {requests}, which continue after a restart, and \
         {inference}, which a stop would fail."
    )
}
