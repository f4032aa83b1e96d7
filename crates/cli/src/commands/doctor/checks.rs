//! The checks of `tinkex doctor`.

use std::path::Path;
use std::time::Duration;

use tinkex::{BaseUrl, CredentialStore, Env, ErrorKind, ServiceClient, Timestamp};
use tokio::time::{Instant, timeout};

use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::local::{self, KEY_REJECTED_HINT, ProbeResult, ServerInfo};
use crate::settings::is_loopback;

use super::{Finding, Verdict};

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum clock difference in seconds. A larger difference invalidates signed URLs and short-lived
/// tokens.
const MAX_CLOCK_SKEW: i64 = 30;
/// Minimum free disk space in bytes.
const MIN_FREE_DISK: u64 = 1 << 30;

const CHECK_NETWORK: &str = "Check the network, the proxy and TINKER_BASE_URL.";

/// Runs all checks.
pub(super) async fn all(context: &mut CommandContext<'_>) -> Vec<Finding> {
    let env = context.environment.variables.clone();
    let configuration = configuration(context, &env);
    let url_is_valid = configuration.verdict != Verdict::Wrong;
    let mut findings = vec![version(), configuration];
    findings.extend(data_folder(&env));
    findings.push(local_server(&env).await);
    if let Err(failure) = context.start_local().await {
        findings.push(failed("server", &failure));
        return findings;
    }
    let client = match context.settings.client_without_retries(context.environment) {
        Ok(client) => {
            findings.push(credential(context, &env));
            client
        }
        Err(failure) => {
            // An invalid base URL is already reported.
            if url_is_valid {
                findings.push(failed("credential", &failure));
            }
            return findings;
        }
    };
    findings.extend(server(&client).await);
    findings
}

/// Reports an error that prevents the remaining checks, with its hint as advice.
fn failed(what: &'static str, failure: &CommandError) -> Finding {
    let finding = Finding::new(what, Verdict::Wrong, failure.to_string());
    Finding { advice: failure.hint_text(), ..finding }
}

fn version() -> Finding {
    let found = format!("tinkex {}, protocol 0.36", env!("CARGO_PKG_VERSION"));
    Finding::new("version", Verdict::Ok, found)
}

/// Checks and reports the base URL. Flags and profile are valid, otherwise the command would not
/// run, but `TINKER_BASE_URL` may be invalid.
fn configuration(context: &CommandContext<'_>, env: &Env) -> Finding {
    let url = if context.settings.local {
        "the local server".to_owned()
    } else {
        context.settings.server(context.environment)
    };
    if !context.settings.local
        && let Err(error) = url.parse::<BaseUrl>()
    {
        return Finding::new("configuration", Verdict::Wrong, format!("TINKER_BASE_URL: {error}"))
            .advice("Set it to a URL such as http://localhost:8080.");
    }
    let finding = Finding::new("configuration", Verdict::Ok, url.clone());
    if url.starts_with("http://") && !is_loopback(&url) {
        let advice = "Use https: without it, the API key is sent unencrypted.";
        return Finding { verdict: Verdict::Warning, ..finding }.advice(advice);
    }
    if !is_loopback(&url)
        && !context.settings.local
        && let Some(proxy) = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]
            .into_iter()
            .find(|name| env.get(name).is_some())
    {
        return Finding { found: format!("{url}, through the proxy of {proxy}"), ..finding };
    }
    finding
}

fn credential(context: &CommandContext<'_>, env: &Env) -> Finding {
    let found = if context.settings.local {
        "the key of the local server".to_owned()
    } else if context.globals.api_key_file.is_some() || context.globals.api_key.is_some() {
        "from the command line".to_owned()
    } else if env.get("TINKER_API_KEY").is_some() {
        "from TINKER_API_KEY".to_owned()
    } else if env.get("TINKER_CREDENTIAL_CMD").is_some() {
        "from the command in TINKER_CREDENTIAL_CMD".to_owned()
    } else {
        let default = || CredentialStore::load(env).ok()?.default_id().map(str::to_owned);
        match context.settings.profile_key_id().map(str::to_owned).or_else(default) {
            Some(id) => format!("stored ({id})"),
            None => "found".to_owned(),
        }
    };
    Finding::new("credential", Verdict::Ok, found)
}

/// Checks that the server responds, accepts the key, and has the same time.
async fn server(client: &ServiceClient) -> Vec<Finding> {
    let url = client.base_url().clone();
    let started = Instant::now();
    let response = timeout(TIMEOUT, client.server_capabilities()).await;
    let elapsed = format!("{} ms", started.elapsed().as_millis());
    let response = match response {
        Ok(response) => response,
        Err(_) => {
            let wrong = Finding::new("server", Verdict::Wrong, format!("{url} does not respond"));
            return vec![wrong.advice(CHECK_NETWORK)];
        }
    };
    match response {
        Ok(capabilities) => {
            let models = capabilities.supported_models.len();
            let has = format::count(models, "model");
            let found = format!("{url} responds in {elapsed}, {has}");
            let mut findings = vec![Finding::new("server", Verdict::Ok, found)];
            if models == 0 {
                findings.push(
                    Finding::new("models", Verdict::Warning, "none")
                        .advice("Ask the operator of the server to add a model."),
                );
            }
            findings.push(clock(client).await);
            findings
        }
        Err(error) => {
            let (what, advice) = match error.kind() {
                ErrorKind::Auth | ErrorKind::Permission => {
                    ("credential", "Log in with `tinkex auth login`: the server rejected the key.")
                }
                ErrorKind::Connect | ErrorKind::Timeout => ("server", CHECK_NETWORK),
                ErrorKind::Billing => ("billing", "Check the billing of the account."),
                ErrorKind::Decode | ErrorKind::NotFound => {
                    ("server", "Check TINKER_BASE_URL: the URL is not a Tinker API.")
                }
                _ => ("server", "Try again later."),
            };
            let cause = std::error::Error::source(&error).map(|source| format!(": {source}"));
            let found = format!("{error}{}", cause.unwrap_or_default());
            vec![Finding::new(what, Verdict::Wrong, found).advice(advice)]
        }
    }
}

/// Compares this machine's clock with the time that the server reports.
async fn clock(client: &ServiceClient) -> Finding {
    let unknown = || Finding::new("clock", Verdict::Unknown, "the server does not report its time");
    let before = Timestamp::now();
    let response = timeout(TIMEOUT, client.server_time()).await;
    let Ok(Ok(Some(server))) = response else { return unknown() };
    let after = Timestamp::now();
    let middle = before.unix_micros().midpoint(after.unix_micros());
    let difference = (server.unix_micros() - middle) / 1_000_000;
    let found = match difference {
        -1..=1 => "agrees with the server".to_owned(),
        seconds if seconds > 0 => format!("{seconds} s behind the server"),
        seconds => format!("{} s ahead of the server", -seconds),
    };
    if difference.abs() > MAX_CLOCK_SKEW {
        return Finding::new("clock", Verdict::Wrong, found)
            .advice("Set the clock of this machine; otherwise signed URLs and tokens fail.");
    }
    Finding::new("clock", Verdict::Ok, found)
}

/// Checks that the data folder is writable and that the disk has free space.
fn data_folder(env: &Env) -> Vec<Finding> {
    let folder = match local::data_folder(env) {
        Ok(folder) => folder,
        Err(failure) => {
            return vec![
                Finding::new("data folder", Verdict::Warning, failure.to_string())
                    .advice("Set HOME or TINKEX_DATA_DIR; only --local needs it."),
            ];
        }
    };
    let shown = folder.display();
    // The folder itself, or its nearest existing parent.
    let existing = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    let mut findings = vec![if !writable(existing) {
        Finding::new("data folder", Verdict::Wrong, format!("{shown} is not writable"))
            .advice("Grant write permission, or set TINKEX_DATA_DIR to another folder.")
    } else if existing == folder {
        let found = format!("{shown}, {} used", format::size(folder_size(&folder)));
        Finding::new("data folder", Verdict::Ok, found)
    } else {
        Finding::new("data folder", Verdict::Ok, format!("{shown}, not used yet"))
    }];
    findings.extend(disk(existing));
    findings
}

/// Returns the total size in bytes of the files in a folder.
fn folder_size(folder: &Path) -> i64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => folder_size(&entry.path()),
        Ok(metadata) => i64::try_from(metadata.len()).unwrap_or(i64::MAX),
        Err(_) => 0,
    };
    entries.map(size).fold(0, i64::saturating_add)
}

#[cfg(unix)]
fn writable(folder: &Path) -> bool {
    use rustix::fs::{Access, access};
    access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

#[cfg(not(unix))]
fn writable(folder: &Path) -> bool {
    std::fs::metadata(folder).is_ok_and(|metadata| !metadata.permissions().readonly())
}

fn disk(folder: &Path) -> Option<Finding> {
    let free = tinkex_files::available_space(folder)?;
    let found = format!("{} free", format::size(i64::try_from(free).unwrap_or(i64::MAX)));
    Some(if free < MIN_FREE_DISK {
        Finding::new("disk", Verdict::Warning, found)
            .advice("Free disk space, or set TINKEX_DATA_DIR to another disk.")
    } else {
        Finding::new("disk", Verdict::Ok, found)
    })
}

/// Checks the server that `server.json` in the data folder describes.
async fn local_server(variables: &Env) -> Finding {
    let info = local::data_folder(variables).ok().and_then(|folder| ServerInfo::read(&folder));
    let Some(info) = info else {
        return Finding::new("local server", Verdict::Ok, "not running; --local starts one");
    };
    match info.probe().await {
        ProbeResult::Available => {
            let found = format!("{} (process {})", info.url, info.pid);
            Finding::new("local server", Verdict::Ok, found)
        }
        ProbeResult::KeyRejected => {
            // A key file that cannot be used is the cause.
            if let Err(failure) = info.key() {
                return Finding { verdict: Verdict::Warning, ..failed("local server", &failure) };
            }
            let found = info.key_rejected();
            Finding::new("local server", Verdict::Warning, found).advice(KEY_REJECTED_HINT)
        }
        ProbeResult::Unavailable => {
            let found = format!("{} does not respond (process {})", info.url, info.pid);
            Finding::new("local server", Verdict::Warning, found)
                .advice("No action is needed: the server was killed, and the next start replaces its server.json.")
        }
    }
}
