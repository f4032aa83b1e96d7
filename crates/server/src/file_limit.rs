//! Limit on open files of the process, and the number of connections that fits below it.

/// Number of open files kept for the database, payloads, weights and the log.
const RESERVED: usize = 256;

/// Raises the process's soft limit on open files to the hard limit, and returns the number of
/// connections that the server may accept: at least 16. A connection needs two files: its socket,
/// and the file that its response is read from.
///
/// Without the [`RESERVED`] files, clients that open many connections would make the server fail to
/// open the files of a model.
pub(crate) fn max_connections() -> usize {
    raise().map_or(usize::MAX, connections_below)
}

/// Returns the number of connections for a limit of `files` open files.
fn connections_below(files: u64) -> usize {
    let files = usize::try_from(files).unwrap_or(usize::MAX);
    (files.saturating_sub(RESERVED) / 2).max(16)
}

/// Raises the soft limit and returns it; `None` if it is unlimited.
#[cfg(unix)]
fn raise() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return limit.current;
    }
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        // Some systems have a lower limit than the hard limit states.
        Err(_) => limit.current,
    }
}

#[cfg(not(unix))]
fn raise() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_the_server() {
        assert_eq!(connections_below(1_024), 384);
        assert_eq!(connections_below(1 << 20), 524_160);
        assert_eq!(connections_below(100), 16);
    }

    #[cfg(unix)]
    #[test]
    fn the_soft_limit_is_raised_to_the_hard_limit() {
        use rustix::process::{Resource, getrlimit};

        max_connections();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
