//! [`KillOnDrop`]: a child process that is killed together with the processes that it started.

use std::io;
use std::process::ExitStatus;

use tokio::process::Child;

/// A process that leads a process group. Kills the group when it is dropped before the process has
/// ended; on Windows, kills the process only.
pub(crate) struct KillOnDrop {
    child: Child,
    /// Id of the group. `None` once the leader was waited for: the system may reuse its id then.
    #[cfg(unix)]
    group: Option<rustix::process::Pid>,
}

impl KillOnDrop {
    pub(crate) fn new(child: Child) -> Self {
        #[cfg(unix)]
        let group = child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed()));
        Self {
            child,
            #[cfg(unix)]
            group,
        }
    }

    /// Waits for the end of the process. Processes that it leaves behind, such as agents that cache
    /// a credential, are not killed then.
    pub(crate) async fn wait(&mut self) -> io::Result<ExitStatus> {
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
