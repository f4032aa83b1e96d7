//! Who may depend on whom.
//!
//! Crate borders hold the architecture: what a crate cannot name, it cannot use. This check keeps
//! the borders where `ARCHITECTURE.md` draws them.

use std::collections::BTreeSet;

use crate::step::{Failure, cargo, root};

/// What one crate of the workspace may have below it.
struct Rule {
    package: &'static str,
    folder: &'static str,
    /// Other crates of the workspace.
    may_use: &'static [&'static str],
    /// Crates from outside that must not be there, even by way of others.
    must_not_use: &'static [&'static str],
    unsafe_code: Unsafe,
}

#[derive(PartialEq)]
enum Unsafe {
    /// Its `lib.rs` or `main.rs` forbids it.
    Forbidden,
    /// The workspace's lint denies it; a file that needs it says why.
    Stated,
}

const ASYNC: &[&str] =
    &["async-std", "futures", "futures-core", "futures-util", "hyper", "mio", "smol", "tokio"];

/// No runtime, no network, no wire.
const NOTHING_OUTSIDE: &[&str] = &[
    "async-std",
    "axum",
    "clap",
    "futures",
    "futures-core",
    "futures-util",
    "http",
    "hyper",
    "mio",
    "prost",
    "reqwest",
    "rustls",
    "smol",
    "tokio",
];

const RULES: &[Rule] = &[
    Rule {
        package: "tinkex",
        folder: "crates/client",
        may_use: &["tinkex-wire"],
        must_not_use: &["aws-lc-sys", "axum", "clap", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    Rule {
        package: "tinkex-cli",
        folder: "crates/cli",
        may_use: &["tinkex", "tinkex-engine", "tinkex-server", "tinkex-wire"],
        must_not_use: &["aws-lc-sys", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    Rule {
        package: "tinkex-engine",
        folder: "crates/engine",
        may_use: &[],
        must_not_use: NOTHING_OUTSIDE,
        unsafe_code: Unsafe::Stated,
    },
    Rule {
        package: "tinkex-server",
        folder: "crates/server",
        may_use: &["tinkex-engine", "tinkex-wire"],
        // It answers calls; it makes none.
        must_not_use: &["clap", "openssl-sys", "reqwest", "rustls"],
        unsafe_code: Unsafe::Forbidden,
    },
    Rule {
        package: "tinkex-wire",
        folder: "crates/wire",
        may_use: &[],
        must_not_use: ASYNC,
        unsafe_code: Unsafe::Forbidden,
    },
    Rule {
        package: "xtask",
        folder: "xtask",
        may_use: &[],
        // Everyone waits for this crate to compile.
        must_not_use: &["clap", "serde", "syn"],
        unsafe_code: Unsafe::Forbidden,
    },
];

pub(crate) fn check() -> Result<(), Failure> {
    println!("\n==> architecture: who depends on whom");
    let mut faults = Vec::new();
    let packages = packages()?;
    for package in &packages {
        match RULES.iter().find(|rule| rule.package == package) {
            Some(rule) => check_crate(rule, &packages, &mut faults)?,
            None => faults.push(format!("{package} has no rule in xtask/src/arch.rs")),
        }
    }
    for rule in RULES.iter().filter(|rule| !packages.contains(rule.package)) {
        faults.push(format!("{} has a rule but does not exist", rule.package));
    }
    if faults.is_empty() {
        println!("    {} crates, all within their borders", packages.len());
        return Ok(());
    }
    Err(Failure::new(format!("the architecture is broken:\n  {}", faults.join("\n  "))))
}

/// The crates of the workspace.
fn packages() -> Result<BTreeSet<String>, Failure> {
    names(&["tree", "--workspace", "--depth", "0"])
}

fn check_crate(
    rule: &Rule,
    packages: &BTreeSet<String>,
    faults: &mut Vec<String>,
) -> Result<(), Failure> {
    let below =
        names(&["tree", "--package", rule.package, "--all-features", "--edges", "normal,build"])?;
    for name in &below {
        let ours = packages.contains(name) && name != rule.package;
        if ours && !rule.may_use.contains(&name.as_str()) {
            faults.push(format!("{} must not depend on {name}", rule.package));
        }
        if rule.must_not_use.contains(&name.as_str()) {
            faults.push(format!(
                "{} must not have {name} below it; see: cargo tree --package {} --invert {name}",
                rule.package, rule.package
            ));
        }
    }
    if rule.unsafe_code == Unsafe::Forbidden && !forbids_unsafe(rule.folder) {
        faults.push(format!("{} must say #![forbid(unsafe_code)]", rule.folder));
    }
    Ok(())
}

/// The names of the packages that `cargo tree` lists.
fn names(arguments: &[&str]) -> Result<BTreeSet<String>, Failure> {
    let listing = cargo("dependency tree", arguments)
        .arguments(&["--locked", "--prefix", "none", "--format", "{p}"])
        .output()?;
    Ok(listing
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect())
}

fn forbids_unsafe(folder: &str) -> bool {
    ["src/lib.rs", "src/main.rs"]
        .iter()
        .filter_map(|file| std::fs::read_to_string(root().join(folder).join(file)).ok())
        .any(|source| source.contains("#![forbid(unsafe_code)]"))
}
