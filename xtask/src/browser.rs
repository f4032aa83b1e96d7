//! `cargo xtask browser`: the dashboard in headless Chromium.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;

use crate::step::{Step, XtaskError, cargo, ignored_test, root, target, tool};
use crate::test::skipped;

/// Debian packages of the browser and its driver.
const PACKAGES: [&str; 2] = ["chromium", "chromium-driver"];
/// Checks accessibility in the browser.
const AXE: &str = "axe-core@4.14.0";
/// Maximum time of an installation.
const INSTALL_LIMIT: Duration = Duration::from_secs(300);
/// Maximum time of all tests together, without their compilation. A test ends itself before.
const TEST_LIMIT: Duration = Duration::from_secs(900);

/// Arguments of `cargo xtask browser`.
#[derive(Args, Default)]
pub(crate) struct BrowserArgs {
    /// Update the images docs/images/dashboard-*.png instead
    #[arg(long)]
    screenshots: bool,
}

pub(crate) fn run(args: &BrowserArgs) -> Result<(), XtaskError> {
    if !is_installed() {
        install();
    }
    if !is_installed() {
        let packages = PACKAGES.join(" and ");
        let reason = format!(
            "`chromium --version` or `chromedriver --version` fails, and apt-get cannot install \
             {packages}"
        );
        skipped("dashboard in Chromium", &reason);
        return Ok(());
    }
    if args.screenshots {
        let test = "browser::screenshots::screenshots_of_all_views";
        let folder = target().join("screenshots");
        ignored_test("screenshots", "tinkex-server", test, &[])?
            .variable("TINKEX_SCREENSHOTS", &folder)
            .run_within(TEST_LIMIT)?;
        return update_images(&folder);
    }
    let axe = axe();
    if axe.is_none() {
        skipped("accessibility", &format!("npm cannot install {AXE}"));
    }
    println!("\n==> dashboard in Chromium: building");
    let listed = tests().arguments(&["--list"]).output()?;
    if !listed.lines().any(|line| line.ends_with(": test")) {
        return Err(XtaskError::new("tinkex-server has no ignored test browser::"));
    }
    // One at a time: they measure times.
    let mut step = tests().arguments(&["--nocapture", "--test-threads", "1"]);
    if let Some(script) = &axe {
        step = step.variable("TINKEX_AXE", script);
    }
    step.run_within(TEST_LIMIT)
}

/// Creates a step that runs the browser tests, except the test that writes screenshots.
fn tests() -> Step {
    let title = "dashboard in Chromium";
    cargo(title, &["test", "--locked", "--package", "tinkex-server", "--test", "it"]).arguments(&[
        "browser::",
        "--",
        "--ignored",
        "--skip",
        "browser::screenshots::",
    ])
}

/// Replaces the screenshots of the documentation. The others stay in `folder`, to be looked at.
fn update_images(folder: &Path) -> Result<(), XtaskError> {
    let images = root().join("docs/images");
    let failed = |error: std::io::Error| {
        XtaskError::new(format!("cannot update {}: {error}", images.display()))
    };
    for entry in std::fs::read_dir(&images).map_err(failed)? {
        let image = entry.map_err(failed)?.path();
        let new = folder.join(image.file_name().unwrap_or_default());
        if new.is_file() {
            std::fs::copy(&new, &image).map_err(failed)?;
            println!("    {}", image.display());
        }
    }
    println!("    all views: {}", folder.display());
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
    // A new machine has no lists of packages yet.
    apt(&["update"]);
    let install = ["install", "--yes", "--no-install-recommends"];
    apt(&[&install[..], &PACKAGES[..]].concat());
}

/// Runs apt-get as root, without questions.
fn apt(arguments: &[&str]) {
    let user = tool("user", "id", &["-u"]).output();
    let step = match user.as_deref().map(str::trim) {
        Ok("0") => tool("browser packages", "apt-get", &[]),
        _ => tool("browser packages", "sudo", &["--non-interactive", "apt-get"]),
    };
    let step = step.arguments(&["-o", "DPkg::Lock::Timeout=60"]).arguments(arguments);
    if let Err(error) = step.variable("DEBIAN_FRONTEND", "noninteractive").run_within(INSTALL_LIMIT)
    {
        println!("    {error}");
    }
}

/// Downloads axe-core from the npm registry and returns the path of its script.
fn axe() -> Option<PathBuf> {
    let folder = target().join("axe");
    let script = folder.join("node_modules/axe-core/axe.min.js");
    if !script.is_file() {
        std::fs::create_dir_all(&folder).ok()?;
        let install = tool("axe-core", "npm", &["install", "--no-audit", "--no-fund", "--prefix"]);
        install.argument(&folder).arguments(&[AXE]).run_within(INSTALL_LIMIT).ok()?;
    }
    script.is_file().then_some(script)
}
