//! The things that are looked at.

use std::path::Path;
use std::time::Duration;

use tinkex::{CredentialStore, Env, ErrorKind, ServiceClient, Timestamp};
use tokio::time::{Instant, timeout};

use crate::error::NO_KEY;
use crate::format;
use crate::local::{self, ANOTHER_KEY, ProbeResult, ServerInfo};
use crate::output::Shell;

use super::{Finding, Verdict};

/// Nobody waits longer than this for a doctor.
const PATIENCE: Duration = Duration::from_secs(10);
/// Signed addresses and keys that end soon suffer from more.
const SKEW: i64 = 30;
/// Less than this is too little for a model.
const LITTLE_DISK: u64 = 1 << 30;

/// Looks at everything.
pub(super) async fn all(shell: &mut Shell<'_>) -> Vec<Finding> {
    let env = shell.environment.variables.clone();
    let mut findings = vec![version(), configuration(shell, &env)];
    findings.extend(data_folder(&env));
    findings.push(local_server(&env).await);
    if let Err(failure) = shell.start_local().await {
        findings.push(Finding::new("server", Verdict::Wrong, failure.to_string()));
        return findings;
    }
    let client = match shell.settings.client_for_one_try(shell.environment) {
        Ok(client) => {
            findings.push(credential(shell, &env));
            client
        }
        Err(failure) => {
            let wrong = Finding::new("credential", Verdict::Wrong, failure.to_string());
            findings.push(wrong.advice(NO_KEY));
            return findings;
        }
    };
    findings.extend(server(&client).await);
    findings
}

fn version() -> Finding {
    let found = format!("tinkex {}, protocol 0.36", env!("CARGO_PKG_VERSION"));
    Finding::new("version", Verdict::Ok, found)
}

/// The settings were read, or this would not run.
fn configuration(shell: &Shell<'_>, env: &Env) -> Finding {
    let url = match &shell.settings.base_url {
        _ if shell.settings.local => "the server on this machine".to_owned(),
        Some(url) => url.to_string(),
        None => tinkex::BaseUrl::production().to_string(),
    };
    let finding = Finding::new("configuration", Verdict::Ok, url.clone());
    if url.starts_with("http://") && !is_here(&url) {
        let advice = "the key crosses the network in the clear; use https";
        return Finding { verdict: Verdict::Warning, ..finding }.advice(advice);
    }
    if let Some(proxy) = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]
        .into_iter()
        .find(|name| env.get(name).is_some())
    {
        return Finding { found: format!("{url}, through the proxy in {proxy}"), ..finding };
    }
    finding
}

fn is_here(url: &str) -> bool {
    ["http://127.", "http://localhost", "http://[::1]"].iter().any(|here| url.starts_with(here))
}

fn credential(shell: &Shell<'_>, env: &Env) -> Finding {
    let found = if shell.settings.local {
        "none is needed on this machine".to_owned()
    } else if shell.globals.api_key_file.is_some() || shell.globals.api_key.is_some() {
        "given on the command line".to_owned()
    } else if env.get("TINKER_API_KEY").is_some() {
        "from TINKER_API_KEY".to_owned()
    } else if env.get("TINKER_CREDENTIAL_CMD").is_some() {
        "from the command in TINKER_CREDENTIAL_CMD".to_owned()
    } else {
        match CredentialStore::load(env)
            .ok()
            .and_then(|store| store.default_id().map(str::to_owned))
        {
            Some(id) => format!("stored ({id})"),
            None => "found".to_owned(),
        }
    };
    Finding::new("credential", Verdict::Ok, found)
}

/// Whether the server answers, takes the key, and agrees about the time.
async fn server(client: &ServiceClient) -> Vec<Finding> {
    let url = client.base_url().clone();
    let started = Instant::now();
    let asked = timeout(PATIENCE, client.server_capabilities()).await;
    let took = format!("{} ms", started.elapsed().as_millis());
    let answer = match asked {
        Ok(answer) => answer,
        Err(_) => {
            let wrong = Finding::new("server", Verdict::Wrong, format!("{url} does not answer"));
            return vec![wrong.advice("check the network, the proxy and TINKER_BASE_URL")];
        }
    };
    match answer {
        Ok(capabilities) => {
            let models = capabilities.supported_models.len();
            let has = format::count(models, "model");
            let found = format!("{url} answers in {took} and has {has}");
            let mut findings = vec![Finding::new("server", Verdict::Ok, found)];
            if models == 0 {
                findings.push(
                    Finding::new("models", Verdict::Warning, "none")
                        .advice("ask whoever runs the server"),
                );
            }
            findings.push(clock(client).await);
            findings
        }
        Err(error) => {
            let (what, advice) = match error.kind() {
                ErrorKind::Auth | ErrorKind::Permission => {
                    ("credential", "the server does not take the key: tinkex auth login")
                }
                ErrorKind::Connect | ErrorKind::Timeout => {
                    ("server", "check the network, the proxy and TINKER_BASE_URL")
                }
                ErrorKind::Billing => ("billing", "settle the account"),
                ErrorKind::Decode | ErrorKind::NotFound => {
                    ("server", "this is no Tinker API; check TINKER_BASE_URL")
                }
                _ => ("server", "try again later"),
            };
            let said = std::error::Error::source(&error).map(|source| format!(": {source}"));
            let found = format!("{error}{}", said.unwrap_or_default());
            vec![Finding::new(what, Verdict::Wrong, found).advice(advice)]
        }
    }
}

/// How far the clocks are apart: what the server says of a thing that was made just now.
async fn clock(client: &ServiceClient) -> Finding {
    let unknown = || Finding::new("clock", Verdict::Unknown, "the server does not tell the time");
    let before = Timestamp::now();
    let asked = timeout(PATIENCE, client.server_time()).await;
    let Ok(Ok(Some(server))) = asked else { return unknown() };
    let after = Timestamp::now();
    let middle = before.unix_micros().midpoint(after.unix_micros());
    let apart = (server.unix_micros() - middle) / 1_000_000;
    let found = match apart {
        -1..=1 => "as the server's".to_owned(),
        apart if apart > 0 => format!("{apart} s behind the server's"),
        apart => format!("{} s before the server's", -apart),
    };
    if apart.abs() > SKEW {
        return Finding::new("clock", Verdict::Wrong, found)
            .advice("set this machine's clock; signed addresses and tokens fail otherwise");
    }
    Finding::new("clock", Verdict::Ok, found)
}

/// Whether the data folder can be used, and how much room there is.
fn data_folder(env: &Env) -> Vec<Finding> {
    let folder = match local::data_folder(env) {
        Ok(folder) => folder,
        Err(failure) => {
            return vec![
                Finding::new("data folder", Verdict::Warning, failure.to_string())
                    .advice("only --local needs it; set HOME or TINKEX_DATA_DIR"),
            ];
        }
    };
    let shown = folder.display();
    // The folder, or the first above it that is there.
    let there = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    let mut findings = vec![if !writable(there) {
        Finding::new("data folder", Verdict::Wrong, format!("{shown} cannot be written to"))
            .advice("mend its permissions, or name another with TINKEX_DATA_DIR")
    } else if there == folder {
        let about = format!("{shown}, {} used", format::size(used(&folder)));
        Finding::new("data folder", Verdict::Ok, about)
    } else {
        Finding::new("data folder", Verdict::Ok, format!("{shown}, not used yet"))
    }];
    findings.extend(disk(there));
    findings
}

/// Bytes in a folder and those below it.
fn used(folder: &Path) -> i64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(about) if about.is_dir() => used(&entry.path()),
        Ok(about) => i64::try_from(about.len()).unwrap_or(i64::MAX),
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
    std::fs::metadata(folder).is_ok_and(|about| !about.permissions().readonly())
}

#[cfg(unix)]
fn disk(folder: &Path) -> Option<Finding> {
    let about = rustix::fs::statvfs(folder).ok()?;
    let free = about.f_bavail.saturating_mul(about.f_frsize);
    let found = format!("{} free", format::size(i64::try_from(free).unwrap_or(i64::MAX)));
    Some(if free < LITTLE_DISK {
        Finding::new("disk", Verdict::Warning, found)
            .advice("make room, or keep data elsewhere with TINKEX_DATA_DIR")
    } else {
        Finding::new("disk", Verdict::Ok, found)
    })
}

#[cfg(not(unix))]
fn disk(_: &Path) -> Option<Finding> {
    None
}

/// Whether a server runs on this machine, and its note is true.
async fn local_server(env: &Env) -> Finding {
    let note = local::data_folder(env).ok().and_then(|folder| ServerInfo::read(&folder));
    let Some(note) = note else {
        return Finding::new("local server", Verdict::Ok, "none runs; --local starts one");
    };
    match note.ask().await {
        ProbeResult::Server => {
            let found = format!("{} (process {})", note.url(), note.pid);
            Finding::new("local server", Verdict::Ok, found)
        }
        ProbeResult::WithAnotherKey => {
            Finding::new("local server", Verdict::Warning, note.refused()).advice(ANOTHER_KEY)
        }
        ProbeResult::Nobody => {
            let found = format!("{} does not answer (process {})", note.url(), note.pid);
            Finding::new("local server", Verdict::Warning, found)
                .advice("it ended without a word; the next one tidies up")
        }
    }
}
