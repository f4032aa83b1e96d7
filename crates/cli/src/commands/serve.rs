//! `tinkex serve`: a Tinker API server on this machine.

mod network;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures_util::future::{Either, select};
use serde_json::json;
use tinkex_files::read_private_file;
use tinkex_gateway::UpstreamServer;
use tinkex_server::{
    BUILT_IN, HistoryOptions, MemorySize, PendingOnStart, QuantizeRule, ServerHealth, ServerLimits,
    ServerOptions,
};

use crate::args::{duration, number_between, positive, whole_number};
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::inference_endpoints::{
    anthropic_url, curl_chat, curl_completion, export_variables, openai_url,
};
use crate::local::{self, KeyFile, ServerInfo};
use crate::local_models::{LocalModels, StartedServer, start_server};
use crate::log::{LogFormat, LogLevel, ServerLog};
use crate::startup_error::{Starter, startup_error};

use network::NetworkArgs;

/// Arguments of `tinkex serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints the base URL on standard output and logs to standard error, with the base URLs of the
OpenAI- and Anthropic-compatible endpoints and a request to try. Clients must send an API key: the
one in the file of --api-key-file, or in the file `key` of the data folder, which is created with a
random key and readable only by you. Commands with --local find it; for other programs, run the
printed `export` command.

Examples:
  tinkex serve                                        serve the built-in model on port 8080
  tinkex serve --model Qwen/Qwen3-0.6B=models/qwen3   serve a Hugging Face model folder
  tinkex serve --model qwen=qwen3-0.6b-q4_k_m.gguf    serve a GGUF file
  tinkex serve --upstream http://gpu-box:8000         serve the models of another server, durably
  tinkex serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
                                                      accept requests from other machines

In a script, on any free port:
  tinkex serve --port 0 >url 2>log &
  until [ -s url ]; do sleep 0.1; done; url=$(head -1 url)")]
pub(crate) struct ServeArgs {
    /// Address to listen on
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST),
        help_heading = "Network"
    )]
    host: IpAddr,
    /// Port to listen on; 0 chooses a free port
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 8080,
        value_parser = number_between::<0, { u16::MAX }>,
        help_heading = "Network"
    )]
    port: u16,
    /// Accept requests without an API key from every user of this machine; for tests and containers
    #[arg(long, help_heading = "Network")]
    no_key: bool,
    /// Let web pages of this origin, such as http://localhost:3000, use the inference endpoints;
    /// repeatable
    #[arg(long = "allow-origin", value_name = "ORIGIN", help_heading = "Network")]
    allow_origins: Vec<String>,
    /// Disable extensions of the protocol that older clients may not support
    #[arg(long, help_heading = "Network")]
    plain: bool,
    #[command(flatten)]
    network: NetworkArgs,
    /// Serve a Hugging Face model folder or GGUF file under a name; repeatable
    #[arg(
        long = "model",
        value_name = "NAME=PATH",
        value_parser = named_path,
        help_heading = "Models"
    )]
    models: Vec<(String, PathBuf)>,
    /// Read the tokenizer and chat template of a model from another folder; repeatable
    #[arg(
        long = "tokenizer",
        value_name = "NAME=FOLDER",
        value_parser = named_folder,
        help_heading = "Models"
    )]
    tokenizers: Vec<(String, PathBuf)>,
    /// Serve a base model, tinker:// path or training run to inference requests under another name;
    /// repeatable
    #[arg(
        long = "alias",
        value_name = "NAME=PATH",
        value_parser = alias,
        help_heading = "Models"
    )]
    aliases: Vec<(String, String)>,
    /// Serve the models of this Hugging Face hub cache [default: the user's cache]
    #[arg(long, value_name = "DIR", help_heading = "Models", conflicts_with = "no_hub_cache")]
    hub_cache: Option<PathBuf>,
    /// Do not serve models of a hub cache
    #[arg(long, help_heading = "Models")]
    no_hub_cache: bool,
    /// Keep frozen weights in bf16, which halves their memory
    #[arg(long, help_heading = "Models")]
    bf16: bool,
    /// Quantize frozen weights that are not quantized yet, of all models or of one: q8 or q4;
    /// repeatable
    #[arg(
        long,
        value_name = "[NAME=]FORMAT",
        value_parser = str::parse::<QuantizeRule>,
        help_heading = "Models"
    )]
    quantize: Vec<QuantizeRule>,
    /// Report log-probabilities of samples before the temperature is applied
    #[arg(long, help_heading = "Models")]
    raw_logprobs: bool,
    /// Number of compute threads; 0 uses one per core
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = whole_number::<usize>,
        help_heading = "Models"
    )]
    threads: usize,
    /// Serve the models of another server that implements the Tinker API, such as SkyRL; repeatable
    #[arg(
        long = "upstream",
        value_name = "[NAME=]URL",
        value_parser = upstream_url,
        help_heading = "Upstreams"
    )]
    upstreams: Vec<(String, String)>,
    /// Read the API key for all upstreams, or for one, from a file; repeatable
    #[arg(
        long = "upstream-key-file",
        value_name = "[NAME=]FILE",
        value_parser = upstream_key_file,
        requires = "upstreams",
        help_heading = "Upstreams"
    )]
    upstream_key_files: Vec<(Option<String>, PathBuf)>,
    /// Save a run on its upstream after this many optimizer steps; at most about this many steps are
    /// repeated if the upstream loses the model
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10,
        value_parser = positive::<u32>,
        help_heading = "Upstreams"
    )]
    checkpoint_every: u32,
    /// Time for which requests wait for an upstream that does not respond before they fail
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        value_parser = whole_number::<u64>,
        help_heading = "Upstreams"
    )]
    upstream_timeout: u64,
    /// Memory of the activations of a training pass, such as 4GiB; larger batches are split
    /// [default: a quarter of the memory of the process]
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = str::parse::<MemorySize>,
        help_heading = "Memory"
    )]
    training_memory: Option<MemorySize>,
    /// Memory of the KV cache of one model [default: an eighth of the memory of the process]
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = str::parse::<MemorySize>,
        help_heading = "Memory"
    )]
    cache_memory: Option<MemorySize>,
    /// Data folder [default: the folder that --local uses]
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    data_dir: Option<PathBuf>,
    /// Compute time on a model after which its state is saved, such as 20s; a restart repeats at
    /// most about this much
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "20s",
        value_parser = duration,
        help_heading = "Data"
    )]
    snapshot_after: Duration,
    /// Time for which a server that is stopped refuses new work and finishes the inference requests
    /// that run; other requests continue after the next start
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "5s",
        value_parser = duration,
        help_heading = "Data"
    )]
    drain_timeout: Duration,
    /// Do not save the unsaved models of sessions that expire
    #[arg(long, help_heading = "Data")]
    no_autosave: bool,
    /// Keep only this many checkpoints of each run and kind; published checkpoints and those with a
    /// time to live are kept [default: all]
    #[arg(long, value_name = "N", value_parser = positive::<usize>, help_heading = "Data")]
    keep_checkpoints: Option<usize>,
    /// Delete runs that were not used for this time, such as 90d, with their checkpoints, unless one
    /// is published or has a time to live [default: never]
    #[arg(long, value_name = "DURATION", value_parser = duration, help_heading = "Data")]
    run_ttl: Option<Duration>,
    /// Fail pending requests at the start: those whose base model is missing, which otherwise
    /// prevents the start, or all [default: missing]
    #[arg(
        long,
        value_name = "WHICH",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "missing",
        value_parser = str::parse::<PendingOnStart>,
        help_heading = "Data"
    )]
    fail_pending: Option<PendingOnStart>,
    /// Number of finished training requests whose metrics the dashboard keeps; 0 records nothing
    #[arg(
        long,
        value_name = "N",
        default_value_t = HistoryOptions::default().requests,
        value_parser = whole_number::<u64>,
        help_heading = "Dashboard"
    )]
    history: u64,
    /// Do not record prompts and completions for the dashboard
    #[arg(long, help_heading = "Dashboard")]
    no_sample_history: bool,
    /// Log format: text or json
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        default_value = "text",
        hide_possible_values = true,
        help_heading = "Logging"
    )]
    log_format: LogFormat,
    /// Log level: off, error, warn, info, debug or trace [default: info]
    #[arg(
        long,
        value_enum,
        value_name = "LEVEL",
        hide_possible_values = true,
        help_heading = "Logging"
    )]
    log_level: Option<LogLevel>,
}

fn named_path(text: &str) -> Result<(String, PathBuf), String> {
    alias(text).map(|(name, path)| (name, path.into()))
}

fn named_folder(text: &str) -> Result<(String, PathBuf), String> {
    named_path(text).map_err(|_| "expected NAME=FOLDER".to_owned())
}

fn alias(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, target)) if !name.is_empty() && !target.is_empty() => {
            Ok((name.to_owned(), target.to_owned()))
        }
        _ => Err("expected NAME=PATH".to_owned()),
    }
}

/// Parses `NAME=URL` or `URL`, whose name is its host and port.
fn upstream_url(text: &str) -> Result<(String, String), String> {
    // An equals sign after the scheme is part of the URL.
    let named = text.split_once('=').filter(|(name, _)| !name.contains("://"));
    let url = named.map_or(text, |(_, url)| url);
    let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let host = host.and_then(|rest| rest.split('/').next()).filter(|host| !host.is_empty());
    let host = host.ok_or("expected URL or NAME=URL, with http:// or https://")?;
    let name = named.map_or(host, |(name, _)| name);
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "._-:[]".contains(c);
    if name.is_empty() || !name.chars().all(is_valid) {
        return Err(format!("invalid name {name:?}: expected letters, digits, dots and dashes"));
    }
    Ok((name.to_owned(), url.to_owned()))
}

/// Parses `NAME=FILE` or `FILE`. No name of an upstream contains a slash.
#[expect(clippy::unnecessary_wraps, reason = "the signature of a value parser")]
fn upstream_key_file(text: &str) -> Result<(Option<String>, PathBuf), String> {
    Ok(match text.split_once('=').filter(|(name, _)| !name.contains('/')) {
        Some((name, path)) => (Some(name.to_owned()), path.into()),
        None => (None, text.into()),
    })
}

/// Adds the upstreams, with the keys from their files.
fn add_upstreams(
    context: &CommandContext<'_>,
    args: &ServeArgs,
    mut options: ServerOptions,
) -> Result<ServerOptions, CommandError> {
    for (i, (name, url)) in args.upstreams.iter().enumerate() {
        if args.upstreams[..i].iter().any(|(other, _)| other == name) {
            return Err(CommandError::usage(format!(
                "--upstream: the name {name:?} is used twice; give each upstream its own name, as \
                 NAME=URL"
            )));
        }
        let files = &args.upstream_key_files;
        let own = files.iter().rfind(|(file, _)| file.as_ref() == Some(name));
        let file = own.or_else(|| files.iter().rfind(|(file, _)| file.is_none()));
        let key = match file {
            Some((_, path)) => {
                let path = context.environment.path(path);
                Some(read_upstream_key(&path)?.into())
            }
            None => None,
        };
        options = options.upstream(name, Arc::new(UpstreamServer::new(url, key)));
    }
    if let Some((Some(name), _)) = args.upstream_key_files.iter().find(|(name, _)| {
        name.as_ref().is_some_and(|name| args.upstreams.iter().all(|(other, _)| other != name))
    }) {
        return Err(CommandError::usage(format!(
            "--upstream-key-file: no upstream is named {name:?}; add --upstream {name}=URL"
        )));
    }
    options.checkpoint_every = args.checkpoint_every;
    options.timeouts.upstream = Duration::from_secs(args.upstream_timeout);
    Ok(options)
}

/// Maximum size of a file with the key of an upstream, in bytes.
const MAX_UPSTREAM_KEY: u64 = 64 << 10;

/// Reads the key of an upstream, from a file that only its owner can access.
fn read_upstream_key(path: &Path) -> Result<String, CommandError> {
    // A mounted secret is often a symbolic link. The owner and the mode of the file that it names
    // count.
    let read = path.canonicalize().and_then(|path| read_private_file(path, MAX_UPSTREAM_KEY));
    let text =
        read.and_then(|bytes| String::from_utf8(bytes).map_err(|_| ErrorKind::InvalidData.into()));
    let text = text.map_err(|error| {
        let shown = path.display();
        let message = format!("--upstream-key-file: cannot read {shown}: {error}");
        let failure = CommandError::usage(message);
        match error.kind() {
            ErrorKind::PermissionDenied => failure
                .hint(format!("Restrict the file to the user of the server: chmod 600 {shown}")),
            _ => failure,
        }
    })?;
    Ok(text.trim().to_owned())
}

/// Minimum length of an API key, in bytes, if other machines can reach the server.
const MIN_KEY_LENGTH: usize = 20;

impl ServeArgs {
    /// Returns the log options.
    pub(super) fn log(&self, colors: bool) -> ServerLog {
        ServerLog { format: self.log_format, level: self.log_level, colors }
    }
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: ServeArgs,
) -> Result<Exit, CommandError> {
    let key_file =
        context.globals.api_key_file.as_deref().map(|path| context.environment.path(path));
    let key = key_file.as_deref().map(|path| read_key(path, args.host)).transpose()?;
    check(context, &args)?;
    let data = match &args.data_dir {
        Some(folder) => context.environment.path(folder),
        None => local::data_folder(&context.environment.variables)?,
    };
    let json_log = args.log_format == LogFormat::Json;
    let mut options = add_upstreams(context, &args, ServerOptions::new(&data))?;
    options.address = (args.host, args.port).into();
    let resolve = |(name, folder): (String, PathBuf)| (name, context.environment.path(&folder));
    options.models = args.models.into_iter().map(resolve).collect();
    options.tokenizers = args.tokenizers.into_iter().map(resolve).collect();
    let first_alias = args.aliases.first().map(|(name, _)| name.clone());
    options.aliases = args.aliases;
    options.allow_origins = args.allow_origins;
    args.network.apply(context.environment, &mut options);
    options.hub_cache = match args.hub_cache {
        Some(folder) => Some(context.environment.path(&folder)),
        None if args.no_hub_cache => None,
        None => local::hub_cache(&context.environment.variables),
    };
    options.threads = args.threads;
    options.bf16 = args.bf16;
    options = args.quantize.into_iter().fold(options, ServerOptions::quantize_rule);
    options.raw_logprobs = args.raw_logprobs;
    options.timeouts.snapshot_after = args.snapshot_after;
    options.timeouts.drain = args.drain_timeout;
    options.keep_checkpoints = args.keep_checkpoints;
    options.run_ttl = args.run_ttl;
    options.autosave_on_expiry = !args.no_autosave;
    options.pending_on_start = args.fail_pending.unwrap_or_default();
    options.limits = ServerLimits::for_this_process();
    if let Some(size) = args.training_memory {
        options.limits.training_bytes = size.bytes();
    }
    if let Some(size) = args.cache_memory {
        options.limits.kv_cache_bytes = size.bytes();
    }
    options.history.requests = args.history;
    if args.no_sample_history {
        options.history.samples = 0;
    }
    options.efficient_protocol = !args.plain;
    options.create_api_key = !args.no_key;
    if let Some(key) = key {
        options = options.api_key(key);
    }
    let created = (!args.no_key).then(|| KeyFile::created(&data));
    let key_file = key_file.map(KeyFile::Given).or(created);

    let kept = LocalModels::read(&data).existing();
    let started = start_server(&options, kept).await;
    let StartedServer { server, models, skipped } =
        started.map_err(|error| startup_error(&error, Starter::Serve))?;
    let info = ServerInfo::new(&server, true, key_file.clone()).with_models(models);
    info.write(&data)?;
    let models = server.models();
    let public_url = server.public_url();
    let url = public_url.as_str();
    let ready = json!({
        "base_url": info.url, "public_url": url, "openai_base_url": openai_url(url),
        "anthropic_base_url": anthropic_url(url),
        "api_key_file": key_file.as_ref().map(KeyFile::path),
        "models": models, "data_dir": data, "pid": info.pid,
    });
    context.text(&info.url, &ready)?;
    let notice = |context: &mut CommandContext<'_>, text: &str| {
        // A JSON log must not be mixed with text.
        if json_log {
            tracing::info!("{text}");
        } else {
            context.notice(text);
        }
    };
    for name in skipped {
        notice(
            context,
            &format!("skipping model {name} of an earlier command: its files cannot be used"),
        );
    }
    notice(context, &format!("serving {} from {}", models.join(", "), data.display()));
    notice(context, &format!("dashboard: {}", server.dashboard_url()));
    let key_file = key_file.as_ref().map(KeyFile::path);
    notice(context, &format!("to use it: {}", export_variables(url, key_file)));
    let openai = openai_url(url);
    let anthropic = anthropic_url(url);
    notice(context, &format!("base URL for OpenAI clients: {openai}; for Anthropic: {anthropic}"));
    let model = first_alias.as_deref().or(models.first().map(String::as_str));
    let curl = example_request(url, key_file, model.unwrap_or(BUILT_IN));
    notice(context, &format!("to try it: {curl}"));

    let interrupt = context.environment.interrupt.clone();
    let broken = match select(pin!(interrupt.pressed(1)), pin!(server.broken())).await {
        Either::Left(_) => None,
        Either::Right((health, _)) => Some(health),
    };
    if broken == Some(ServerHealth::Superseded) {
        // The file with the address belongs to the other server.
        return Err(CommandError::new(
            Exit::Rejected,
            "the server stopped: another server has taken over its data folder",
        )
        .hint("Accepted requests are not lost: the other server executes them."));
    }
    if broken.is_some() {
        info.remove(&data);
        return Err(CommandError::new(
            Exit::Failed,
            "the server stopped: one of its threads panicked",
        )
        .hint("Start it again: accepted requests are not lost and run after the start."));
    }
    notice(context, "shutting down gracefully; press Ctrl-C again to stop immediately");
    let summary = match select(pin!(server.stop()), pin!(interrupt.pressed(2))).await {
        Either::Left((summary, _)) => summary,
        Either::Right(_) => {
            info.remove(&data);
            return Err(CommandError::interrupted()
                .hint("Accepted requests are not lost: they run after the next start."));
        }
    };
    info.remove(&data);
    let pending = match summary.requests_waiting {
        0 => "no pending requests".to_owned(),
        count => format!("{} pending until the next start", format::count(count, "request")),
    };
    let saved = format::count(summary.models_saved, "model");
    notice(context, &format!("stopped: {saved} saved, {pending}"));
    Ok(Exit::Success)
}

/// Returns a `curl` command that works with any model: not every model has a chat template.
fn example_request(url: &str, key_file: Option<&Path>, model: &str) -> String {
    match model {
        BUILT_IN => curl_chat(url, key_file, model, "What does a cow say?"),
        _ => curl_completion(url, key_file, model, "Once upon a time"),
    }
}

/// Rejects options that are unsafe or contradictory.
fn check(context: &CommandContext<'_>, args: &ServeArgs) -> Result<(), CommandError> {
    if args.no_key && !args.host.is_loopback() {
        let message = format!("other machines can reach {}, and no API key is required", args.host);
        return Err(CommandError::usage(message).hint("Omit --no-key or --host."));
    }
    if args.no_key && context.globals.api_key_file.is_some() {
        let message = "--no-key and --api-key-file contradict each other";
        return Err(CommandError::usage(message).hint("Pass one of them."));
    }
    if context.globals.api_key.is_some() {
        let message = "--api-key is visible to every user of this machine";
        return Err(CommandError::usage(message)
            .hint("Write the key to a file and pass --api-key-file FILE."));
    }
    if context.globals.local || context.globals.base_url.is_some() {
        let message = "--local and --base-url select a server, but this command runs one";
        return Err(CommandError::usage(message).hint("Use --host and --port."));
    }
    let mut names = BTreeSet::new();
    if let Some((name, _)) = args.models.iter().find(|(name, _)| !names.insert(name)) {
        return Err(CommandError::usage(format!("duplicate model name {name}"))
            .hint("Give each --model its own name."));
    }
    Ok(())
}

/// Reads and checks the API key that clients must send.
fn read_key(path: &Path, host: IpAddr) -> Result<String, CommandError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| CommandError::file("read", format!("API key file {shown}"), &error))?;
    let key = text.trim();
    let invalid = |message: String, hint: &str| Err(CommandError::usage(message).hint(hint));
    if !key.starts_with("tml-") || key.contains(char::is_whitespace) {
        return invalid(
            format!("invalid API key in {shown}: clients cannot send it"),
            "Use a key that starts with tml- and contains no spaces.",
        );
    }
    if !host.is_loopback() {
        if key.len() < MIN_KEY_LENGTH {
            return invalid(
                format!("the API key in {shown} is shorter than {MIN_KEY_LENGTH} characters"),
                "Create one: echo tml-$(head -c 24 /dev/urandom | base64 | tr -dc a-zA-Z0-9) > FILE",
            );
        }
        if readable_by_others(path) {
            return invalid(
                format!("other users of this machine can read {shown}"),
                "Restrict the file: chmod 600 FILE",
            );
        }
    }
    Ok(key.to_owned())
}

#[cfg(unix)]
fn readable_by_others(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & 0o077 != 0)
}

#[cfg(not(unix))]
fn readable_by_others(_: &Path) -> bool {
    false
}
