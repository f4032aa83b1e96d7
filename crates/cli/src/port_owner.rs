//! Users who listen on a port of this machine, from the tables of the kernel.

use std::path::Path;

/// Returns whether another user than the owner of `key_file` or root listens on the port. A program
/// of that user would receive the key in the file, for example after a server was killed.
///
/// False on platforms without `/proc`, and if no program listens on the port.
#[cfg(unix)]
pub(crate) fn belongs_to_another_user(port: u16, key_file: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(metadata) = std::fs::metadata(key_file) else { return false };
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let tables = tables.map(|table| std::fs::read_to_string(table).unwrap_or_default());
    tables
        .iter()
        .flat_map(|table| listening_users(table, port))
        .any(|user| user != metadata.uid() && user != 0)
}

#[cfg(not(unix))]
pub(crate) fn belongs_to_another_user(_: u16, _: &Path) -> bool {
    false
}

/// Returns the ids of the users that listen on a port, from the text of `/proc/net/tcp` or
/// `/proc/net/tcp6`.
#[cfg(unix)]
fn listening_users(table: &str, port: u16) -> impl Iterator<Item = u32> + '_ {
    const LISTEN: &str = "0A";
    // Number, local address, remote address, state, queues, timer, retransmissions, user, …
    table.lines().skip(1).filter_map(move |line| {
        let mut fields = line.split_whitespace().skip(1);
        let (_, local_port) = fields.next()?.rsplit_once(':')?;
        let listens = fields.nth(1)? == LISTEN;
        let user = fields.nth(3)?.parse().ok()?;
        (listens && u16::from_str_radix(local_port, 16).ok()? == port).then_some(user)
    })
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_found_by_port() {
        let table = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 40 1
   1: 0100007F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001        0 41 1
   2: 0100007F:1F90 0100007F:C3A2 01 00000000:00000000 00:00000000 00000000  1002        0 42 1
   3: truncated
";
        assert_eq!(listening_users(table, 8080).collect::<Vec<_>>(), [1000]);
        assert_eq!(listening_users(table, 8081).collect::<Vec<_>>(), [1001]);
        assert_eq!(listening_users(table, 8082).count(), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_socket_of_this_user_belongs_to_no_other() {
        use std::os::unix::fs::MetadataExt as _;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!belongs_to_another_user(port, file.path()));
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let user = file.as_file().metadata().unwrap().uid();
        assert_eq!(listening_users(&table, port).collect::<Vec<_>>(), [user]);
    }
}
