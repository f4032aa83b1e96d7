//! Checks that every type name has one definition.
//!
//! No two `pub`, `pub(crate)` or `pub(super)` types of the workspace share a name, unless the name is
//! listed in [`SHARED_CONCEPTS`]: one concept that several crates define for themselves. A reader who
//! searches for a type then finds one definition.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::step::{XtaskError, root};

/// Names of types that several crates define for the same concept.
const SHARED_CONCEPTS: &[&str] = &[
    "AdamParams",
    "DType",
    "Datum",
    "DimuonParams",
    "Environment",
    "Error",
    "ErrorKind",
    "LoraConfig",
    "SampleRequest",
    "StopReason",
    "Tokenizer",
];

pub(crate) fn check() -> Result<(), XtaskError> {
    println!("\n==> type names: one definition each");
    let mut definitions: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    let mut folders = vec![root().join("crates"), root().join("xtask")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(failed(&folder))? {
            let path = entry.map_err(failed(&folder))?.path();
            if path.is_dir() {
                // Test and benchmark programs are separate crates with their own names.
                let name = path.file_name().and_then(|name| name.to_str());
                if !matches!(name, Some("tests" | "benches" | "examples" | "target")) {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(&path).map_err(failed(&path))?;
                for name in source.lines().filter_map(visible_type) {
                    definitions.entry(name.to_owned()).or_default().push(path.clone());
                }
            }
        }
    }
    let count = definitions.len();
    let mut faults = Vec::new();
    for (name, mut paths) in definitions {
        // One file may define a type once per target or feature.
        paths.sort();
        paths.dedup();
        if paths.len() > 1 && !SHARED_CONCEPTS.contains(&name.as_str()) {
            let paths = paths.iter().map(|path| path.strip_prefix(root()).unwrap_or(path));
            let paths: Vec<_> = paths.map(|path| path.display().to_string()).collect();
            faults.push(format!("{name}: {}", paths.join(", ")));
        }
    }
    if faults.is_empty() {
        println!("    {count} names");
        return Ok(());
    }
    Err(XtaskError::new(format!("type names with several definitions:\n  {}", faults.join("\n  "))))
}

/// Returns the name of the type that a line defines at the top level of a module, if the type is
/// visible outside of it.
fn visible_type(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(restricted) => restricted.split_once(')')?.1,
        None => rest,
    };
    let rest = rest.trim_start();
    let rest = ["struct ", "enum ", "trait ", "union "]
        .iter()
        .find_map(|keyword| rest.strip_prefix(keyword))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> XtaskError {
    move |error| XtaskError::new(format!("cannot read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::visible_type;

    #[test]
    fn only_visible_types_at_the_top_level_of_a_module_count() {
        assert_eq!(visible_type("pub struct Batch<'a> {"), Some("Batch"));
        assert_eq!(visible_type("pub(crate) enum Record {"), Some("Record"));
        assert_eq!(visible_type("pub(super) trait Source: Sized {"), Some("Source"));
        assert_eq!(visible_type("struct Private;"), None);
        assert_eq!(visible_type("    pub struct Nested;"), None);
        assert_eq!(visible_type("pub fn batch() {}"), None);
    }
}
