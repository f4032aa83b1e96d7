//! Checks that every exported type name has one definition.
//!
//! No two exported types of the workspace share a name, unless the name is listed in
//! [`SHARED_CONCEPTS`]: a concept that several crates define for themselves. A reader who searches
//! for a type of an API then finds one definition. A `pub` type is exported: the lint
//! `unreachable_pub` requires that other types are `pub(crate)` or private.

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
    println!("\n==> exported type names: one definition each");
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
                for name in source.lines().filter_map(exported_type) {
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
    Err(XtaskError::new(format!(
        "exported type names with several definitions:\n  {}",
        faults.join("\n  ")
    )))
}

/// Returns the name of the exported type that a line defines at the top level of a module, if any.
fn exported_type(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub ")?;
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
    use super::exported_type;

    #[test]
    fn only_exported_types_at_the_top_level_of_a_module_count() {
        assert_eq!(exported_type("pub struct Batch<'a> {"), Some("Batch"));
        assert_eq!(exported_type("pub trait Source: Sized {"), Some("Source"));
        assert_eq!(exported_type("pub(crate) enum Record {"), None);
        assert_eq!(exported_type("struct Private;"), None);
        assert_eq!(exported_type("    pub struct Nested;"), None);
        assert_eq!(exported_type("pub fn batch() {}"), None);
    }
}
