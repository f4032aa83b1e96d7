//! Why there is no server on this machine, and what to do about it.

use std::io::ErrorKind;

use tinkex_server::{StartAction, StartError};

use crate::error::{CommandError, Exit};

/// Who wanted a server, and so which options there are to mend it with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starter {
    /// `tinkex serve`.
    Serve,
    /// A command with `--local`.
    Local,
}

/// Why there is no server, and what to do.
pub(crate) fn startup_error(why: &StartError, starter: Starter) -> CommandError {
    let exit = match why {
        StartError::UnprotectedAddress(_) | StartError::EmptyApiKey => Exit::Usage,
        _ => Exit::Failed,
    };
    let mut message = format!("the server did not start: {why}");
    if let StartError::InvalidModel(model) = why
        && let Some(source) = std::error::Error::source(model)
    {
        message += &format!(": {source}");
    }
    CommandError::new(exit, message).hint(hint(why, starter))
}

fn hint(why: &StartError, starter: Starter) -> String {
    let elsewhere = match starter {
        Starter::Serve => "another data folder (--data-dir DIR)",
        Starter::Local => "another data folder (TINKEX_DATA_DIR=DIR)",
    };
    match (why, starter) {
        (StartError::UnprotectedAddress(_), _) => {
            "name a file with a key (--api-key-file FILE), or leave --host out".to_owned()
        }
        (StartError::EmptyApiKey, _) => {
            "write a key into the file that --api-key-file names; it begins with tml-".to_owned()
        }
        (StartError::DataDirInUse(_), Starter::Serve) => {
            format!("use the server that runs there (--local), or take {elsewhere}")
        }
        (StartError::DataDirInUse(_), Starter::Local) => {
            format!("wait for the other program to end, or take {elsewhere}")
        }
        (StartError::MissingModel { name, .. }, Starter::Serve) => {
            format!(
                "serve it again (--model {name}=FOLDER), let that work fail (--drop-undone), or \
                 take {elsewhere}"
            )
        }
        (StartError::MissingModel { name, .. }, Starter::Local) => format!(
            "run `tinkex serve --model {name}=FOLDER` beside this, put the model back into the \
             Hugging Face cache, or take {elsewhere}"
        ),
        (StartError::InvalidModel(_), Starter::Serve) => {
            "look at what --model and --hub-cache name: a \
             model is a folder with config.json, tokenizer.json and *.safetensors"
                .to_owned()
        }
        (StartError::InvalidModel(_), Starter::Local) => {
            "take the model out of the Hugging Face cache, or \
             name another cache (HF_HUB_CACHE=DIR)"
                .to_owned()
        }
        (StartError::Io { action, source, .. }, _) => {
            io_hint(*action, source.kind(), starter, elsewhere)
        }
        _ => format!("take {elsewhere}"),
    }
}

/// What to do about what the system said.
fn io_hint(action: StartAction, kind: ErrorKind, starter: Starter, elsewhere: &str) -> String {
    match (action, kind) {
        (StartAction::Listen, _) if starter == Starter::Local => {
            "programs must be able to listen on 127.0.0.1; see what on this machine forbids it"
                .to_owned()
        }
        (StartAction::Listen, ErrorKind::AddrInUse) => {
            "another program listens there; take another port (--port), or any free one (--port 0)"
                .to_owned()
        }
        (StartAction::Listen, ErrorKind::PermissionDenied) => {
            "ports below 1024 are not for everyone; take another (--port 8080)".to_owned()
        }
        (StartAction::Listen, ErrorKind::AddrNotAvailable) => {
            "this machine has no such address; see --host".to_owned()
        }
        (StartAction::Listen, _) => {
            "look at the network of this machine, and at --host and --port".to_owned()
        }
        (StartAction::Spawn, _) => {
            "the system has no thread to spare; end other programs, or raise its limit \
                         (ulimit -u)"
                .to_owned()
        }
        (StartAction::Lock, ErrorKind::Unsupported) => {
            format!("Keep the data on a file system that supports locks: take {elsewhere}")
        }
        (_, ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            format!("make room on the disk, or take {elsewhere}")
        }
        (_, ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
            format!("make the folder yours to write, or take {elsewhere}")
        }
        (StartAction::Read, _) => format!(
            "keep the folder as it is, in case it can be mended, and go on with {elsewhere}"
        ),
        _ => format!("look at the folder, or take {elsewhere}"),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io;

    use tinkex_server::{Server, ServerOptions};

    use super::*;

    async fn all() -> Vec<StartError> {
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
            StartError::DataDirInUse("/data".into()),
            StartError::MissingModel { name: "Qwen/Qwen3-8B".to_owned(), requests: 3 },
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

    /// Every reason has something to do about it, in words that fit the command.
    #[tokio::test]
    async fn hints_are_as_they_were() {
        let mut text = String::new();
        for why in all().await {
            writeln!(text, "{}", startup_error(&why, Starter::Serve)).unwrap();
            for starter in [Starter::Serve, Starter::Local] {
                let hint = hint(&why, starter);
                let options = ["--data-dir", "--host", "--port", "--api-key"];
                let misled = starter == Starter::Local
                    && !matches!(why, StartError::UnprotectedAddress(_) | StartError::EmptyApiKey)
                    && options.iter().any(|option| hint.contains(option));
                assert!(!misled, "{hint}");
                writeln!(text, "  {starter:?}: {hint}").unwrap();
            }
        }
        let known = include_str!("../tests/it/snapshots/startup_errors.txt");
        assert!(text == known, "tests/it/snapshots/startup_errors.txt should be\n{text}");
    }
}
