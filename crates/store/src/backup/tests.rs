//! Tests of backups of a data folder that is being written.

use std::collections::BTreeSet;

use super::*;
use crate::disk::{DASHBOARD_SESSIONS, Disk, append_request};
use crate::executor::Executor;

/// Opens a data folder.
fn open(data: &Path) -> Disk {
    let (disk, _) = Disk::open(data, &Executor::threads()).unwrap();
    disk
}

fn source(data: &Path, disk: &Disk, seconds: i64) -> BackupSource {
    let created_at = seconds * 1_000_000;
    BackupSource { data_dir: data.to_owned(), payloads: disk.reader(), created_at }
}

#[test]
fn a_restored_backup_has_the_state_of_its_time() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    fs::create_dir(&data).unwrap();
    let mut disk = open(&data);
    fs::write(data.join("key"), "tml-secret").unwrap();
    fs::write(data.join("lock"), "").unwrap();
    fs::write(data.join(DASHBOARD_SESSIONS), "[]").unwrap();
    append_request(&mut disk, "first", b"one").unwrap();
    let dir = root.path().join("backups");
    let report = create(&source(&data, &disk, 0), &dir).unwrap();
    assert_eq!(report.folder, dir.join("1970-01-01T00-00-00Z"));
    assert_eq!((report.missing.len(), report.linked_bytes), (0, 0));
    append_request(&mut disk, "second", b"two").unwrap();
    let report = create(&source(&data, &disk, 1), &dir).unwrap();
    assert_eq!(report.folder, dir.join("1970-01-01T00-00-01Z"));

    let ids = |backup: &Path, to: &str| {
        let restored = root.path().join(to);
        let report = restore(backup, &restored).unwrap();
        for name in ["lock", DASHBOARD_SESSIONS, MANIFEST] {
            assert!(!restored.join(name).exists(), "{name}");
        }
        assert_eq!(fs::read_to_string(restored.join("key")).unwrap(), "tml-secret");
        let (disk, rows) = Disk::open(&restored, &Executor::threads()).unwrap();
        for request in &rows.requests {
            assert!(disk.reader().payload(request.row.number).is_ok());
        }
        let ids = rows.requests.iter().map(|request| request.row.id.to_string());
        (report.created_at, ids.collect::<BTreeSet<_>>())
    };
    let both = BTreeSet::from(["first".to_owned(), "second".to_owned()]);
    assert_eq!(ids(&dir, "newest"), (1_000_000, both));
    let first = BTreeSet::from(["first".to_owned()]);
    assert_eq!(ids(&dir.join("1970-01-01T00-00-00Z"), "older"), (0, first));
}

#[test]
fn a_damaged_backup_is_refused_and_nothing_is_overwritten() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    fs::create_dir(&data).unwrap();
    let mut disk = open(&data);
    append_request(&mut disk, "first", b"one").unwrap();
    let dir = root.path().join("backups");
    let folder = create(&source(&data, &disk, 0), &dir).unwrap().folder;
    let error = restore(&dir, &data).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{error}");
    let target = root.path().join("restored");
    let payloads = folder.join("payloads");
    let mut bytes = fs::read(&payloads).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&payloads, &bytes).unwrap();
    let error = restore(&dir, &target).unwrap_err().to_string();
    assert!(error.contains("payloads") && error.contains("is damaged"), "{error}");
    fs::remove_file(&payloads).unwrap();
    let error = restore(&dir, &target).unwrap_err().to_string();
    assert!(error.contains("is missing"), "{error}");
    assert!(!target.exists());
    let left: Vec<_> = fs::read_dir(root.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 2, "{left:?}");
    // A manifest cannot name files outside of the data folder.
    let text = fs::read_to_string(folder.join(MANIFEST)).unwrap();
    fs::write(folder.join(MANIFEST), text.replace("\"payloads\"", "\"../payloads\"")).unwrap();
    let error = restore(&dir, &target).unwrap_err().to_string();
    assert!(error.contains("not a path in a data folder"), "{error}");
}

#[test]
fn the_newest_finished_backup_is_restored_whatever_its_name() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    fs::create_dir(&data).unwrap();
    let disk = open(&data);
    // The temporary file of a write in progress.
    fs::write(data.join("dashboard-sessions.json.new"), "[]").unwrap();
    let dir = root.path().join("backups");
    let first = create(&source(&data, &disk, 0), &dir).unwrap().folder;
    assert!(!first.join("dashboard-sessions.json.new").exists());
    let unfinished = create(&source(&data, &disk, 2), &dir).unwrap().folder;
    fs::rename(unfinished, dir.join(".1970-01-01T00-00-02Z.partial")).unwrap();
    fs::rename(first, dir.join("before-upgrade")).unwrap();
    create(&source(&data, &disk, 1), &dir).unwrap();
    let report = restore(&dir, &root.path().join("restored")).unwrap();
    assert_eq!(report.created_at, 1_000_000);
    fs::remove_dir_all(report.backup).unwrap();
    fs::remove_dir_all(dir.join("before-upgrade")).unwrap();
    let error = restore(&dir, &root.path().join("unfinished")).unwrap_err().to_string();
    assert!(error.contains("contains no complete backup"), "{error}");
}

/// A file whose name was not flushed may be missing after a power failure.
#[cfg(unix)]
#[test]
fn every_folder_of_a_restored_data_folder_is_flushed() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    fs::create_dir(&data).unwrap();
    let dir = root.path().join("backups");
    let backup = create(&source(&data, &open(&data), 0), &dir).unwrap().folder;
    let mut manifest = Manifest::read(&backup).unwrap();
    fs::create_dir(backup.join("weights/a")).unwrap();
    let digest = copy_file(&backup.join(MANIFEST), &backup.join("weights/a/adapter")).unwrap();
    manifest.files.insert("weights/a/adapter".to_owned(), digest);
    fs::write(backup.join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
    let flushed = std::rc::Rc::new(std::cell::RefCell::new(BTreeSet::new()));
    let seen = std::rc::Rc::clone(&flushed);
    let _observer = tinkex_files::observe_thread(move |operation| {
        if let tinkex_files::FileOperation::SyncFolder(folder) = operation {
            seen.borrow_mut().insert(folder.to_owned());
        }
        Ok(())
    });
    restore(&dir, &root.path().join("restored")).unwrap();
    let staged = root.path().join(".restored.partial");
    for folder in [staged.join("weights/a"), staged.join("weights"), staged, root.path().into()] {
        assert!(flushed.borrow().contains(&folder), "{}", folder.display());
    }
}

#[test]
fn a_backup_is_not_made_inside_of_the_data_folder() {
    let root = tempfile::tempdir().unwrap();
    let disk = open(root.path());
    let error = create(&source(root.path(), &disk, 0), &root.path().join("b")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
}
