//! [`log_to_console`]: a log on standard error.

use std::io::IsTerminal as _;

use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

use crate::config::Env;
use crate::error::{Error, ErrorKind, Result};

/// Installs a `tracing` subscriber that logs to standard error: events of this crate from `level`
/// up, and warnings of other crates.
///
/// For programs without a subscriber of their own. `TINKER_LOG=info` and `TINKER_LOG=debug`
/// override `level`.
///
/// ```no_run
/// tinkex::log_to_console(tinkex::tracing::Level::WARN)?;
/// # Ok::<_, tinkex::Error>(())
/// ```
///
/// # Errors
/// If a global subscriber is already installed.
pub fn log_to_console(level: Level) -> Result<()> {
    let level = level_from(&Env::from_process()).unwrap_or(level);
    let colors = std::io::stderr().is_terminal();
    let text = fmt::layer().with_writer(std::io::stderr).with_ansi(colors);
    // Only warnings of other crates: HTTP libraries log every frame.
    let filter = Targets::new().with_default(Level::WARN.min(level)).with_target("tinkex", level);
    let log = tracing_subscriber::registry().with(text.with_filter(filter));
    tracing::subscriber::set_global_default(log).map_err(|error| {
        let message = "a tracing subscriber is already installed";
        Error::new(ErrorKind::Config, message).with_source(error)
    })
}

/// Returns the level that `TINKER_LOG` names; values other than `info` and `debug` are ignored.
fn level_from(env: &Env) -> Option<Level> {
    match env.get("TINKER_LOG")? {
        "debug" => Some(Level::DEBUG),
        "info" => Some(Level::INFO),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tinker_log_selects_info_or_debug() {
        for (word, level) in [
            ("debug", Some(Level::DEBUG)),
            ("info", Some(Level::INFO)),
            ("INFO", None),
            ("", None),
            ("trace", None),
        ] {
            assert_eq!(level_from(&Env::from_pairs([("TINKER_LOG", word)])), level, "{word}");
        }
    }

    #[test]
    fn a_second_subscriber_is_rejected() {
        log_to_console(Level::ERROR).unwrap();
        assert_eq!(log_to_console(Level::ERROR).unwrap_err().kind(), ErrorKind::Config);
    }
}
