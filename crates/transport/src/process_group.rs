//! [`KillOnDrop`]: a child process that is killed together with the processes that it started.

use std::io;
use std::process::ExitStatus;

use tokio::process::Child;

/// A process that leads a process group. Dropping the value before the process has ended kills the
/// whole group; on Windows it kills the process only.
#[derive(Debug)]
pub struct KillOnDrop {
    child: Child,
    /// Id of the group. `None` once the leader was waited for, because the system may then reuse
    /// the id.
    #[cfg(unix)]
    group: Option<rustix::process::Pid>,
}

impl KillOnDrop {
    /// Takes over `child`, which must lead a process group of its own.
    pub fn new(child: Child) -> Self {
        #[cfg(unix)]
        let group = child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed()));
        Self {
            child,
            #[cfg(unix)]
            group,
        }
    }

    /// Waits for the end of the process. Afterwards dropping the value kills nothing: processes
    /// that the leader left running, such as agents that cache a credential, are not killed.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait().await?;
        #[cfg(unix)]
        {
            self.group = None;
        }
        Ok(status)
    }
}

#[cfg(unix)]
impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(group) = self.group {
            // Fails only if all processes of the group have ended.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
}
