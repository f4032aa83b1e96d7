//! A log for people, on standard error.

use std::io::IsTerminal as _;

use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

use crate::config::Env;
use crate::error::{Error, ErrorKind, Result};

/// Writes what this crate has to say to standard error, from a level up, and warnings of others.
///
/// Warnings come without any of this only if the program has a `tracing` subscriber of its own; a
/// program that has none calls this once. `TINKER_LOG=info` or `debug` wins over the level.
///
/// ```no_run
/// tinkex::log_to_console(tinkex::tracing::Level::WARN)?;
/// # Ok::<_, tinkex::Error>(())
/// ```
///
/// # Errors
/// If the program has a subscriber already; that one stays.
pub fn log_to_console(level: Level) -> Result<()> {
    let level = wanted(&Env::of_process()).unwrap_or(level);
    let colours = std::io::stderr().is_terminal();
    let text = fmt::layer().with_writer(std::io::stderr).with_ansi(colours);
    // Of other crates only what is serious: HTTP libraries tell every frame.
    let filter = Targets::new().with_default(Level::WARN.min(level)).with_target("tinkex", level);
    let log = tracing_subscriber::registry().with(text.with_filter(filter));
    tracing::subscriber::set_global_default(log).map_err(|why| {
        let told = "the program has a tracing subscriber already";
        Error::new(ErrorKind::Config, told).with_source(why)
    })
}

/// Exactly two words are known; anything else leaves the level as it is.
fn wanted(env: &Env) -> Option<Level> {
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
    fn two_words_choose_the_level() {
        for (word, level) in [
            ("debug", Some(Level::DEBUG)),
            ("info", Some(Level::INFO)),
            ("INFO", None),
            ("", None),
            ("trace", None),
        ] {
            assert_eq!(wanted(&Env::from_pairs([("TINKER_LOG", word)])), level, "{word}");
        }
    }

    /// Covers P6C.5.
    #[test]
    fn a_second_log_is_refused() {
        log_to_console(Level::ERROR).unwrap();
        assert_eq!(log_to_console(Level::ERROR).unwrap_err().kind(), ErrorKind::Config);
    }
}
