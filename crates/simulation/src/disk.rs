//! [`SimulatedDisk`]: injects faults into the server's file operations, and decides which writes
//! survive a power loss.
//!
//! The files are real files in a temporary folder. The disk observes every file operation before
//! the operation is executed ([`tinkex_files::observe_thread`]). It records what is durable: the
//! length of each file at its last flush, and the entries of each folder at its last flush. A power
//! loss removes or truncates a random part of the files and entries that are not durable. A power
//! loss does not change the database files: the simulation assumes that SQLite makes every
//! committed transaction durable.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Seek as _};
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use parking_lot::{Mutex, MutexGuard};
use tinkex_files::FileOperation;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::faults::FaultPlan;
use crate::trace::{EventTrace, event};

/// Prefix of the names of the database files. A power loss does not change them; see the module
/// documentation.
const DATABASE_PREFIX: &str = "metadata.sqlite";

/// Prefix of the name of a checkpoint whose save kills every process that executes it.
pub(crate) const POISON: &str = "poison";

/// The disk of the simulated machine. Cheap to clone.
#[derive(Clone)]
pub(crate) struct SimulatedDisk(Arc<DiskInner>);

struct DiskInner {
    root: PathBuf,
    plan: FaultPlan,
    trace: EventTrace,
    state: Mutex<DiskState>,
    /// Notified when an operation has killed the process.
    killed: Notify,
}

struct DiskState {
    rng: Rng,
    /// Time at which faults end.
    calm_at: Instant,
    /// Whether the process has been killed. No operation has an effect until the process is
    /// restarted.
    dead: bool,
    full_until: Option<Instant>,
    /// Whether the oracle is inspecting the server. Operations then always succeed.
    inspected: bool,
    /// Durable length of each file, by inode.
    lengths: HashMap<u64, u64>,
    /// Parts of files that a failed flush has dropped, by inode: a power loss clears them, whatever
    /// was flushed since.
    dropped: HashMap<u64, Vec<Range<u64>>>,
    /// Durable entries of each folder, by inode of the folder: name and inode.
    entries: HashMap<u64, BTreeMap<String, u64>>,
    /// Hard links to files that a rename replaced, until the rename is durable: link and replaced
    /// path.
    replaced: Vec<(PathBuf, PathBuf)>,
    links: u64,
    /// Number of consecutive kills at a write while a suspect was executed.
    suspect_kills: u32,
}

/// Maximum number of consecutive kills at a write while the server executes a suspect. The server
/// cannot distinguish more of them from a request that kills every process.
const MAX_SUSPECT_KILLS: u32 = 2;

/// File in which the server records that it executes a suspect.
const CRASH_RECORD: &str = "passes/crashes.json";

impl SimulatedDisk {
    pub(crate) fn new(root: &Path, plan: &FaultPlan, seed: u64, trace: EventTrace) -> Self {
        let state = DiskState {
            rng: Rng::with_seed(seed),
            calm_at: Instant::now() + plan.duration,
            dead: false,
            full_until: None,
            inspected: false,
            lengths: HashMap::new(),
            dropped: HashMap::new(),
            entries: HashMap::new(),
            replaced: Vec::new(),
            links: 0,
            suspect_kills: 0,
        };
        let root = root.to_owned();
        let plan = plan.clone();
        let inner =
            DiskInner { root, plan, trace, state: Mutex::new(state), killed: Notify::new() };
        Self(Arc::new(inner))
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.0.state.lock()
    }

    /// Waits until an operation has killed the process.
    pub(crate) async fn killed(&self) {
        while !self.is_dead() {
            self.0.killed.notified().await;
        }
    }

    /// Kills the process: from now on, no operation has an effect.
    pub(crate) fn kill(&self) {
        self.lock().dead = true;
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.lock().dead
    }

    /// Ends all faults.
    pub(crate) fn calm(&self) {
        let mut state = self.lock();
        state.calm_at = Instant::now();
    }

    /// Allows a restarted process to use the disk.
    pub(crate) fn revive(&self) {
        self.lock().dead = false;
    }

    /// Makes the disk full for the duration `time`.
    pub(crate) fn fill(&self, time: Duration) {
        event!(self.0.trace, "disk: full for {time:.0?}");
        self.0.trace.count("full disk");
        self.lock().full_until = Some(Instant::now() + time);
    }

    /// Changes one byte of a file with payloads or weights. Returns whether there was such a file.
    pub(crate) fn damage(&self) -> bool {
        let mut state = self.lock();
        let mut files = vec![self.0.root.join("payloads")];
        for folder in list(&self.0.root.join("weights")) {
            files.extend(list(&folder));
        }
        files.retain(|path| fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() > 0));
        if files.is_empty() {
            return false;
        }
        let path = &files[state.rng.usize(0..files.len())];
        let Ok(mut bytes) = fs::read(path) else { return false };
        let at = state.rng.usize(0..bytes.len());
        bytes[at] ^= 1 << state.rng.u32(0..8);
        event!(self.0.trace, "disk: byte {at} of {} is damaged", shown(path));
        self.0.trace.count("damaged byte");
        // Overwrites the file in place: its inode is the same.
        fs::write(path, bytes).is_ok()
    }

    /// Ends a period of a full disk.
    pub(crate) fn empty(&self) {
        self.lock().full_until = None;
    }

    /// Runs `look`, which reads files of the server for the oracle, without faults.
    pub(crate) fn inspect<T>(&self, look: impl FnOnce() -> T) -> T {
        self.lock().inspected = true;
        let seen = look();
        self.lock().inspected = false;
        seen
    }

    /// Decides whether an operation succeeds, and records what the operation makes durable.
    pub(crate) fn observe(&self, operation: FileOperation<'_>) -> io::Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.inspected {
            return Ok(());
        }
        if state.dead {
            return Err(io::Error::other("the process is dead"));
        }
        if let FileOperation::SyncFolder(path) = operation
            && path.to_string_lossy().contains(POISON)
        {
            event!(self.0.trace, "poison request kills the process");
            self.0.trace.count("killed by a poison request");
            self.die(state);
            return Err(io::Error::other("the process is dead"));
        }
        let now = Instant::now();
        if now < state.calm_at {
            self.inject(state, operation, now)?;
        }
        self.record(state, operation)
    }

    fn die(&self, state: &mut DiskState) {
        state.dead = true;
        self.0.killed.notify_one();
    }

    fn inject(
        &self,
        state: &mut DiskState,
        operation: FileOperation<'_>,
        now: Instant,
    ) -> io::Result<()> {
        let plan = &self.0.plan;
        if let FileOperation::Read(_) = operation {
            if state.rng.f64() < plan.read_error {
                event!(self.0.trace, "disk: read fails");
                self.0.trace.count("failed read");
                return Err(io::Error::other("input/output error (simulated)"));
            }
            return Ok(());
        }
        let is_suspect = self.0.root.join(CRASH_RECORD).is_file();
        if !is_suspect {
            state.suspect_kills = 0;
        }
        if state.rng.f64() < plan.crash_at_write && state.suspect_kills < MAX_SUSPECT_KILLS {
            state.suspect_kills += u32::from(is_suspect);
            event!(self.0.trace, "disk: {} kills the process", name(operation));
            self.0.trace.count("killed at a write");
            self.die(state);
            return Err(io::Error::other("the process is dead"));
        }
        let writes = !matches!(operation, FileOperation::Remove(_) | FileOperation::Truncate(..));
        if state.rng.f64() < plan.full_disk {
            let seconds = state.rng.u64(1..30);
            event!(self.0.trace, "disk: full for {seconds} s");
            self.0.trace.count("full disk");
            state.full_until = Some(now + Duration::from_secs(seconds));
        }
        if writes && state.full_until.is_some_and(|until| now < until) {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "disk full (simulated)"));
        }
        if state.rng.f64() < plan.write_error {
            event!(self.0.trace, "disk: {} fails", name(operation));
            self.0.trace.count("failed file operation");
            return Err(io::Error::other("input/output error (simulated)"));
        }
        if let FileOperation::SyncFile(file) = operation
            && state.rng.f64() < plan.lost_flush
        {
            event!(self.0.trace, "disk: fsync fails and drops the bytes");
            self.0.trace.count("failed flush that drops bytes");
            let metadata = file.metadata()?;
            let durable = state.lengths.get(&metadata.ino()).copied().unwrap_or(0);
            if metadata.len() > durable {
                state.dropped.entry(metadata.ino()).or_default().push(durable..metadata.len());
            }
            return Err(io::Error::other("input/output error (simulated)"));
        }
        Ok(())
    }

    fn record(&self, state: &mut DiskState, operation: FileOperation<'_>) -> io::Result<()> {
        match operation {
            FileOperation::SyncFile(file) => {
                let metadata = file.metadata()?;
                state.lengths.insert(metadata.ino(), metadata.len());
            }
            FileOperation::Append(mut file) => {
                // Bytes that are written again are new.
                let position = file.stream_position()?;
                for part in state.dropped.entry(file.metadata()?.ino()).or_default() {
                    part.end = part.end.min(position.max(part.start));
                }
            }
            FileOperation::Truncate(file, length) => {
                let durable = state.lengths.entry(file.metadata()?.ino()).or_default();
                *durable = length.min(*durable);
                // Bytes that are written again after a truncation are new.
                for part in state.dropped.entry(file.metadata()?.ino()).or_default() {
                    part.end = part.end.min(length);
                }
            }
            FileOperation::SyncFolder(folder) => {
                state.entries.insert(fs::metadata(folder)?.ino(), entries(folder)?);
                state.replaced.retain(|(link, path)| {
                    let pending = path.parent() != Some(folder);
                    if !pending {
                        let _ = fs::remove_file(link);
                    }
                    pending
                });
            }
            FileOperation::Rename(_, to) if to.is_file() && to.starts_with(&self.0.root) => {
                state.links += 1;
                let link = self.0.root.join(format!("replaced-{}", state.links));
                fs::hard_link(to, &link)?;
                state.replaced.push((link, to.to_owned()));
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the data folder, the folder of the progress of passes, the folder of weights, and the
    /// folders in the folder of weights.
    fn folders(&self) -> Vec<PathBuf> {
        let weights = self.0.root.join("weights");
        let passes = self.0.root.join("passes");
        let inner = list(&weights).into_iter().filter(|path| path.is_dir());
        [self.0.root.clone(), passes, weights.clone()].into_iter().chain(inner).collect()
    }

    /// Simulates a power loss: removes or truncates a random part of the files and entries that are
    /// not durable.
    pub(crate) fn lose_power(&self) {
        let mut state = self.lock();
        let state = &mut *state;
        // A rename is atomic: the path has the old or the new file.
        let mut replaced = BTreeSet::new();
        for (link, path) in std::mem::take(&mut state.replaced) {
            if state.rng.bool() {
                event!(self.0.trace, "power loss: {} is the old file", shown(&path));
                let _ = fs::rename(link, &path);
            } else {
                let _ = fs::remove_file(link);
            }
            replaced.insert(path);
        }
        for folder in self.folders() {
            let durable =
                fs::metadata(&folder).ok().and_then(|m| state.entries.get(&m.ino()).cloned());
            let durable = durable.unwrap_or_default();
            for path in list(&folder) {
                let has_name = replaced.contains(&path);
                self.lose_entry(state, &path, &durable, has_name);
            }
        }
        state.lengths.clear();
        state.dropped.clear();
        state.entries.clear();
        // The files that survived the power loss are durable.
        self.record_all(state);
    }

    /// Removes or truncates a file or folder, as far as it is not durable. `has_name` is true if
    /// the folder has a durable entry of this name that refers to another file.
    fn lose_entry(
        &self,
        state: &mut DiskState,
        path: &Path,
        durable: &BTreeMap<String, u64>,
        has_name: bool,
    ) {
        let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Ok(metadata) = fs::symlink_metadata(path) else { return };
        let top_level = path.parent() == Some(&self.0.root);
        let untouched = file_name.starts_with(DATABASE_PREFIX)
            || (top_level
                && ["lock", "tokenizer", "weights", "key", "passes"].contains(&&*file_name));
        if untouched {
            return;
        }
        let is_durable = has_name || durable.get(&file_name) == Some(&metadata.ino());
        if !is_durable && state.rng.bool() {
            event!(self.0.trace, "power loss: {} is lost", shown(path));
            let _ =
                if metadata.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            return;
        }
        if !metadata.is_file() {
            return;
        }
        for part in state.dropped.remove(&metadata.ino()).unwrap_or_default() {
            if part.start < part.end {
                event!(self.0.trace, "power loss: {} has lost {part:?}", shown(path));
                let _ = clear(path, &part);
            }
        }
        let durable = state.lengths.get(&metadata.ino()).copied().unwrap_or(0);
        if metadata.len() > durable {
            let kept = state.rng.u64(durable..=metadata.len());
            event!(self.0.trace, "power loss: {} has {kept} bytes", shown(path));
            let garbage = state.rng.u8(0..4) == 0;
            let _ = truncate_torn(path, durable, kept, garbage);
        }
    }

    /// Records everything that exists as durable.
    fn record_all(&self, state: &mut DiskState) {
        for folder in self.folders() {
            for path in list(&folder) {
                if let Ok(metadata) = fs::symlink_metadata(&path) {
                    state.lengths.insert(metadata.ino(), metadata.len());
                }
            }
            let found = entries(&folder).unwrap_or_default();
            if let Ok(metadata) = fs::metadata(&folder) {
                state.entries.insert(metadata.ino(), found);
            }
        }
    }
}

/// Truncates a file to `kept` bytes. If `garbage` is true, overwrites the bytes after the first
/// `durable` bytes.
fn truncate_torn(path: &Path, durable: u64, kept: u64, garbage: bool) -> io::Result<()> {
    use std::io::{SeekFrom, Write as _};
    let mut file = File::options().write(true).open(path)?;
    file.set_len(kept)?;
    if garbage {
        file.seek(SeekFrom::Start(durable))?;
        let length = usize::try_from(kept - durable).unwrap_or(0);
        file.write_all(&vec![0xA5; length])?;
    }
    Ok(())
}

/// Overwrites a part of a file with zeros.
fn clear(path: &Path, part: &Range<u64>) -> io::Result<()> {
    use std::io::{SeekFrom, Write as _};
    let mut file = File::options().write(true).open(path)?;
    let end = part.end.min(file.metadata()?.len());
    let length = usize::try_from(end.saturating_sub(part.start)).unwrap_or(0);
    file.seek(SeekFrom::Start(part.start))?;
    file.write_all(&vec![0; length])
}

/// Returns the paths in a folder, sorted.
fn list(folder: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths: BTreeSet<PathBuf> = read.map(|entry| entry.path()).collect();
    paths.into_iter().collect()
}

fn entries(folder: &Path) -> io::Result<BTreeMap<String, u64>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        found.insert(entry.file_name().to_string_lossy().into_owned(), entry.metadata()?.ino());
    }
    Ok(found)
}

/// Returns the last component of a path. Temporary names are random and not part of a trace.
fn shown(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if name.starts_with('.') { "a temporary file".to_owned() } else { name }
}

fn name(operation: FileOperation<'_>) -> &'static str {
    match operation {
        FileOperation::Append(_) => "append",
        FileOperation::Truncate(..) => "truncate",
        FileOperation::SyncFile(_) => "fsync",
        FileOperation::SyncFolder(_) => "fsync of a folder",
        FileOperation::Rename(..) => "rename",
        FileOperation::Exchange(..) => "exchange",
        FileOperation::Remove(_) => "remove",
        FileOperation::Commit => "commit",
        FileOperation::Read(_) => "read",
        _ => "operation",
    }
}
