//! `cargo xtask fuzz guided`: coverage-guided fuzzing with libFuzzer, on the stable toolchain.
//!
//! The program in `fuzz/` is not a member of the workspace. It is compiled with LLVM's coverage
//! counters, without a sanitizer, which would need a nightly toolchain: the readers are safe Rust,
//! so that panics and overflows are what can go wrong. Needs Linux and a C++ compiler.

use std::path::PathBuf;

use clap::Args;

use crate::step::{XtaskError, cargo, root, target, tool};

/// Names of the readers that are fuzzed.
const TARGETS: [&str; 6] = ["adapter", "config", "gguf", "safetensors", "template", "wire"];

/// Flags of the compiler for coverage counters that libFuzzer reads.
const COVERAGE_FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Largest input in bytes.
const MAX_INPUT: &str = "-max_len=16384";

/// Arguments of `cargo xtask fuzz guided`.
#[derive(Args)]
pub(crate) struct GuidedFuzzArgs {
    /// Duration for each reader
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Reader to fuzz [default: all]
    #[arg(long, value_name = "NAME", value_parser = TARGETS)]
    target: Option<String>,
    /// Replace fuzz/corpus by a minimal corpus with the same coverage
    #[arg(long)]
    minimize: bool,
}

pub(crate) fn run(args: &GuidedFuzzArgs) -> Result<(), XtaskError> {
    let selected = match &args.target {
        Some(target) => vec![target.as_str()],
        None => TARGETS.to_vec(),
    };
    let program = build()?;
    for name in selected {
        fuzz(&program, name, args)?;
    }
    Ok(())
}

/// Builds the program and returns its path.
fn build() -> Result<PathBuf, XtaskError> {
    let host = host_triple()?;
    let folder = target().join("guided-fuzz");
    cargo("guided fuzzing", &["build", "--release", "--manifest-path"])
        .argument(root().join("fuzz/Cargo.toml"))
        // The flags then apply to the program, but not to build scripts.
        .arguments(&["--target", &host, "--target-dir"])
        .argument(&folder)
        .variable("RUSTFLAGS", COVERAGE_FLAGS)
        .run()?;
    Ok(folder.join(host).join("release/tinkex-guided-fuzz"))
}

fn host_triple() -> Result<String, XtaskError> {
    let version = tool("compiler", "rustc", &["-vV"]).output()?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| XtaskError::new("rustc -vV: no host found"))
}

/// Fuzzes one reader, starting from its corpus. Inputs that reach new code are kept in `target`;
/// an input that fails is written there, too.
fn fuzz(program: &PathBuf, name: &str, args: &GuidedFuzzArgs) -> Result<(), XtaskError> {
    let create = |folder: PathBuf| match std::fs::create_dir_all(&folder) {
        Ok(()) => Ok(folder),
        Err(error) => Err(XtaskError::new(format!("cannot create {}: {error}", folder.display()))),
    };
    let corpus = create(root().join("fuzz/corpus").join(name))?;
    let found = create(target().join("guided-fuzz/corpus").join(name))?;
    let failures = create(target().join("guided-fuzz/failures"))?;
    let prefix = format!("-artifact_prefix={}/{name}-", failures.display());
    let step = tool("guided fuzzing", program, &[MAX_INPUT, "-timeout=10", "-rss_limit_mb=2048"])
        .variable("TINKEX_FUZZ_TARGET", name)
        .arguments(&[&prefix]);
    if !args.minimize {
        let seconds = format!("-max_total_time={}", args.seconds);
        return step
            .arguments(&[&seconds, "-print_final_stats=1"])
            .argument(&found)
            .argument(&corpus)
            .run();
    }
    let old = create(target().join("guided-fuzz/replaced"))?.join(name);
    let _ = std::fs::remove_dir_all(&old);
    std::fs::rename(&corpus, &old)
        .map_err(|error| XtaskError::new(format!("cannot move {}: {error}", corpus.display())))?;
    let corpus = create(corpus)?;
    step.arguments(&["-merge=1"]).argument(&corpus).argument(&old).argument(&found).run()
}
