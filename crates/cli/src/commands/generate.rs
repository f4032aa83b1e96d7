//! What is made from the definitions of the arguments: completions and manual pages.

use std::io;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use clap_complete::env::Shells;

use crate::environment::Environment;
use crate::error::CommandError;

/// Which shell.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: ShellKind,
}

/// Shells that can complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShellKind {
    Bash,
    Zsh,
    Fish,
    Powershell,
    Elvish,
}

/// Where manual pages go.
#[derive(Clone, Debug, Args)]
pub(crate) struct ManArgs {
    /// Write a page for every command into this folder
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// The lines that make a shell ask this program for completions.
pub(super) fn completions(what: CompletionsArgs) -> Result<String, CommandError> {
    let name = match what.shell {
        ShellKind::Bash => "bash",
        ShellKind::Zsh => "zsh",
        ShellKind::Fish => "fish",
        ShellKind::Powershell => "powershell",
        ShellKind::Elvish => "elvish",
    };
    let mut text = Vec::new();
    if let Some(shell) = Shells::builtins().completer(name) {
        shell.write_registration("COMPLETE", "tinkex", "tinkex", "tinkex", &mut text)?;
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The page of the program itself, or the names of all pages that were written.
pub(super) fn man(environment: &Environment, what: &ManArgs) -> Result<String, CommandError> {
    let command = crate::args::Args::definition();
    let Some(dir) = &what.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return Ok(String::from_utf8_lossy(&page).into_owned());
    };
    let shown = dir.display().to_string();
    let folder = environment.path(dir);
    let written = std::fs::create_dir_all(&folder)
        .and_then(|()| clap_mangen::generate_to(command, &folder))
        .and_then(|()| std::fs::read_dir(&folder));
    let wrong = |why: io::Error| CommandError::file("written", &shown, &why);
    let pages = written.map_err(wrong)?.count();
    Ok(format!("{pages} pages in {shown}\n"))
}
