//! Checks the dependencies of every crate against the rules of `ARCHITECTURE.md`.

use std::collections::BTreeSet;

use crate::step::{XtaskError, cargo, root};

/// Rules for the dependencies of one crate, direct and transitive, and for its unsafe code.
struct CrateRule {
    package: &'static str,
    folder: &'static str,
    /// Features with which the rules hold. A crate may have one rule for each.
    features: Features,
    /// Crates of the workspace that the crate may depend on.
    may_use: &'static [&'static str],
    /// External crates that must not appear in its dependency tree.
    must_not_use: &'static [&'static str],
    unsafe_code: Unsafe,
}

enum Features {
    All,
    None,
}

impl Features {
    fn argument(&self) -> &'static str {
        match self {
            Self::All => "--all-features",
            Self::None => "--no-default-features",
        }
    }
}

#[derive(PartialEq)]
enum Unsafe {
    /// `lib.rs` or `main.rs` has `#![forbid(unsafe_code)]`.
    Forbidden,
    /// Denied by the workspace lint; a module that needs it states the reason.
    Justified,
}

/// Async runtimes and libraries that need one.
const ASYNC: &[&str] =
    &["async-std", "futures", "futures-core", "futures-util", "hyper", "mio", "smol", "tokio"];

/// Async runtimes, network libraries, protobuf and argument parsers.
const RUNTIMES_AND_NETWORK: &[&str] = &[
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

/// Async runtimes, HTTP and network libraries, and databases.
const HTTP_AND_DATABASE: &[&str] = &[
    "async-std",
    "axum",
    "http",
    "http-body",
    "hyper",
    "mio",
    "reqwest",
    "rusqlite",
    "rustls",
    "smol",
    "tokio",
];

const RULES: &[CrateRule] = &[
    CrateRule {
        package: "tinkex-autodiff",
        folder: "crates/autodiff",
        features: Features::All,
        may_use: &[],
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-builtin-model",
        folder: "crates/builtin-model",
        features: Features::All,
        may_use: &[
            "tinkex-autodiff",
            "tinkex-engine",
            "tinkex-fairness",
            "tinkex-files",
            "tinkex-weights",
        ],
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-backend",
        folder: "crates/backend",
        features: Features::All,
        // No engine and no client: both sides of a queue use it.
        may_use: &[
            "tinkex-autodiff",
            "tinkex-fairness",
            "tinkex-files",
            "tinkex-store",
            "tinkex-wire",
        ],
        must_not_use: &["clap", "http", "hyper", "onig_sys", "openssl-sys", "reqwest", "rustls"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-backoff",
        folder: "crates/backoff",
        features: Features::All,
        may_use: &[],
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex",
        folder: "crates/client",
        features: Features::None,
        // Without features, the SDK reads no model files and knows no hub.
        may_use: &[
            "tinkex-autodiff",
            "tinkex-backoff",
            "tinkex-files",
            "tinkex-loss",
            "tinkex-session",
            "tinkex-suggest",
            "tinkex-transport",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "axum", "clap", "native-tls", "openssl-sys", "tokenizers"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex",
        folder: "crates/client",
        features: Features::All,
        may_use: &[
            "tinkex-autodiff",
            "tinkex-backoff",
            "tinkex-files",
            "tinkex-hub",
            "tinkex-loss",
            "tinkex-runs",
            "tinkex-session",
            "tinkex-suggest",
            "tinkex-text",
            "tinkex-transport",
            "tinkex-weights",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "axum", "clap", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-cli",
        folder: "crates/cli",
        features: Features::All,
        may_use: &[
            "tinkex",
            "tinkex-autodiff",
            "tinkex-backend",
            "tinkex-backoff",
            "tinkex-dashboard",
            "tinkex-engine",
            "tinkex-fairness",
            "tinkex-files",
            "tinkex-gateway",
            "tinkex-hub",
            "tinkex-inference",
            "tinkex-loss",
            "tinkex-recipes",
            "tinkex-runs",
            "tinkex-server",
            "tinkex-session",
            "tinkex-store",
            "tinkex-suggest",
            "tinkex-text",
            "tinkex-transport",
            "tinkex-weights",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-dashboard",
        folder: "crates/dashboard",
        features: Features::All,
        // No engine, no inference: the server passes the few figures of theirs that a page shows.
        may_use: &[
            "tinkex-autodiff",
            "tinkex-files",
            "tinkex-runs",
            "tinkex-store",
            "tinkex-text",
            "tinkex-wire",
        ],
        must_not_use: &["clap", "http", "hyper", "onig_sys", "openssl-sys", "reqwest", "rustls"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-engine",
        folder: "crates/engine",
        features: Features::All,
        may_use: &["tinkex-autodiff", "tinkex-fairness", "tinkex-files", "tinkex-weights"],
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Justified,
    },
    CrateRule {
        package: "tinkex-fairness",
        folder: "crates/fairness",
        features: Features::All,
        may_use: &[],
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-files",
        folder: "crates/files",
        features: Features::All,
        may_use: &[],
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-gateway",
        folder: "crates/gateway",
        features: Features::All,
        // No engine: an upstream computes.
        may_use: &[
            "tinkex",
            "tinkex-autodiff",
            "tinkex-backend",
            "tinkex-backoff",
            "tinkex-fairness",
            "tinkex-files",
            "tinkex-loss",
            "tinkex-session",
            "tinkex-store",
            "tinkex-suggest",
            "tinkex-text",
            "tinkex-transport",
            "tinkex-weights",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "clap", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-hub",
        folder: "crates/hub",
        features: Features::All,
        may_use: &[
            "tinkex-autodiff",
            "tinkex-backoff",
            "tinkex-files",
            "tinkex-text",
            "tinkex-transport",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "axum", "clap", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-inference",
        folder: "crates/inference",
        features: Features::All,
        may_use: &["tinkex-autodiff", "tinkex-text", "tinkex-wire"],
        must_not_use: HTTP_AND_DATABASE,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-loss",
        folder: "crates/loss",
        features: Features::All,
        may_use: &[
            "tinkex-autodiff",
            "tinkex-backoff",
            "tinkex-files",
            "tinkex-transport",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "axum", "clap", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-recipes",
        folder: "crates/recipes",
        features: Features::All,
        may_use: &[
            "tinkex",
            "tinkex-autodiff",
            "tinkex-backoff",
            "tinkex-files",
            "tinkex-hub",
            "tinkex-loss",
            "tinkex-runs",
            "tinkex-session",
            "tinkex-suggest",
            "tinkex-text",
            "tinkex-transport",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "axum", "clap", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-runs",
        folder: "crates/runs",
        features: Features::All,
        may_use: &["tinkex-autodiff", "tinkex-files", "tinkex-wire"],
        // Programs of any kind read run folders.
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-server",
        folder: "crates/server",
        features: Features::All,
        may_use: &[
            "tinkex-autodiff",
            "tinkex-backend",
            "tinkex-backoff",
            "tinkex-dashboard",
            "tinkex-engine",
            "tinkex-fairness",
            "tinkex-files",
            "tinkex-inference",
            "tinkex-runs",
            "tinkex-store",
            "tinkex-suggest",
            "tinkex-text",
            "tinkex-weights",
            "tinkex-wire",
        ],
        // The server never sends HTTP requests; it takes a driver for each upstream.
        must_not_use: &["aws-lc-sys", "clap", "native-tls", "onig_sys", "openssl-sys", "reqwest"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-session",
        folder: "crates/session",
        features: Features::All,
        may_use: &[
            "tinkex-autodiff",
            "tinkex-backoff",
            "tinkex-files",
            "tinkex-transport",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "axum", "clap", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-examples",
        folder: "crates/examples",
        features: Features::All,
        // The SDK alone: the programs are written as programs outside of this repository are. The
        // tests start servers.
        may_use: &[
            "tinkex",
            "tinkex-autodiff",
            "tinkex-backoff",
            "tinkex-files",
            "tinkex-hub",
            "tinkex-loss",
            "tinkex-session",
            "tinkex-suggest",
            "tinkex-text",
            "tinkex-transport",
            "tinkex-weights",
            "tinkex-wire",
        ],
        must_not_use: &["aws-lc-sys", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-simulation",
        folder: "crates/simulation",
        features: Features::All,
        may_use: &[
            "tinkex",
            "tinkex-autodiff",
            "tinkex-backend",
            "tinkex-backoff",
            "tinkex-dashboard",
            "tinkex-engine",
            "tinkex-fairness",
            "tinkex-files",
            "tinkex-gateway",
            "tinkex-inference",
            "tinkex-loss",
            "tinkex-runs",
            "tinkex-server",
            "tinkex-session",
            "tinkex-store",
            "tinkex-suggest",
            "tinkex-text",
            "tinkex-transport",
            "tinkex-weights",
            "tinkex-wire",
        ],
        must_not_use: &["clap", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-store",
        folder: "crates/store",
        features: Features::All,
        // No engine, and nothing that executes or answers requests.
        may_use: &["tinkex-autodiff", "tinkex-files", "tinkex-wire"],
        must_not_use: &["clap", "http", "hyper", "onig_sys", "openssl-sys", "reqwest", "rustls"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-stress",
        folder: "crates/stress",
        features: Features::All,
        // The server is another process: the attacks must not share code with it beyond the protocol.
        may_use: &["tinkex-autodiff", "tinkex-wire"],
        must_not_use: &["reqwest", "rusqlite"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-suggest",
        folder: "crates/suggest",
        features: Features::All,
        may_use: &[],
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-text",
        folder: "crates/text",
        features: Features::All,
        may_use: &["tinkex-autodiff", "tinkex-wire"],
        must_not_use: ASYNC,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-transport",
        folder: "crates/transport",
        features: Features::All,
        may_use: &["tinkex-autodiff", "tinkex-backoff", "tinkex-files", "tinkex-wire"],
        must_not_use: &["aws-lc-sys", "axum", "clap", "native-tls", "onig_sys", "openssl-sys"],
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-weights",
        folder: "crates/weights",
        features: Features::All,
        may_use: &["tinkex-files"],
        must_not_use: RUNTIMES_AND_NETWORK,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "tinkex-wire",
        folder: "crates/wire",
        features: Features::All,
        may_use: &["tinkex-autodiff"],
        must_not_use: ASYNC,
        unsafe_code: Unsafe::Forbidden,
    },
    CrateRule {
        package: "xtask",
        folder: "xtask",
        features: Features::All,
        may_use: &[],
        // Every development command compiles xtask first, so that it has few dependencies.
        must_not_use: &["futures-util", "regex", "serde", "tokio"],
        unsafe_code: Unsafe::Forbidden,
    },
];

/// Document with a table of all crates.
const DOCUMENT: &str = "ARCHITECTURE.md";

/// Checks every crate of the workspace and reports all violations.
pub(crate) fn check() -> Result<(), XtaskError> {
    println!("\n==> architecture: dependencies between crates");
    let mut faults = Vec::new();
    let packages = packages()?;
    let document = std::fs::read_to_string(root().join(DOCUMENT))
        .map_err(|error| XtaskError::new(format!("cannot read {DOCUMENT}: {error}")))?;
    for package in &packages {
        if !document.contains(&format!("`{package}`")) {
            faults.push(format!("{package} has no row in the table of {DOCUMENT}"));
        }
        let mut rules = RULES.iter().filter(|rule| rule.package == package).peekable();
        if rules.peek().is_none() {
            faults.push(format!("{package} has no rule in xtask/src/arch.rs"));
        }
        for rule in rules {
            check_crate(rule, &packages, &mut faults)?;
        }
    }
    for rule in RULES.iter().filter(|rule| !packages.contains(rule.package)) {
        faults.push(format!("{} has a rule in xtask/src/arch.rs but does not exist", rule.package));
    }
    if faults.is_empty() {
        println!("    {} crates", packages.len());
        return Ok(());
    }
    Err(XtaskError::new(format!(
        "violations of the architecture rules:\n  {}",
        faults.join("\n  ")
    )))
}

/// Returns the names of the workspace crates.
fn packages() -> Result<BTreeSet<String>, XtaskError> {
    package_names(&["tree", "--workspace", "--depth", "0"])
}

fn check_crate(
    rule: &CrateRule,
    packages: &BTreeSet<String>,
    faults: &mut Vec<String>,
) -> Result<(), XtaskError> {
    let dependencies = package_names(&[
        "tree",
        "--package",
        rule.package,
        rule.features.argument(),
        "--edges",
        "normal,build",
    ])?;
    for name in &dependencies {
        let internal = packages.contains(name) && name != rule.package;
        if internal && !rule.may_use.contains(&name.as_str()) {
            faults.push(format!("{} must not depend on {name}", rule.package));
        }
        if rule.must_not_use.contains(&name.as_str()) {
            faults.push(format!(
                "{} must not depend on {name}; run `cargo tree --package {} --invert {name}` for the path",
                rule.package, rule.package
            ));
        }
    }
    if rule.unsafe_code == Unsafe::Forbidden && !forbids_unsafe(rule.folder) {
        faults.push(format!("{} must contain #![forbid(unsafe_code)]", rule.folder));
    }
    Ok(())
}

/// Runs `cargo tree` and returns the package names that it lists.
fn package_names(arguments: &[&str]) -> Result<BTreeSet<String>, XtaskError> {
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
