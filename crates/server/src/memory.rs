//! Memory that this process may use: the machine's RAM, or less if a control group or a limit on the
//! address space limits it.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the memory that this process may use, in bytes: the smallest of the machine's RAM, the
/// limits of the process's control groups and their parents, and the limit on the process's address
/// space (`ulimit -v`). `None` if it is not known: on platforms other than Linux, or without `/proc`.
#[must_use]
pub fn process_memory() -> Option<u64> {
    memory_below(Path::new("/"))
}

/// Reads `proc` and the control groups below `root`.
fn memory_below(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let ram = kibibytes.checked_mul(1_024)?;
    let limits = [control_group_limit(root), address_space_limit(root)];
    Some(limits.into_iter().flatten().fold(ram, u64::min))
}

/// Returns the soft limit on the address space of the process; `None` if it is unlimited.
fn address_space_limit(root: &Path) -> Option<u64> {
    let limits = fs::read_to_string(root.join("proc/self/limits")).ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    limit.split_whitespace().next()?.parse().ok()
}

/// Version of the control group interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// Name of the file that contains the memory limit of a group.
    fn limit_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.limit_in_bytes",
            Self::V2 => "memory.max",
        }
    }
}

/// Returns the smallest memory limit of the process's control groups and their parents. A machine
/// may mount both versions; the memory controller belongs to one of them.
fn control_group_limit(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let limits = mounts.lines().filter_map(Mount::parse).filter_map(|mount| {
        let group = groups.lines().find_map(|line| group_path(line, mount.version))?;
        mount.smallest_limit(root, group)
    });
    limits.min()
}

/// Returns the path in a line of `/proc/self/cgroup` (`ID:CONTROLLERS:PATH`) if the line is about
/// the memory controller of this version. Version 2 has one line, with the id 0 and no controllers.
fn group_path(line: &str, version: Version) -> Option<&str> {
    let (id, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let found = match version {
        Version::V1 => controllers.split(',').any(|name| name == "memory"),
        Version::V2 => id == "0" && controllers.is_empty(),
    };
    found.then_some(path)
}

/// A mounted hierarchy of control groups.
struct Mount {
    version: Version,
    /// Path of the group that is mounted. In a container it may be the container's own group.
    group: PathBuf,
    folder: PathBuf,
}

impl Mount {
    /// Parses a line of `/proc/self/mountinfo`. Returns `None` for other file systems, and for
    /// version 1 hierarchies without the memory controller.
    fn parse(line: &str) -> Option<Self> {
        // ID PARENT MAJOR:MINOR ROOT FOLDER OPTIONS [TAG…] - TYPE SOURCE SUPER_OPTIONS
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let group = unescape(fields.next()?);
        let folder = unescape(fields.next()?);
        let mut fields = file_system.split(' ');
        let version = match fields.next()? {
            "cgroup2" => Version::V2,
            "cgroup" if fields.nth(1)?.split(',').any(|option| option == "memory") => Version::V1,
            _ => return None,
        };
        Some(Self { version, group: group.into(), folder: folder.into() })
    }

    /// Returns the smallest limit of the process's group and its parents, up to the mounted group.
    /// A group outside of the mount, as with some namespaces, is replaced by the mounted group.
    fn smallest_limit(&self, root: &Path, group: &str) -> Option<u64> {
        let mounted = root.join(self.folder.strip_prefix("/").unwrap_or(&self.folder));
        let below = Path::new(group).strip_prefix(&self.group).unwrap_or(Path::new(""));
        let is_plain =
            below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let below = if is_plain { below } else { Path::new("") };
        let limit = |group: &Path| -> Option<u64> {
            let file = mounted.join(group).join(self.version.limit_file());
            // Version 2 has `max` for no limit, version 1 a number above any memory.
            fs::read_to_string(file).ok()?.trim().parse().ok()
        };
        below.ancestors().filter_map(limit).min()
    }
}

/// Replaces the escapes of `/proc/self/mountinfo`: a backslash and three octal digits.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_at_checked(3).map(|(code, rest)| (u8::from_str_radix(code, 8), rest)) {
            Some((Ok(byte), rest)) if byte.is_ascii() => {
                plain.push(char::from(byte));
                plain.push_str(rest);
            }
            _ => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const UNLIMITED_V1: &str = "9223372036854771712\n";
    const V2_MOUNT: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1_MOUNT: &str = "35 25 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

    /// Creates the files of a machine with 16 GiB in a temporary folder.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let meminfo = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\n";
        for (path, text) in [("proc/meminfo", meminfo)].iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn memory(files: &[(&str, &str)]) -> Option<u64> {
        memory_below(machine(files).path())
    }

    #[test]
    fn without_control_groups_it_is_the_ram() {
        assert_eq!(memory(&[]), Some(16 * GIB));
        assert_eq!(memory(&[("proc/self/cgroup", "0::/\n")]), Some(16 * GIB));
        for meminfo in ["", "MemTotal: many kB\n", "MemTotal: 99999999999999999999 kB\n"] {
            assert_eq!(memory(&[("proc/meminfo", meminfo)]), None, "{meminfo}");
        }
        assert_eq!(memory_below(Path::new("/nonexistent")), None);
    }

    #[test]
    fn a_parent_limits_a_version_2_group() {
        let files = [
            ("proc/self/cgroup", "0::/user.slice/app.scope\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/user.slice/app.scope/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "2147483648\n"),
        ];
        assert_eq!(memory(&files), Some(2 * GIB));
        let mut own = files;
        own[2].1 = "1073741824\n";
        assert_eq!(memory(&own), Some(GIB));
        let mut neither = files;
        neither[3].1 = "max\n";
        assert_eq!(memory(&neither), Some(16 * GIB));
    }

    #[test]
    fn version_1_limits_apply_to_the_memory_controller() {
        let files = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/jobs/1\n4:memory:/jobs/1\n0::/unified\n"),
            (
                "proc/self/mountinfo",
                "34 25 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                 35 25 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            ),
            ("sys/fs/cgroup/memory/jobs/1/memory.limit_in_bytes", "3221225472\n"),
            ("sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", UNLIMITED_V1),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED_V1),
            ("sys/fs/cgroup/cpu/jobs/1/memory.limit_in_bytes", "1\n"),
        ];
        assert_eq!(memory(&files), Some(3 * GIB));
        let mut unlimited = files;
        unlimited[2].1 = UNLIMITED_V1;
        assert_eq!(memory(&unlimited), Some(16 * GIB));
    }

    #[test]
    fn the_group_of_a_container_is_found() {
        // With its own control group namespace, the container sees its group as the root.
        let namespaced = [
            ("proc/self/cgroup", "0::/\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/memory.max", "4294967296\n"),
        ];
        assert_eq!(memory(&namespaced), Some(4 * GIB));
        // Without its own namespace, the container's group is mounted, and the process's path
        // starts with the path of that group.
        let mounted = [
            ("proc/self/cgroup", "4:memory:/docker/ab/inner\n"),
            (
                "proc/self/mountinfo",
                "35 25 0:30 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n"),
            ("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", UNLIMITED_V1),
        ];
        assert_eq!(memory(&mounted), Some(4 * GIB));
        // A path outside of the mount.
        let outside = [
            ("proc/self/cgroup", "0::/../other\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/memory.max", "5368709120\n"),
            ("sys/fs/other/memory.max", "1\n"),
        ];
        assert_eq!(memory(&outside), Some(5 * GIB));
    }

    #[test]
    fn the_smaller_of_both_versions_applies() {
        let mounts = format!("{V1_MOUNT}{V2_MOUNT}not a mount\n");
        let files = [
            ("proc/self/cgroup", "4:memory:/a\n0::/b\n"),
            ("proc/self/mountinfo", &*mounts),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "6442450944\n"),
            ("sys/fs/cgroup/b/memory.max", "7516192768\n"),
        ];
        assert_eq!(memory(&files), Some(6 * GIB));
    }

    #[test]
    fn a_limit_on_the_address_space_applies() {
        let limits = |soft: &str| {
            format!(
                "Limit                     Soft Limit           Hard Limit           Units\n\
                 Max data size             1                    1                    bytes\n\
                 Max address space         {soft:<20} unlimited            bytes\n"
            )
        };
        let group = [
            ("proc/self/cgroup", "0::/a\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/a/memory.max", "2147483648\n"),
        ];
        let with = |soft: &str| {
            let limits = limits(soft);
            memory(&[&group[..], &[("proc/self/limits", &*limits)]].concat())
        };
        assert_eq!(with("1073741824"), Some(GIB));
        assert_eq!(with("4294967296"), Some(2 * GIB));
        assert_eq!(with("unlimited"), Some(2 * GIB));
    }

    #[test]
    fn escapes_in_mount_points_are_replaced() {
        for (escaped, plain) in
            [(r"/a\040b", "/a b"), (r"\134", r"\"), (r"/a\9", r"/a\9"), (r"/a\", r"/a\")]
        {
            assert_eq!(unescape(escaped), plain);
        }
    }
}
