//! Checks that every combination of features that a user is likely to choose compiles: none, each
//! feature alone, and all.
//!
//! Most code is compiled with all features, which hides a module that uses another feature's types
//! without enabling it, and an import that only one feature needs.

use serde_json::Value;

use crate::step::{XtaskError, cargo};

/// Package of the workspace that has features.
struct Package {
    name: String,
    /// Names of the features, without `default`.
    features: Vec<String>,
    has_library: bool,
}

/// Compiles every package that has features without them, with each of them alone, and with all.
/// Warnings are errors. Compiles libraries only; of a package without a library, its programs.
pub(crate) fn check() -> Result<(), XtaskError> {
    let metadata =
        cargo("metadata", &["metadata", "--locked", "--no-deps", "--format-version=1"]).output()?;
    for package in packages(&metadata)? {
        for combination in combinations(&package.features) {
            let target = if package.has_library { "--lib" } else { "--bins" };
            let arguments = ["clippy", "--locked", "--quiet", "--package", &package.name, target];
            cargo("features", &arguments)
                .arguments(&["--no-default-features", "--features", &combination])
                .arguments(&["--", "--deny", "warnings"])
                .run()?;
        }
    }
    Ok(())
}

/// Returns the packages with features in the output of `cargo metadata`.
fn packages(metadata: &str) -> Result<Vec<Package>, XtaskError> {
    let unreadable = || XtaskError::new("cannot read the output of cargo metadata");
    let metadata: Value = serde_json::from_str(metadata).map_err(|_| unreadable())?;
    let listed = metadata["packages"].as_array().ok_or_else(unreadable)?;
    let mut packages = Vec::new();
    for package in listed {
        let name = package["name"].as_str().ok_or_else(unreadable)?.to_owned();
        let features = package["features"].as_object().ok_or_else(unreadable)?;
        let features: Vec<String> =
            features.keys().filter(|feature| *feature != "default").cloned().collect();
        let targets = package["targets"].as_array().ok_or_else(unreadable)?;
        let is_library = |target: &Value| {
            target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "lib"))
        };
        let has_library = targets.iter().any(is_library);
        if !features.is_empty() {
            packages.push(Package { name, features, has_library });
        }
    }
    Ok(packages)
}

/// Returns no feature, each feature alone, and all features together, as values of `--features`.
fn combinations(features: &[String]) -> Vec<String> {
    let mut combinations = vec![String::new()];
    combinations.extend(features.iter().cloned());
    if features.len() > 1 {
        combinations.push(features.join(","));
    }
    combinations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_each_and_all_features_are_combined() {
        let features = ["a".to_owned(), "b".to_owned()];
        assert_eq!(combinations(&features), ["", "a", "b", "a,b"]);
        assert_eq!(combinations(&features[..1]), ["", "a"]);
    }

    #[test]
    fn packages_without_features_are_left_out() {
        let metadata = r#"{"packages": [
            {"name": "plain", "features": {}, "targets": [{"kind": ["lib"]}]},
            {"name": "rich", "features": {"default": ["x"], "x": []}, "targets": [{"kind": ["bin"]}]}
        ]}"#;
        let packages = packages(metadata).unwrap();
        assert_eq!(packages.len(), 1);
        assert_eq!(
            (&*packages[0].name, &packages[0].features[..]),
            ("rich", &["x".to_owned()][..])
        );
        assert!(!packages[0].has_library);
    }
}
