//! Lines for people, on stderr.

use std::fmt::Arguments;
use std::sync::atomic::{AtomicBool, Ordering};

static JOBS: AtomicBool = AtomicBool::new(false);

/// Whether a line is printed for every finished job.
pub(crate) fn show_jobs(show: bool) {
    JOBS.store(show, Ordering::Relaxed);
}

/// A job is finished.
pub(crate) fn job(line: Arguments<'_>) {
    if JOBS.load(Ordering::Relaxed) {
        eprintln!("{line}");
    }
}

/// Something that the user should look at.
pub(crate) fn warn(line: Arguments<'_>) {
    eprintln!("warning: {line}");
}
