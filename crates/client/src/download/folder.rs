//! The folder that a download goes to: nothing appears there before all of it is there.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};

use super::file::{Place, disk};

/// A folder beside the target, in which files grow.
#[derive(Debug)]
pub(super) struct Staging {
    folder: PathBuf,
    target: PathBuf,
    replace: bool,
    /// Held until the end: two downloads into one folder would mix.
    lock: File,
}

impl Staging {
    /// Refuses a target that exists, unless it is to be replaced.
    pub(super) fn open(target: &Path, replace: bool) -> Result<Self> {
        if !replace && target.symlink_metadata().is_ok() {
            return Err(exists(target));
        }
        let Some(name) = target.file_name() else {
            let why = format!("{} is no folder to download into", target.display());
            return Err(Error::new(ErrorKind::InvalidInput, why));
        };
        let mut part = name.to_owned();
        part.push(".part");
        let folder = target.with_file_name(part);
        let open = || {
            fs::create_dir_all(&folder)?;
            File::options().create(true).append(true).open(folder.join("lock"))
        };
        let lock = open().map_err(|why| disk(&folder, &why))?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => {
                let why = format!("another download into {} is under way", target.display());
                return Err(Error::new(ErrorKind::Conflict, why));
            }
            // Where there are no locks, nobody else is assumed.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        Ok(Self { folder, target: target.to_owned(), replace, lock })
    }

    /// Where a file of this name grows.
    pub(super) fn place(&self, name: &str) -> Place {
        let under = |kind: &str| self.folder.join(kind).join(name);
        Place { whole: under("files"), part: under("parts"), tag: under("tags") }
    }

    /// Files of an earlier download that are not part of this one go.
    pub(super) fn keep_only(&self, names: &[&str]) -> io::Result<()> {
        let files = self.folder.join("files");
        let mut folders = vec![files.clone()];
        while let Some(folder) = folders.pop() {
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(why) if why.kind() == io::ErrorKind::NotFound => continue,
                Err(why) => return Err(why),
            };
            for entry in entries {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                } else if !names.iter().any(|name| files.join(name) == path) {
                    fs::remove_file(path)?;
                }
            }
        }
        Ok(())
    }

    /// All files are whole: they become the target.
    pub(super) fn finish(self) -> Result<PathBuf> {
        let failed = |why: io::Error| disk(&self.target, &why);
        let files = self.folder.join("files");
        fs::create_dir_all(&files).map_err(failed)?;
        let old = self.folder.join("old");
        if self.target.symlink_metadata().is_ok() {
            if !self.replace {
                return Err(exists(&self.target));
            }
            fs::rename(&self.target, &old).map_err(failed)?;
        }
        if let Err(why) = fs::rename(&files, &self.target) {
            // What was there before is better than nothing.
            let _ = fs::rename(&old, &self.target);
            return Err(failed(why));
        }
        drop(self.lock);
        fs::remove_dir_all(&self.folder).map_err(|why| disk(&self.folder, &why))?;
        Ok(self.target)
    }
}

fn exists(target: &Path) -> Error {
    let why = format!("{} exists already", target.display());
    let hint = "choose another folder, or say that it may be replaced";
    Error::new(ErrorKind::Conflict, why).with_hint(hint)
}

/// Refuses a name that would leave the folder.
pub(super) fn check(name: &str) -> Result<()> {
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    let harmless = !name.is_empty()
        && !name.ends_with('/')
        && !name.contains(['\\', ':'])
        && !name.chars().any(char::is_control)
        && Path::new(name).components().all(plain);
    if harmless {
        return Ok(());
    }
    let why = format!("the checkpoint has a file with an unsafe name: {name:?}");
    let hint = "nothing was written; the checkpoint may be damaged, or made to do harm";
    Err(Error::new(ErrorKind::Decode, why).with_hint(hint))
}

/// Whether a name fits a pattern, in which `*` stands for any letters and `?` for one.
pub(super) fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<_>, Vec<_>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where the last star was, and how far it reaches for now.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(letter) if *letter == '?' || *letter == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match &mut star {
                Some((at, reach)) => {
                    *reach += 1;
                    (p, n) = (*at + 1, *reach);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|letter| *letter == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside() {
        for good in ["a", "a/b.json", "x..y", ".hidden", "a/.b"] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["", "/a", "../a", "a/../b", "a/..", "./a", "c:\\a", "a\\b", "a\n", "a/", "C:x"]
        {
            assert!(check(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn patterns_have_stars() {
        for (pattern, name) in
            [("*", "x"), ("*.json", "a.json"), ("a?c*", "abcd"), ("*a*b", "xaab"), ("**", "")]
        {
            assert!(fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("*.json", "a.jsonl"), ("a", "ab"), ("?", ""), ("*a", "ab")] {
            assert!(!fits(pattern, name), "{pattern} {name}");
        }
    }
}
