//! [`RunningServer`]: the running server that a command administers.

use std::path::PathBuf;

use clap::Args;
use tinkex::{AdminClient, BaseUrl};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::local::{self, ProbeResult, ServerInfo};

/// Arguments that select a running server.
#[derive(Debug, Args)]
pub(super) struct RunningServer {
    /// Data folder of the server [default: the server of --base-url or TINKER_BASE_URL, else the
    /// folder that --local uses]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

impl RunningServer {
    /// Returns a client of the server. Never starts a server.
    pub(super) async fn client(
        &self,
        context: &mut CommandContext<'_>,
    ) -> Result<AdminClient, CommandError> {
        let is_named =
            context.settings.server(context.environment) != BaseUrl::production().to_string();
        if self.data_dir.is_none() && !context.settings.local && is_named {
            return Ok(context.settings.client(context.environment)?.admin());
        }
        let data = match &self.data_dir {
            Some(folder) => context.environment.path(folder),
            None => local::data_folder(&context.environment.variables)?,
        };
        let not_running = || {
            let message = format!("no server runs on the data folder {}", data.display());
            CommandError::new(Exit::NotFound, message)
                .hint("Pass --data-dir, or --base-url with the key of the server.")
        };
        let info = ServerInfo::read(&data).ok_or_else(not_running)?;
        match info.probe().await {
            ProbeResult::Available => {}
            ProbeResult::KeyRejected => {
                // If the key file cannot be read, report that error instead.
                info.key()?;
                return Err(CommandError::new(Exit::Credentials, info.key_rejected())
                    .hint(local::KEY_REJECTED_HINT));
            }
            ProbeResult::Unavailable => return Err(not_running()),
        }
        let url = info.url.parse()?;
        context.settings.use_server(url, info.key()?);
        Ok(context.settings.client(context.environment)?.admin())
    }
}
