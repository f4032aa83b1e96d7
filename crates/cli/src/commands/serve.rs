//! The server on this machine, until it is stopped.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::pin::pin;

use clap::Args;
use futures_util::future::{Either, select};
use serde_json::json;
use tinkex_server::{Server, ServerOptions};

use crate::error::{CommandError, Exit};
use crate::format;
use crate::local::{self, ServerInfo};
use crate::output::Shell;
use crate::startup_error::{Starter, startup_error};

/// What can be typed after `serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
The first line on standard output is the base URL and nothing else; everything else goes to standard
error. --api-key-file names the key that clients must send; without it anyone on this machine may
come in, and nobody else.

Examples:
  tinkex serve                                        with the built-in model, on port 8080
  tinkex serve --model Qwen/Qwen3-0.6B=models/qwen3   a Hugging Face folder under a name
  tinkex serve --host 0.0.0.0 --api-key-file key      for other machines too

Any free port, for a script:
  tinkex serve --port 0 >url 2>log &
  until [ -s url ]; do sleep 0.1; done; url=$(head -1 url)")]
pub(crate) struct ServeArgs {
    /// Where to listen; an address that others can reach needs --api-key-file
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// On which port; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Where everything is kept; without it the folder that --local uses
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// ServeArgs a Hugging Face folder under a name; may be repeated
    #[arg(long = "model", value_name = "NAME=FOLDER", value_parser = model)]
    models: Vec<(String, PathBuf)>,
    /// ServeArgs the models of a Hugging Face hub cache
    #[arg(long, value_name = "DIR")]
    hub_cache: Option<PathBuf>,
    /// Threads that compute; 0 for one on each core
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Keep frozen weights in bf16: half the memory
    #[arg(long)]
    bf16: bool,
    /// Report log-probabilities of samples without the temperature
    #[arg(long)]
    raw_logprobs: bool,
    /// Start although promised work needs a model that is not there; that work fails
    #[arg(long)]
    drop_undone: bool,
    /// Ask nothing special of clients, as an old server would
    #[arg(long)]
    plain: bool,
}

fn model(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
            Ok((name.to_owned(), folder.into()))
        }
        _ => Err("say NAME=FOLDER".to_owned()),
    }
}

/// A key that can be guessed is none.
const SHORTEST_KEY: usize = 20;

pub(super) async fn run(shell: &mut Shell<'_>, serve: ServeArgs) -> Result<Exit, CommandError> {
    let key_file = shell.globals.api_key_file.as_deref().map(|path| shell.environment.path(path));
    let key = key_file.as_deref().map(|path| key(path, serve.host)).transpose()?;
    refuse(shell, &serve, key.is_some())?;
    let data = match serve.data_dir {
        Some(folder) => shell.environment.path(&folder),
        None => local::data_folder(&shell.environment.variables)?,
    };
    let mut options = ServerOptions::new(&data);
    options.address = (serve.host, serve.port).into();
    let here = |(name, folder): (String, PathBuf)| (name, shell.environment.path(&folder));
    options.models = serve.models.into_iter().map(here).collect();
    options.hub_cache = serve.hub_cache.map(|folder| shell.environment.path(&folder));
    options.threads = serve.threads;
    options.bf16 = serve.bf16;
    options.raw_logprobs = serve.raw_logprobs;
    options.drop_undone = serve.drop_undone;
    options.efficient_protocol = !serve.plain;
    options.log_jobs = !shell.globals.quiet;
    let has_key = key.is_some();
    if let Some(key) = key {
        options = options.api_key(key);
    }

    let server = Server::start(options).await.map_err(|why| startup_error(&why, Starter::Serve))?;
    let note = ServerInfo::of(&server, true, key_file);
    note.leave(&data)?;
    let (url, models) = (server.base_url(), server.models());
    let ready = json!({ "base_url": url, "models": models, "data_dir": data, "pid": note.pid });
    shell.text(&url, &ready)?;
    shell.notice(&format!("serving {} from {}", models.join(", "), data.display()));
    let key = if has_key { "<the key>" } else { "tml-local" };
    shell.notice(&format!("to use it: export TINKER_BASE_URL={} TINKER_API_KEY={key}", note.url()));

    let interrupt = shell.environment.interrupt.clone();
    interrupt.pressed(1).await;
    shell.notice("stopping: what runs right now is finished first (Ctrl-C again ends at once)");
    let stopping = pin!(server.stop());
    let stopped = match select(stopping, pin!(interrupt.pressed(2))).await {
        Either::Left((stopped, _)) => stopped,
        Either::Right(_) => {
            note.remove(&data);
            return Err(CommandError::interrupted()
                .hint("nothing that was promised is lost: it is done again after the next start"));
        }
    };
    note.remove(&data);
    let (saved, waiting) = (stopped.models_saved, stopped.requests_waiting);
    shell.notice(&format!(
        "stopped; {} saved, {}",
        format::count(saved, "model"),
        match waiting {
            0 => "nothing waits".to_owned(),
            _ => format!("{} carried out after the next start", format::count(waiting, "request")),
        }
    ));
    Ok(Exit::Success)
}

/// What would be dangerous, or can only be a mistake.
fn refuse(shell: &Shell<'_>, serve: &ServeArgs, has_key: bool) -> Result<(), CommandError> {
    if !serve.host.is_loopback() && !has_key {
        let why = format!("{} can be reached from other machines, and there is no key", serve.host);
        return Err(CommandError::usage(why)
            .hint("name a file with a key (--api-key-file FILE), or leave --host out"));
    }
    if shell.globals.api_key.is_some() {
        let why = "a key among the arguments can be seen by everyone on this machine";
        return Err(CommandError::usage(why).hint("put it into a file: --api-key-file FILE"));
    }
    if shell.globals.local || shell.globals.base_url.is_some() {
        let why = "--local and --base-url say which server to use; this command is the server";
        return Err(CommandError::usage(why).hint("say --host and --port"));
    }
    let mut seen = BTreeSet::new();
    if let Some((name, _)) = serve.models.iter().find(|(name, _)| !seen.insert(name)) {
        return Err(CommandError::usage(format!("two folders are called {name}"))
            .hint("give each --model a name of its own"));
    }
    Ok(())
}

/// The key that clients must send.
fn key(path: &Path, host: IpAddr) -> Result<String, CommandError> {
    let shown = path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|why| CommandError::file("read", &shown, &why))?;
    let key = text.trim();
    let wrong = |why: String, hint: &str| Err(CommandError::usage(why).hint(hint));
    if !key.starts_with("tml-") || key.contains(char::is_whitespace) {
        return wrong(
            format!("the key in {shown} is one that no client can send"),
            "a key begins with tml- and is one word",
        );
    }
    if !host.is_loopback() {
        if key.len() < SHORTEST_KEY {
            return wrong(
                format!("the key in {shown} is so short that others could guess it"),
                "make one: echo tml-$(head -c 24 /dev/urandom | base64 | tr -dc a-zA-Z0-9) > FILE",
            );
        }
        if readable_by_others(path) {
            return wrong(
                format!("others on this machine can read {shown}"),
                "make it yours alone: chmod 600 FILE",
            );
        }
    }
    Ok(key.to_owned())
}

#[cfg(unix)]
fn readable_by_others(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::metadata(path).is_ok_and(|about| about.permissions().mode() & 0o077 != 0)
}

#[cfg(not(unix))]
fn readable_by_others(_: &Path) -> bool {
    false
}
