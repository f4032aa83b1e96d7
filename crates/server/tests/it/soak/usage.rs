//! Resources that a process uses, and whether their use grows.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

/// Resources, in the order of [`Usage::values`].
const RESOURCES: [Resource; 4] = [
    Resource { name: "memory, MiB", unit: 1 << 20, factor: 1.1, extra: 16 << 20 },
    Resource { name: "file handles", unit: 1, factor: 1.0, extra: 16 },
    Resource { name: "threads", unit: 1, factor: 1.0, extra: 8 },
    // The payload file is compacted from 32 MiB on, when half of it is no longer needed.
    Resource { name: "disk, MiB", unit: 1 << 20, factor: 1.1, extra: 48 << 20 },
];

/// A resource, and how much its use may grow: to `factor` times the earlier use, plus `extra`.
struct Resource {
    name: &'static str,
    unit: u64,
    factor: f64,
    extra: u64,
}

/// Resources that a process uses at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    /// Resident memory in bytes.
    memory: u64,
    handles: u64,
    threads: u64,
    /// Size of the files in the data folder in bytes.
    disk: u64,
}

impl Usage {
    /// Reads the usage of a process and of its data folder; `None` if the process has ended.
    pub(super) fn read(pid: u32, data: Option<&Path>) -> Option<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| -> Option<u64> {
            let value = status.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim_end_matches("kB").trim().parse().ok()
        };
        let handles = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
        Some(Self {
            memory: field("VmRSS:")? * 1024,
            handles: handles as u64,
            threads: field("Threads:")?,
            disk: data.map_or(0, folder_size),
        })
    }

    fn values(self) -> [u64; 4] {
        [self.memory, self.handles, self.threads, self.disk]
    }
}

/// Returns the size of all files below a folder. Files may be removed meanwhile.
fn folder_size(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => folder_size(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// Usage of one process over time.
#[derive(Debug, Default)]
pub(super) struct UsageHistory(Vec<(Duration, Usage)>);

impl UsageHistory {
    pub(super) fn push(&mut self, at: Duration, usage: Usage) {
        self.0.push((at, usage));
    }

    /// Compares the medians of the first and the last third of the time between `warm_up` and
    /// `end`. Appends one line for each resource to `report`; returns the resources that grow.
    pub(super) fn compare(
        &self,
        name: &str,
        (warm_up, end): (Duration, Duration),
        report: &mut String,
    ) -> Vec<String> {
        let third = end.saturating_sub(warm_up) / 3;
        let between = |from: Duration, to: Duration| -> Vec<Usage> {
            let range = from..=to;
            self.0.iter().filter(|(at, _)| range.contains(at)).map(|(_, usage)| *usage).collect()
        };
        let early = between(warm_up, warm_up + third);
        let late = between(end - third, end);
        let mut growing = Vec::new();
        for (index, resource) in RESOURCES.iter().enumerate() {
            let value = |usage: &Usage| usage.values()[index];
            let before = median(&early, value);
            let after = median(&late, value);
            let maximum = self.0.iter().map(|(_, usage)| value(usage)).max().unwrap_or(0);
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a margin need not be exact"
            )]
            let allowed = (before as f64 * resource.factor) as u64 + resource.extra;
            let unit = resource.unit;
            writeln!(
                report,
                "{name:<18} {:<13} {:>11} {:>11} {:>9} {:>9}",
                resource.name,
                before / unit,
                after / unit,
                maximum / unit,
                allowed / unit,
            )
            .unwrap();
            if after > allowed {
                growing.push(format!("{name}: {} grew from {before} to {after}", resource.name));
            }
        }
        growing
    }
}

fn median(usages: &[Usage], value: impl Fn(&Usage) -> u64) -> u64 {
    let mut values: Vec<u64> = usages.iter().map(value).collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

#[test]
fn growth_beyond_the_margins_is_reported() {
    let seconds = Duration::from_secs;
    let history = |at: &dyn Fn(u64) -> Usage| {
        let mut history = UsageHistory::default();
        (0..100).for_each(|second| history.push(seconds(second), at(second)));
        history.compare("server", (seconds(20), seconds(100)), &mut String::new())
    };
    let flat = Usage { memory: 100 << 20, handles: 20, threads: 9, disk: 10 << 20 };
    // What grows during the warm-up does not count, and neither do outliers.
    let settled = |second| match second {
        ..20 => Usage::default(),
        50 | 90 => Usage { memory: 1 << 40, ..flat },
        _ => flat,
    };
    assert_eq!(history(&settled), [] as [&str; 0]);
    let leak = |second| Usage { memory: flat.memory + (second << 20), ..flat };
    assert_eq!(history(&leak).len(), 1);
    assert!(history(&leak)[0].starts_with("server: memory, MiB grew from 1"));
    assert_eq!(history(&|second| Usage { handles: second, ..flat }).len(), 1);
    assert_eq!(history(&|second| Usage { threads: second, ..flat }).len(), 1);
    assert_eq!(history(&|second| Usage { disk: second << 20, ..flat }).len(), 1);
}
