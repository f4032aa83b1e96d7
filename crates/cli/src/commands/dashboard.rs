//! `tinkex dashboard` and `tinkex ui`: the dashboard in the browser.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use serde_json::json;
use tinkex::{Env, HttpService as _, Lane, Network};
use tinkex_runs::RunFolder;
use tinkex_server::FolderDashboard;

use crate::args::number_between;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::local::{self, ProbeResult, ServerInfo};

/// Maximum time that the server may take to respond.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Arguments of `tinkex dashboard`.
#[derive(Debug, Args)]
#[command(after_help = "\
Shows the runs, curves, samples and figures of the server that `tinkex serve` or a command with
--local runs on this machine. The URL contains a code that works once, for one browser.

Examples:
  tinkex dashboard              open the browser
  tinkex dashboard --no-open    print the URL only")]
pub(crate) struct DashboardArgs {
    /// Print the URL without opening a browser
    #[arg(long)]
    no_open: bool,
    /// Data folder of the server [default: the folder that --local uses]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// Arguments of `tinkex ui`.
#[derive(Debug, Args)]
#[command(after_help = "\
Shows the run folders of `tinkex train` and `tinkex rl`, also of runs on the hosted service, and
follows them while they grow. A folder is a run folder, or contains run folders. Press Ctrl-C to stop.

Examples:
  tinkex ui                     all run folders in the current folder
  tinkex ui math-run chat-run   two runs over each other")]
pub(crate) struct UiArgs {
    /// Run folders, or folders that contain them [default: the current folder]
    #[arg(value_name = "FOLDER")]
    folders: Vec<PathBuf>,
    /// Port to listen on; 0 chooses a free port
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 0,
        value_parser = number_between::<0, { u16::MAX }>
    )]
    port: u16,
    /// Print the URL without opening a browser
    #[arg(long)]
    no_open: bool,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: DashboardArgs,
) -> Result<(), CommandError> {
    let data = match &args.data_dir {
        Some(folder) => context.environment.path(folder),
        None => local::data_folder(&context.environment.variables)?,
    };
    let not_running = || {
        let message = format!("no server runs on the data folder {}", data.display());
        CommandError::new(Exit::NotFound, message)
            .hint("Start one with `tinkex serve`, or pass --data-dir.")
    };
    let info = ServerInfo::read(&data).ok_or_else(not_running)?;
    match info.probe().await {
        ProbeResult::Available => {}
        ProbeResult::KeyRejected => {
            info.key()?;
            return Err(CommandError::new(Exit::Credentials, info.key_rejected())
                .hint(local::KEY_REJECTED_HINT));
        }
        ProbeResult::Unavailable => return Err(not_running()),
    }
    if !info.needs_key() {
        return show(context, &info.url, args.no_open);
    }
    let url = match request_code(&info).await {
        Ok(code) => format!("{}/?code={code}", info.url),
        Err(reason) => {
            let message = format!("cannot get access to the dashboard of {}: {reason}", info.url);
            return Err(CommandError::new(Exit::Failed, message)
                .hint("Restart the server with this version of tinkex."));
        }
    };
    show(context, &url, args.no_open)
}

pub(super) async fn run_folders(
    context: &mut CommandContext<'_>,
    args: UiArgs,
) -> Result<Exit, CommandError> {
    let mut folders = args.folders;
    if folders.is_empty() {
        folders.push(".".into());
    }
    let folders: Vec<PathBuf> =
        folders.iter().map(|folder| context.environment.path(folder)).collect();
    if let Some(missing) = folders.iter().find(|folder| !folder.is_dir()) {
        let message = format!("cannot read folder {}: it does not exist", missing.display());
        return Err(CommandError::new(Exit::NotFound, message)
            .hint("Pass the run folder that `tinkex train` or `tinkex rl` created."));
    }
    let found = RunFolder::find_in(&folders);
    for error in found.iter().filter_map(|folder| RunFolder::read(folder).err()) {
        let hint = error.hint().map(|hint| format!(" {hint}")).unwrap_or_default();
        context.notice(&format!("warning: {error}.{hint}"));
    }
    let address = (Ipv4Addr::LOCALHOST, args.port).into();
    let dashboard = FolderDashboard::start(folders, address).await.map_err(|error| {
        CommandError::new(Exit::Failed, format!("cannot listen on {address}: {error}"))
            .hint("Pass another --port.")
    })?;
    show(context, &dashboard.url(), args.no_open)?;
    context.notice("press Ctrl-C to stop");
    context.environment.interrupt.clone().pressed(1).await;
    Ok(Exit::Success)
}

/// Prints the URL and opens it in the browser, if there is one.
fn show(context: &mut CommandContext<'_>, url: &str, no_open: bool) -> Result<(), CommandError> {
    let opened = !no_open && open_browser(context, url);
    context.text(url, &json!({ "url": url, "opened": opened }))
}

/// Opens a URL in the browser. Returns false if this machine has none.
fn open_browser(context: &CommandContext<'_>, url: &str) -> bool {
    let variables = &context.environment.variables;
    let mut command = if cfg!(target_os = "macos") {
        Command::new("open")
    } else if cfg!(windows) {
        let mut command = Command::new("rundll32");
        command.arg("url.dll,FileProtocolHandler");
        command
    } else {
        let has_display =
            ["DISPLAY", "WAYLAND_DISPLAY"].iter().any(|name| variables.get(name).is_some());
        if !has_display {
            return false;
        }
        Command::new("xdg-open")
    };
    command.arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Asks the server for a code that gives a browser access.
async fn request_code(info: &ServerInfo) -> Result<String, String> {
    let failed = |error: &dyn std::error::Error| error.to_string();
    let key = info.key().map_err(|error| error.to_string())?;
    let network = Network::new(&Env::empty()).map_err(|error| failed(&error))?;
    let request = http::Request::post(format!("{}/ui/api/code", info.url))
        .header("x-api-key", key)
        .body(Bytes::new())
        .map_err(|error| failed(&error))?;
    let response = network.send(Lane::Config, request, TIMEOUT).await;
    let response = response.map_err(|error| failed(&error))?;
    let document: serde_json::Value = serde_json::from_slice(response.body()).unwrap_or_default();
    match document["code"].as_str() {
        Some(code) => Ok(code.to_owned()),
        None => Err(format!("the server responded with {}", response.status())),
    }
}
