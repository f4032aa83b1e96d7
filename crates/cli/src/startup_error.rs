//! Messages and hints for a server that did not start.

use std::io::ErrorKind;

use tinkex_server::{StartAction, StartError, TlsError};

use crate::error::{CommandError, Exit};

/// Command that starts the server. Decides which options a hint may mention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starter {
    /// `tinkex serve`.
    Serve,
    /// Any command with `--local`.
    Local,
}

/// Converts an error of [`Server::start`](tinkex_server::Server::start), with a hint for the command
/// that started the server.
pub(crate) fn startup_error(error: &StartError, starter: Starter) -> CommandError {
    let exit = match error {
        StartError::UnprotectedAddress(_)
        | StartError::EmptyApiKey
        | StartError::InvalidOrigin(_)
        | StartError::UnknownModel { .. } => Exit::Usage,
        // Models that are missing, damaged or not supported.
        _ if error.model_hint().is_some() => Exit::Rejected,
        _ => Exit::Failed,
    };
    let message = format!("cannot start the server: {error}");
    CommandError::new(exit, message).hint(hint(error, starter))
}

fn hint(error: &StartError, starter: Starter) -> String {
    let other_folder = match starter {
        Starter::Serve => "choose another data folder (--data-dir DIR)",
        Starter::Local => "choose another data folder (TINKEX_DATA_DIR=DIR)",
    };
    if let Some(hint) = error.model_hint().or_else(|| error.api_key_hint()) {
        return hint;
    }
    match (error, starter) {
        (StartError::UnprotectedAddress(_), _) => "Omit --no-key or --host.".to_owned(),
        (StartError::EmptyApiKey, _) => {
            "Write an API key that starts with tml- into the file of --api-key-file.".to_owned()
        }
        (StartError::InvalidOrigin(_), _) => {
            "Pass an origin such as --allow-origin http://localhost:3000.".to_owned()
        }
        (StartError::Tls(error), _) => tls_hint(error).to_owned(),
        (StartError::UnknownModel { name, .. }, _) => {
            format!("Pass the name of a served model, or serve it with --model {name}=PATH.")
        }
        (StartError::DataDirInUse(_), Starter::Serve) => {
            format!("Use the running server with --local, or {other_folder}.")
        }
        (StartError::DataDirInUse(_), Starter::Local) => {
            format!("Wait for the other process to end, or {other_folder}.")
        }
        (StartError::MissingModel { name, .. }, Starter::Serve) => format!(
            "Serve the model (--model {name}=FOLDER), fail its pending requests (--fail-pending), \
             or {other_folder}."
        ),
        (StartError::MissingModel { name, .. }, Starter::Local) => format!(
            "Run `tinkex serve --model {name}=FOLDER`, restore the model in the Hugging Face \
             cache, or {other_folder}."
        ),
        (StartError::MissingUpstream { name, .. }, Starter::Serve) => format!(
            "Name the upstream as before (--upstream {name}=URL; the URL may be a new one), fail \
             its pending requests (--fail-pending), or {other_folder}."
        ),
        (StartError::MissingUpstream { name, .. }, Starter::Local) => format!(
            "Run `tinkex serve --upstream {name}=URL` and use that server, or {other_folder}."
        ),
        (StartError::Io { action, source, .. }, _) => {
            io_hint(*action, source.kind(), starter, other_folder)
        }
        _ => format!("Fix the cause, or {other_folder}."),
    }
}

fn tls_hint(error: &TlsError) -> &'static str {
    match error {
        TlsError::Read { source, .. } if source.kind() == ErrorKind::PermissionDenied => {
            "Give the key file to the user that runs the server, and run `chmod 600` on it."
        }
        TlsError::Pair { .. } => {
            "Pass the key for which the certificate was issued. The server's certificate is the \
             first of the file."
        }
        _ => "Pass PEM files: --tls-cert FILE with the certificates, --tls-key FILE with the key.",
    }
}

fn io_hint(action: StartAction, kind: ErrorKind, starter: Starter, other_folder: &str) -> String {
    match (action, kind) {
        (StartAction::Listen, _) if starter == Starter::Local => {
            "Allow programs on this machine to listen on 127.0.0.1.".to_owned()
        }
        (StartAction::Listen, ErrorKind::AddrInUse) => {
            "Choose another port (--port PORT), or any free port (--port 0).".to_owned()
        }
        (StartAction::Listen, ErrorKind::PermissionDenied) => {
            "Choose a port above 1023 (--port 8080); lower ones need privileges.".to_owned()
        }
        (StartAction::Listen, ErrorKind::AddrNotAvailable) => {
            "Pass an address of this machine (--host ADDRESS).".to_owned()
        }
        (StartAction::Listen, _) => {
            "Check the network of this machine, --host and --port.".to_owned()
        }
        (StartAction::Spawn, _) => {
            "Raise the system's limit of threads (ulimit -u), or end other programs.".to_owned()
        }
        (StartAction::Lock, ErrorKind::Unsupported) => {
            format!("Keep the data on a file system that supports file locks: {other_folder}.")
        }
        (_, ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            format!("Free disk space, or {other_folder}.")
        }
        (_, ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
            format!("Grant write permission on the folder, or {other_folder}.")
        }
        (StartAction::Read, _) => {
            format!("Keep a copy of the folder so that it can be repaired, and {other_folder}.")
        }
        _ => format!("Check the folder, or {other_folder}."),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io;

    use tinkex_server::{Server, ServerOptions};

    use super::*;

    async fn all_errors() -> Vec<StartError> {
        let data = tempfile::tempdir().unwrap();
        let mut options = ServerOptions::new(data.path());
        options.models = vec![("a".to_owned(), "no-such-folder".into())];
        let no_model = Server::start(options).await.unwrap_err();
        let io = |action, target: &str, kind: io::ErrorKind| StartError::Io {
            action,
            target: target.to_owned(),
            source: kind.into(),
        };
        vec![
            StartError::UnprotectedAddress(([0, 0, 0, 0], 8080).into()),
            StartError::EmptyApiKey,
            StartError::ApiKeyFile {
                path: "/data/key".into(),
                source: ErrorKind::PermissionDenied.into(),
            },
            StartError::InvalidOrigin("*".to_owned()),
            StartError::UnknownModel {
                action: "quantize",
                name: "other".to_owned(),
                available: "a, b".to_owned(),
            },
            StartError::InvalidTokenizer { name: "a".to_owned(), folder: "/tokenizer".into() },
            StartError::DataDirInUse("/data".into()),
            StartError::MissingModel {
                name: "Qwen/Qwen3-8B".to_owned(),
                run: Some("s:train:0".to_owned()),
                requests: 3,
            },
            StartError::MissingUpstream {
                name: "gpu".to_owned(),
                run: Some("s:train:0".to_owned()),
                runs: 2,
                requests: 5,
            },
            no_model,
            io(StartAction::Create, "/data", ErrorKind::PermissionDenied),
            io(StartAction::Create, "/data", ErrorKind::ReadOnlyFilesystem),
            io(StartAction::Create, "/data", ErrorKind::StorageFull),
            io(StartAction::Create, "/data", ErrorKind::NotADirectory),
            io(StartAction::Lock, "/data/lock", ErrorKind::Unsupported),
            io(StartAction::Read, "/data", ErrorKind::InvalidData),
            io(StartAction::Listen, "127.0.0.1:80", ErrorKind::PermissionDenied),
            io(StartAction::Listen, "127.0.0.1:8080", ErrorKind::AddrInUse),
            io(StartAction::Listen, "10.1.2.3:8080", ErrorKind::AddrNotAvailable),
            io(StartAction::Listen, "127.0.0.1:8080", ErrorKind::OutOfMemory),
            io(StartAction::Spawn, "the worker thread", ErrorKind::WouldBlock),
        ]
    }

    /// Every error has a hint, which mentions only options of the command that started the server.
    #[tokio::test]
    async fn hints_match_the_snapshot() {
        let mut text = String::new();
        for error in all_errors().await {
            writeln!(text, "{}", startup_error(&error, Starter::Serve)).unwrap();
            for starter in [Starter::Serve, Starter::Local] {
                let hint = hint(&error, starter);
                let options = ["--data-dir", "--host", "--port", "--api-key"];
                let misleading = starter == Starter::Local
                    && !matches!(
                        error,
                        StartError::UnprotectedAddress(_) | StartError::EmptyApiKey
                    )
                    && options.iter().any(|option| hint.contains(option));
                assert!(!misleading, "{hint}");
                writeln!(text, "  {starter:?}: {hint}").unwrap();
            }
        }
        let known = include_str!("../tests/it/snapshots/startup_errors.txt");
        assert!(text == known, "tests/it/snapshots/startup_errors.txt should be\n{text}");
    }
}
