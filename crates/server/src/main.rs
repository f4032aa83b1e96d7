//! `tinkex-server`: the Tinker API on this machine.

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use tinkex_server::{Server, ServerOptions};

const HELP: &str = "\
Usage: tinkex-server [OPTIONS]

  --data-dir DIR        where everything is kept (tinkex-data)
  --host ADDRESS        where to listen (127.0.0.1); any other needs a key
  --port PORT           0 picks a free one (8080)
  --api-key-file FILE   let in only who sends the key in this file
  --model NAME=FOLDER   serve a Hugging Face folder under a name; may be repeated
  --hub-cache DIR       serve the models of a Hugging Face hub cache (this user's)
  --no-hub-cache        serve none of them
  --snapshot-after SECONDS  work on a model that a crash may mean doing again (20)
  --threads N           threads that compute; 0 for one on each core (0)
  --bf16                keep frozen weights in bf16
  --raw-logprobs        report log-probabilities of samples without the temperature
  --no-autosave         lose what a model learned when its client is not heard of any more
  --drop-undone         start although promised work needs a model that is not there; it fails
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
    let served = runtime.block_on(serve(options));
    // Whoever wants to stop at once does not wait for a pass.
    runtime.shutdown_background();
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("tinkex-server: {why}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<ServerOptions>, String> {
    let mut options = ServerOptions::new("tinkex-data");
    options.log_jobs = true;
    options.hub_cache = tinkex_server::local_hub_cache();
    options.address.set_port(8080);
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{name} needs a value"));
        match name.as_str() {
            "--help" | "-h" => return Ok(None),
            "--data-dir" => options.data_dir = value()?.into(),
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
            // The second is what it was called before.
            "--api-key-file" | "--key-file" => options = options.api_key(key(&name, &value()?)?),
            "--model" => {
                let text = value()?;
                let (name, folder) = text
                    .split_once('=')
                    .ok_or_else(|| format!("--model {text}: NAME=FOLDER was expected"))?;
                options = options.model(name, folder);
            }
            "--hub-cache" => options.hub_cache = Some(value()?.into()),
            "--no-hub-cache" => options.hub_cache = None,
            "--snapshot-after" => {
                let text = value()?;
                let seconds = text.parse().ok();
                let after = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                options.timeouts.snapshot_after =
                    after.ok_or_else(|| format!("--snapshot-after {text}: not seconds"))?;
            }
            "--threads" => {
                let text = value()?;
                options.threads =
                    text.parse().map_err(|_| format!("--threads {text}: not a number"))?;
            }
            "--bf16" => options.bf16 = true,
            "--raw-logprobs" => options.raw_logprobs = true,
            "--no-autosave" => options.autosave_on_expiry = false,
            "--drop-undone" => options.drop_undone = true,
            "--plain" => options.efficient_protocol = false,
            "--quiet" => options.log_jobs = false,
            other => return Err(format!("there is no option {other}")),
        }
    }
    Ok(Some(options))
}

/// The key in a file.
fn key(option: &str, path: &str) -> Result<String, String> {
    let text = std::fs::read_to_string(path).map_err(|why| format!("{option} {path}: {why}"))?;
    match text.trim() {
        "" => Err(format!("{option} {path}: it is empty")),
        key => Ok(key.to_owned()),
    }
}

async fn serve(options: ServerOptions) -> Result<(), Box<dyn std::error::Error>> {
    let has_key = options.api_key.is_some();
    let data = options.data_dir.display().to_string();
    let server = Server::start(options).await?;
    let url = server.base_url();
    let mut out = std::io::stdout();
    writeln!(out, "{url}")?;
    out.flush()?;
    let key = if has_key { "<the key>" } else { "tml-local" };
    eprintln!("serving {} from {data}", server.models().join(", "));
    eprintln!("to use it: export TINKER_BASE_URL={url} TINKER_API_KEY={key}");
    tokio::select! {
        done = interrupted() => done?,
        () = server.broken() => return Err("the server made a mistake; start it again".into()),
    }
    eprintln!("stopping; once more to stop at once");
    let stopped = tokio::select! {
        stopped = server.stop() => stopped,
        again = interrupted() => {
            // As a crash: what was promised is on disk.
            eprintln!("stopped; what was promised goes on after the next start");
            return again.map_err(Into::into);
        }
    };
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
