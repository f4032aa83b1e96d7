//! [`HiddenPaths`]: removes paths of the server from messages for clients.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// Folders and files of the server whose paths clients do not see.
///
/// Errors of files name the path, which the log needs. A client gets the name of the folder, such as
/// `DATA`, and the path below it.
#[derive(Debug, Default)]
pub struct HiddenPaths(Vec<HiddenPath>);

#[derive(Debug)]
struct HiddenPath {
    path: String,
    /// Text in place of the path.
    name: String,
}

impl HiddenPaths {
    /// Hides the given paths, each with the name that replaces it. Relative paths reveal nothing;
    /// they are hidden in their absolute form.
    #[must_use]
    pub fn new(paths: impl IntoIterator<Item = (PathBuf, String)>) -> Self {
        let mut hidden = Vec::new();
        for (path, name) in paths {
            let forms = [Some(path.clone()), path.canonicalize().ok()];
            for path in forms.into_iter().flatten() {
                // The root folder is part of every path.
                let is_hideable = path.is_absolute() && path.parent().is_some();
                let path = text_of(&path);
                if is_hideable && hidden.iter().all(|known: &HiddenPath| known.path != path) {
                    hidden.push(HiddenPath { path, name: name.clone() });
                }
            }
        }
        // A folder may be inside of another one: replace the longer path first.
        hidden.sort_by_key(|known| std::cmp::Reverse(known.path.len()));
        Self(hidden)
    }

    /// Returns the text without the hidden paths. The result is borrowed if it has none of them.
    #[must_use]
    pub fn hide<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut shown = Cow::Borrowed(text);
        for hidden in &self.0 {
            if shown.contains(&hidden.path) {
                shown = Cow::Owned(hidden.replace_in(&shown));
            }
        }
        shown
    }
}

impl HiddenPath {
    fn replace_in(&self, text: &str) -> String {
        let mut shown = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(&self.path) {
            let (before, found) = rest.split_at(at);
            let after = &found[self.path.len()..];
            // `/srv/data` is not a part of `/srv/database`.
            let ends = !after.starts_with(|c: char| c.is_alphanumeric() || "-_.".contains(c));
            shown.push_str(before);
            shown.push_str(if ends { &self.name } else { &self.path });
            rest = after;
        }
        shown + rest
    }
}

/// Returns the text of a path as messages have it, without a slash at the end.
fn text_of(path: &Path) -> String {
    path.display().to_string().trim_end_matches(['/', '\\']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_replaced_by_its_name() {
        let hidden = HiddenPaths::new([
            ("/srv/data".into(), "DATA".to_owned()),
            ("/srv/data/models/qwen/".into(), "qwen".to_owned()),
            ("relative".into(), "X".to_owned()),
            ("/".into(), "ROOT".to_owned()),
        ]);
        for (text, shown) in [
            ("cannot read /srv/data/weights/a: damaged", "cannot read DATA/weights/a: damaged"),
            ("/srv/data: full; \"/srv/data\"", "DATA: full; \"DATA\""),
            ("/srv/data/models/qwen/config.json", "qwen/config.json"),
            ("/srv/database/x and relative", "/srv/database/x and relative"),
            ("no path", "no path"),
        ] {
            assert_eq!(hidden.hide(text), shown);
        }
        assert!(matches!(hidden.hide("no path"), Cow::Borrowed(_)));
    }

    #[cfg(unix)]
    #[test]
    fn the_target_of_a_link_is_hidden_too() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().canonicalize().unwrap().join("target");
        std::fs::create_dir(&target).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let hidden = HiddenPaths::new([(link.clone(), "DATA".to_owned())]);
        let text = format!("{} {}/a", link.display(), target.display());
        assert_eq!(hidden.hide(&text), "DATA DATA/a");
    }
}
