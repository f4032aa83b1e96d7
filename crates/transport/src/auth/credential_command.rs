//! Runs the shell command of a [`Credential::Command`](crate::config::Credential::Command).

use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use futures_util::future::try_join;
use tinkex_wire::Secret;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;
use tokio::time::timeout;

use crate::error::{Error, ErrorKind};
use crate::process_group::KillOnDrop;

/// Maximum run time of a credential command, after which it is killed.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a shell command and returns its standard output without surrounding white space. The
/// command and the processes that it started are killed after [`COMMAND_TIMEOUT`], and when the
/// future is dropped.
pub(crate) async fn run(command: &str) -> Result<Secret, Error> {
    let failed = |cause: String| {
        Error::new(ErrorKind::Auth, format!("credential command failed: {cause}"))
            .with_hint("Run the command in TINKER_CREDENTIAL_CMD in a shell to see why it fails.")
    };
    let seconds = COMMAND_TIMEOUT.as_secs();
    let output = timeout(COMMAND_TIMEOUT, output(command))
        .await
        .map_err(|_| failed(format!("it did not end within {seconds} s and was killed")))?
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(failed(format!("{}: {}", output.status, stderr.trim())));
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    match printed.trim() {
        "" => Err(failed("no output".to_owned())),
        credential => Ok(credential.into()),
    }
}

/// Exit status and output of a command.
struct CommandOutput {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// Runs a shell command. Returns when the command has ended and all processes that it started have
/// closed its standard output.
async fn output(command: &str) -> io::Result<CommandOutput> {
    let (shell, flag) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };
    let mut command_line = Command::new(shell);
    command_line
        .args([flag, command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    #[cfg(unix)]
    command_line.process_group(0);
    let mut child = command_line.spawn()?;
    let stdout = child.stdout.take();
    let stderr = child.stderr.take();
    let mut group = KillOnDrop::new(child);
    let (stdout, stderr) = try_join(read(stdout), read(stderr)).await?;
    let status = group.wait().await?;
    Ok(CommandOutput { status, stdout, stderr })
}

async fn read(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::pin::pin;

    use tokio::task::spawn_blocking;

    use super::*;

    #[tokio::test]
    async fn a_command_must_succeed_and_print_something() {
        assert_eq!(run("printf ' tml-x\\n'").await.unwrap().expose(), "tml-x");
        let failed = run("echo reason >&2; exit 3").await.unwrap_err();
        assert!(failed.to_string().contains("reason"), "{failed}");
        assert!(run("true").await.is_err());
    }

    /// The grandchild holds a named pipe open: the end of the file proves that it has exited.
    #[tokio::test]
    async fn processes_that_a_command_started_are_killed_at_its_timeout() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for timed_out in [true, false] {
            let grandchild = format!("(echo up; exec tail -f /dev/null) > {}", pipe.display());
            let command = format!("{grandchild} & wait");
            let opened = pipe.clone();
            let first_byte = spawn_blocking(move || {
                let mut pipe = File::open(opened).unwrap();
                pipe.read_exact(&mut [0]).unwrap();
                pipe
            });
            let mut pipe = {
                let mut running = pin!(run(&command));
                let pipe = tokio::select! {
                    pipe = first_byte => pipe.unwrap(),
                    ended = &mut running => panic!("the command ended early: {ended:?}"),
                };
                if timed_out {
                    tokio::time::pause();
                    tokio::time::advance(COMMAND_TIMEOUT).await;
                    let error = running.await.unwrap_err();
                    tokio::time::resume();
                    assert_eq!(error.kind(), ErrorKind::Auth);
                    assert!(error.to_string().contains("60 s"), "{error}");
                }
                pipe
            };
            let rest = spawn_blocking(move || pipe.read_to_end(&mut Vec::new()));
            assert_eq!(rest.await.unwrap().unwrap(), "p\n".len());
        }
    }
}
