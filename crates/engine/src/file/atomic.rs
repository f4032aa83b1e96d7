//! Files and folders that appear whole or not at all.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// Writes a file aside, flushes it to disk and renames it to `path`.
///
/// # Errors
/// [`Error::Io`]; `path` is then as it was.
pub fn write_file(
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<()> {
    let aside = Aside::of(path)?;
    let file = File::create_new(&aside.0).map_err(Error::io("create", &aside.0))?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    content(&mut out)
        .and_then(|()| out.flush())
        .and_then(|()| out.get_ref().sync_all())
        .map_err(Error::io("write", path))?;
    drop(out);
    fs::rename(&aside.0, path).map_err(Error::io("replace", path))?;
    flush_folder_of(path);
    Ok(())
}

/// Fills a folder aside and renames it to `path`; what was there before is removed after.
///
/// # Errors
/// What `fill` returns, or [`Error::Io`]; `path` is then as it was.
pub fn write_folder(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let aside = Aside::of(path)?;
    fs::create_dir(&aside.0).map_err(Error::io("create", &aside.0))?;
    fill(&aside.0)?;
    let old = Aside::of(path)?;
    let replaces = match fs::rename(path, &old.0) {
        Ok(()) => true,
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => return Err(Error::io("replace", path)(e)),
    };
    if let Err(e) = fs::rename(&aside.0, path) {
        if replaces {
            // Best effort: the first error is the one to report.
            let _ = fs::rename(&old.0, path);
        }
        return Err(Error::io("replace", path)(e));
    }
    flush_folder_of(path);
    Ok(())
}

/// A name beside the target, on the same disk; whatever is left under it goes when this is dropped.
struct Aside(PathBuf);

impl Aside {
    fn of(path: &Path) -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let Some(name) = path.file_name() else {
            return Err(Error::bad_file(path, "has no file name"));
        };
        let mut aside = OsString::from(".");
        aside.push(name);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        aside.push(OsStr::new(&format!(".{}-{count}", std::process::id())));
        Ok(Self(path.with_file_name(aside)))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if let Ok(about) = fs::symlink_metadata(&self.0) {
            // Nobody waits for this: a leftover is ugly, not wrong.
            let _ =
                if about.is_dir() { fs::remove_dir_all(&self.0) } else { fs::remove_file(&self.0) };
        }
    }
}

/// Makes the rename itself survive a power cut, where the system lets us.
fn flush_folder_of(path: &Path) {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        write_file(&path, |out| out.write_all(b"old")).unwrap();
        let failed = write_file(&path, |out| {
            out.write_all(b"new")?;
            Err(io::Error::other("disk full"))
        });
        assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["x"]);
    }

    #[test]
    fn a_folder_is_replaced_as_a_whole() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("checkpoint");
        let put = |name: &'static str| {
            move |folder: &Path| write_file(&folder.join(name), |out| out.write_all(b"x"))
        };
        write_folder(&path, put("a")).unwrap();
        write_folder(&path, put("b")).unwrap();
        assert_eq!(names(&path), ["b"]);
        let failed = write_folder(&path, |folder| {
            put("c")(folder)?;
            Err(Error::invalid("c", "no"))
        });
        assert!(failed.is_err());
        assert_eq!(names(&path), ["b"]);
        assert_eq!(names(root.path()), ["checkpoint"]);
    }
}
