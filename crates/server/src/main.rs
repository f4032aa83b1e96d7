//! `tinkex-server`: the Tinker API on this machine.

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::net::IpAddr;
use std::process::ExitCode;

use tinkex_server::{Options, Server};

const HELP: &str = "\
Usage: tinkex-server [OPTIONS]

  --data-dir DIR        where everything is kept (tinkex-data)
  --host ADDRESS        where to listen (127.0.0.1); any other needs a key
  --port PORT           0 picks a free one (8080)
  --key-file FILE       let in only who sends the key in this file
  --model NAME=FOLDER   serve a Hugging Face folder under a name; may be repeated
  --hub-cache DIR       serve the models of a Hugging Face hub cache
  --threads N           threads that compute; 0 for one on each core (0)
  --bf16                keep frozen weights in bf16
  --raw-logprobs        report log-probabilities of samples without the temperature
  --plain               ask nothing special of clients
  --quiet               no line for every finished job

The first line on stdout is the base URL; everything else goes to stderr.
";

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            eprint!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("tinkex-server: {why}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("tinkex-server: {why}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(serve(options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("tinkex-server: {why}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut options = Options::new("tinkex-data");
    options.log_jobs = true;
    options.address.set_port(8080);
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{name} needs a value"));
        match name.as_str() {
            "--help" | "-h" => return Ok(None),
            "--data-dir" => options.data = value()?.into(),
            "--host" => {
                let text = value()?;
                let ip: IpAddr =
                    text.parse().map_err(|_| format!("--host {text}: not an address"))?;
                options.address.set_ip(ip);
            }
            "--port" => {
                let text = value()?;
                options
                    .address
                    .set_port(text.parse().map_err(|_| format!("--port {text}: not a port"))?);
            }
            "--key-file" => {
                let path = value()?;
                let key = std::fs::read_to_string(&path)
                    .map_err(|why| format!("--key-file {path}: {why}"))?;
                let key = key.trim();
                if key.is_empty() {
                    return Err(format!("--key-file {path}: it is empty"));
                }
                options = options.key(key);
            }
            "--model" => {
                let text = value()?;
                let (name, folder) = text
                    .split_once('=')
                    .ok_or_else(|| format!("--model {text}: NAME=FOLDER was expected"))?;
                options = options.model(name, folder);
            }
            "--hub-cache" => options.hub_cache = Some(value()?.into()),
            "--threads" => {
                let text = value()?;
                options.threads =
                    text.parse().map_err(|_| format!("--threads {text}: not a number"))?;
            }
            "--bf16" => options.bf16 = true,
            "--raw-logprobs" => options.raw_logprobs = true,
            "--plain" => options.efficient = false,
            "--quiet" => options.log_jobs = false,
            other => return Err(format!("there is no option {other}")),
        }
    }
    Ok(Some(options))
}

async fn serve(options: Options) -> Result<(), Box<dyn std::error::Error>> {
    let has_key = options.key.is_some();
    let data = options.data.display().to_string();
    let server = Server::start(options).await?;
    let url = server.base_url();
    let mut out = std::io::stdout();
    writeln!(out, "{url}")?;
    out.flush()?;
    let key = if has_key { "<the key>" } else { "tml-local" };
    eprintln!("serving {} from {data}", server.models().join(", "));
    eprintln!("to use it: export TINKER_BASE_URL={url} TINKER_API_KEY={key}");
    interrupted().await?;
    eprintln!("stopping");
    let stopped = server.stop().await;
    eprintln!(
        "saved {} models; {} requests go on after the next start",
        stopped.models_saved, stopped.requests_waiting
    );
    Ok(())
}

/// Waits for Ctrl-C, or for what a system sends to end a program.
async fn interrupted() -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            done = tokio::signal::ctrl_c() => done,
            _ = terminate.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}
