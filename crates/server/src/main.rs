//! `tinkex-server`: command-line program that runs a [`Server`].

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use tinkex_server::{
    DropUndone, MemorySize, Server, ServerLimits, ServerOptions, StartError, api_key_file,
};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

const HELP: &str = "\
Run a local server for the Tinker API

Usage: tinkex-server [OPTIONS]

Listening:
  --host ADDRESS           IP address to listen on [default: 127.0.0.1]
  --port PORT              Port to listen on; 0 picks a free one [default: 8080]
  --api-key-file FILE      File with the API key that clients must send [default: `key` in the data
                           folder, created with a random key]
  --no-key                 Accept requests without a key from every user of this machine; for tests
                           and containers, and only on a loopback address
  --allow-origin ORIGIN    Let web pages of this origin, such as http://localhost:3000, use the
                           inference endpoints; repeatable
  --plain                  Disable the protocol features that reduce traffic

Models:
  --model NAME=PATH        Serve a Hugging Face model folder or GGUF file under a name; repeatable
  --tokenizer NAME=FOLDER  Read the tokenizer and chat template of a model from another folder;
                           repeatable
  --hub-cache DIR          Serve the models of a Hugging Face hub cache [default: the user's cache]
  --no-hub-cache           Do not serve models of a hub cache
  --alias NAME=PATH        Serve a base model, tinker:// path or training run to inference requests
                           under another name; repeatable
  --threads N              Number of compute threads; 0 uses one per core [default: 0]
  --bf16                   Store frozen weights as bf16
  --quantize [NAME=]FORMAT Quantize frozen weights of all models or of one: q8 or q4; repeatable
  --raw-logprobs           Report log-probabilities of samples before the temperature is applied
  --training-memory SIZE   Memory of the activations of a training pass, such as 4GiB
                           [default: a quarter of the memory of the process]
  --cache-memory SIZE      Memory of the KV cache of one model [default: an eighth of the memory of
                           the process]

Data:
  --data-dir DIR           Folder for the database, payloads and weights [default: tinkex-data]
  --snapshot-after SECONDS Compute time on a model after which its state is saved [default: 20]
  --no-autosave            Do not save unsaved models of sessions that expire
  --drop-undone[=WHICH]    Fail accepted requests without a result: those whose base model is
                           missing, or all [default: missing]

Dashboard:
  --history N              Number of finished training requests whose metrics the dashboard keeps; 0
                           records nothing [default: 1000000]
  --no-sample-history      Do not record prompts and completions for the dashboard

Logging:
  --log-level LEVEL        Least severe level to log: off, error, warn, info, debug or trace
                           [default: info]
  --log-format FORMAT      Format of log lines: text or json [default: text]
  --quiet                  Same as --log-level warn

  -h, --help               Print this help

The first line on stdout is the base URL. Log lines go to stderr. A line of the log has the command
that sets the base URL and the API key for clients; it contains the path of the key, never the key.
";

/// Parsed command line.
struct Arguments {
    options: ServerOptions,
    /// File of `--api-key-file`.
    key_file: Option<PathBuf>,
    log_level: LevelFilter,
    log_format: LogFormat,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LogFormat {
    Text,
    Json,
}

fn main() -> ExitCode {
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(Some(arguments)) => arguments,
        Ok(None) => {
            // A closed pipe, as with `--help | head`, is not an error.
            let _ = std::io::stdout().write_all(HELP.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("error: {message}\nRun tinkex-server --help for the options.");
            return ExitCode::from(2);
        }
    };
    install_subscriber(arguments.log_level, arguments.log_format);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start the async runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(serve(arguments.options, arguments.key_file));
    // Do not wait for blocking tasks: after a second Ctrl-C one of them still joins the worker.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            if let Some(hint) = error.downcast_ref().and_then(hint) {
                eprintln!("{hint}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Installs a subscriber that writes the server's events to stderr.
fn install_subscriber(level: LevelFilter, format: LogFormat) {
    let filter = Targets::new().with_target("tinkex_server", level);
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Text => registry.with(layer.with_target(false)).init(),
        LogFormat::Json => registry.with(layer.json().flatten_event(true)).init(),
    }
}

/// Returns the hint for a start error: what the user can do about it.
fn hint(error: &StartError) -> Option<String> {
    Some(match error {
        StartError::UnprotectedAddress(_) => "Omit --no-key, or listen on 127.0.0.1.".to_owned(),
        StartError::EmptyApiKey => "Use a key that is hard to guess.".to_owned(),
        StartError::ApiKeyFile { .. } => return error.api_key_hint(),
        StartError::DataDirInUse(_) => {
            "Stop the other server, or pass another --data-dir.".to_owned()
        }
        StartError::MissingModel { name, .. } => format!(
            "Pass --model {name}=FOLDER, --drop-undone to let the requests fail, or another \
             --data-dir."
        ),
        StartError::MissingUpstream { name, .. } => format!(
            "Start `tinkex serve` with --upstream {name}=URL, pass --drop-undone to let the \
             requests fail, or another --data-dir."
        ),
        StartError::InvalidOrigin(_) => {
            "Pass an origin such as --allow-origin http://localhost:3000.".to_owned()
        }
        StartError::InvalidModel { .. } | StartError::InvalidTokenizer { .. } => {
            return error.model_hint();
        }
        _ => return None,
    })
}

/// Parses the command line; `None` if it asks for help.
fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Arguments>, String> {
    let mut options = ServerOptions::new("tinkex-data");
    options.hub_cache = tinkex_server::local_hub_cache();
    options.limits = ServerLimits::for_this_process();
    options.address.set_port(8080);
    options.create_api_key = true;
    let mut key_file = None;
    let (mut log_level, mut log_format) = (LevelFilter::INFO, LogFormat::Text);
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{name}: missing value"));
        let invalid = |text: &str, expected: &str| format!("{name} {text}: expected {expected}");
        match name.as_str() {
            "--help" | "-h" => return Ok(None),
            "--data-dir" => options.data_dir = value()?.into(),
            "--host" => {
                let text = value()?;
                let ip: IpAddr = text.parse().map_err(|_| invalid(&text, "an IP address"))?;
                options.address.set_ip(ip);
            }
            "--port" => {
                let text = value()?;
                let port = text.parse().map_err(|_| invalid(&text, "a port from 0 to 65535"))?;
                options.address.set_port(port);
            }
            // `--key-file` is the former name.
            "--api-key-file" | "--key-file" => {
                let path = value()?;
                options = options.api_key(read_key(&name, &path)?);
                key_file = Some(path.into());
            }
            "--no-key" => options.create_api_key = false,
            "--model" => {
                let text = value()?;
                let (model, path) =
                    text.split_once('=').ok_or_else(|| invalid(&text, "NAME=PATH"))?;
                options = options.model(model, path);
            }
            "--tokenizer" => {
                let text = value()?;
                let (model, folder) =
                    text.split_once('=').ok_or_else(|| invalid(&text, "NAME=FOLDER"))?;
                options = options.tokenizer(model, folder);
            }
            "--alias" => {
                let text = value()?;
                let (alias, target) =
                    text.split_once('=').ok_or_else(|| invalid(&text, "NAME=PATH"))?;
                options = options.alias(alias, target);
            }
            "--allow-origin" => options = options.allow_origin(value()?),
            "--hub-cache" => options.hub_cache = Some(value()?.into()),
            "--no-hub-cache" => options.hub_cache = None,
            "--snapshot-after" => {
                let text = value()?;
                let seconds = text.parse().ok();
                let after = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                options.timeouts.snapshot_after =
                    after.ok_or_else(|| invalid(&text, "a number of seconds"))?;
            }
            "--threads" => {
                let text = value()?;
                options.threads = text.parse().map_err(|_| invalid(&text, "a number"))?;
            }
            "--bf16" => options.bf16 = true,
            "--quantize" => {
                let text = value()?;
                let rule = text.parse().map_err(|_| invalid(&text, "q8, q4 or NAME=q8"))?;
                options = options.quantize_rule(rule);
            }
            "--raw-logprobs" => options.raw_logprobs = true,
            "--no-autosave" => options.autosave_on_expiry = false,
            "--training-memory" => options.limits.training_bytes = size(&name, &value()?)?,
            "--cache-memory" => options.limits.kv_cache_bytes = size(&name, &value()?)?,
            "--drop-undone" => options.drop_undone = DropUndone::Missing,
            other if other.starts_with("--drop-undone=") => {
                let which = other["--drop-undone=".len()..].parse();
                options.drop_undone = which.map_err(|error| format!("{other}: {error}"))?;
            }
            "--plain" => options.efficient_protocol = false,
            "--history" => {
                let text = value()?;
                let requests = text.parse().map_err(|_| invalid(&text, "a whole number"))?;
                options.history.requests = requests;
            }
            "--no-sample-history" => options.history.samples = 0,
            "--log-level" => {
                let text = value()?;
                let levels = "off, error, warn, info, debug or trace";
                log_level = text.parse().map_err(|_| invalid(&text, levels))?;
            }
            "--log-format" => {
                let text = value()?;
                log_format = match text.as_str() {
                    "text" => LogFormat::Text,
                    "json" => LogFormat::Json,
                    _ => return Err(invalid(&text, "text or json")),
                };
            }
            "--quiet" => log_level = LevelFilter::WARN,
            other => return Err(format!("unknown option {other}")),
        }
    }
    if key_file.is_some() && !options.create_api_key {
        return Err("--no-key and --api-key-file contradict each other".to_owned());
    }
    Ok(Some(Arguments { options, key_file, log_level, log_format }))
}

/// Parses the value of `option`, a size in bytes with a unit.
fn size(option: &str, text: &str) -> Result<usize, String> {
    let size: MemorySize = text.parse().map_err(|error| format!("{option} {text}: {error}"))?;
    Ok(size.bytes())
}

/// Reads the API key from the file at `path`, without surrounding whitespace.
fn read_key(option: &str, path: &str) -> Result<String, String> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{option} {path}: {error}"))?;
    match text.trim() {
        "" => Err(format!("{option} {path}: the file is empty")),
        key => Ok(key.to_owned()),
    }
}

async fn serve(
    options: ServerOptions,
    key_file: Option<PathBuf>,
) -> Result<(), Box<dyn std::error::Error>> {
    let created = options.create_api_key.then(|| api_key_file(&options.data_dir));
    let key_file = key_file.or(created);
    let data_dir = options.data_dir.display().to_string();
    let server = Server::start(options).await?;
    let url = server.base_url();
    let mut out = std::io::stdout();
    writeln!(out, "{url}")?;
    out.flush()?;
    let key = key_file.as_deref().map_or_else(|| "tml-local".to_owned(), key_in_shell);
    tracing::info!(models = server.models().join(", "), data_dir, "serving");
    tracing::info!("dashboard: {}", server.dashboard_url());
    tracing::info!("connect with: export TINKER_BASE_URL={url} TINKER_API_KEY={key}");
    tokio::select! {
        interrupted = interrupted() => interrupted?,
        () = server.broken() => {
            return Err("an internal thread panicked; start the server again: accepted requests are durable".into());
        }
    }
    tracing::info!("shutting down gracefully; press Ctrl-C again to stop immediately");
    let summary = tokio::select! {
        summary = server.stop() => summary,
        again = interrupted() => {
            tracing::info!("stopped; accepted requests continue after the next start");
            return again.map_err(Into::into);
        }
    };
    tracing::info!(
        models_saved = summary.models_saved,
        requests_waiting = summary.requests_waiting,
        "stopped; waiting requests continue after the next start"
    );
    Ok(())
}

/// Returns the shell expression for the key in a file. The key itself must not appear in a log.
fn key_in_shell(file: &Path) -> String {
    // The command must work in another folder.
    let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let quoted = file.display().to_string().replace('\'', r"'\''");
    format!("\"$(cat '{quoted}')\"")
}

/// Waits for Ctrl-C, or for SIGTERM on Unix.
async fn interrupted() -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            interrupted = tokio::signal::ctrl_c() => interrupted,
            _ = terminate.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}
