//! `cargo xtask browser`: the dashboard in headless Chromium.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::step::{XtaskError, ignored_test, root, target, tool};

/// Debian packages of the browser and its driver.
const PACKAGES: [&str; 2] = ["chromium", "chromium-driver"];
/// Checks accessibility in the browser.
const AXE: &str = "axe-core@4.14.0";

pub(crate) fn run(options: &[&str]) -> Result<(), XtaskError> {
    let screenshots = match options {
        [] => false,
        ["--screenshots"] => true,
        other => return Err(XtaskError::new(format!("unknown options: {}", other.join(" ")))),
    };
    if !is_installed() {
        install();
    }
    if !is_installed() {
        println!(
            "\n==> browser: SKIPPED (chromedriver is missing; install the packages {})",
            PACKAGES.join(" and ")
        );
        return Ok(());
    }
    if screenshots {
        let folder = root().join("docs/images");
        return ignored_test(
            "screenshots",
            "tinkex-server",
            "browser::screenshots_of_all_views",
            &[],
        )?
        .variable("TINKEX_SCREENSHOTS", folder)
        .run();
    }
    let axe = axe();
    if axe.is_none() {
        println!("\n==> accessibility: SKIPPED (npm cannot install {AXE})");
    }
    for test in [
        "login_runs_curves_samples_and_restart",
        "a_printed_url_logs_in_once_and_every_view_is_accessible",
        "many_runs_and_a_long_run_are_fast",
        "run_folders_are_followed",
    ] {
        let name = format!("browser::{test}");
        let step = ignored_test("dashboard in Chromium", "tinkex-server", &name, &[])?;
        match &axe {
            Some(path) => step.variable("TINKEX_AXE", path).run()?,
            None => step.run()?,
        }
    }
    Ok(())
}

fn is_installed() -> bool {
    let found = |program: &str| {
        let mut command = Command::new(program);
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    found("chromedriver") && found("chromium")
}

/// Installs the packages. A failure is reported by the missing program.
fn install() {
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(PACKAGES);
    let _ = tool("browser packages", "apt-get", &arguments).run();
}

/// Downloads axe-core from the npm registry and returns the path of its script.
fn axe() -> Option<PathBuf> {
    let folder = target().join("axe");
    let script = folder.join("node_modules/axe-core/axe.min.js");
    if !script.is_file() {
        std::fs::create_dir_all(&folder).ok()?;
        let install = tool("axe-core", "npm", &["install", "--no-audit", "--no-fund", "--prefix"]);
        install.argument(&folder).arguments(&[AXE]).run().ok()?;
    }
    script.is_file().then_some(script)
}
