//! `tinkex completions` and `tinkex man`: files generated from the argument definitions.

use std::io;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use clap_complete::env::Shells;

use crate::environment::Environment;
use crate::error::CommandError;

/// Arguments of `tinkex completions`.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to print the script for
    shell: ShellKind,
}

/// Shells with completion support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShellKind {
    Bash,
    Zsh,
    Fish,
    Powershell,
    Elvish,
}

/// Arguments of `tinkex man`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ManArgs {
    /// Write a page for every command into this folder
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Completion script for bash.
const BASH_COMPLETION: &str = include_str!("completion.bash");

/// Returns the script that registers this program as the source of completions in a shell.
pub(super) fn completions(args: CompletionsArgs) -> Result<String, CommandError> {
    let name = match args.shell {
        ShellKind::Bash => "bash",
        ShellKind::Zsh => "zsh",
        ShellKind::Fish => "fish",
        ShellKind::Powershell => "powershell",
        ShellKind::Elvish => "elvish",
    };
    if args.shell == ShellKind::Bash {
        return Ok(BASH_COMPLETION.to_owned());
    }
    let mut text = Vec::new();
    if let Some(shell) = Shells::builtins().completer(name) {
        shell.write_registration("COMPLETE", "tinkex", "tinkex", "tinkex", &mut text)?;
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns the main manual page, or with `--dir` writes all pages and returns a summary.
pub(super) fn man(environment: &Environment, args: &ManArgs) -> Result<String, CommandError> {
    let command = crate::args::Args::definition();
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return Ok(String::from_utf8_lossy(&page).into_owned());
    };
    let folder = environment.path(dir);
    let written = std::fs::create_dir_all(&folder)
        .and_then(|()| clap_mangen::generate_to(command, &folder))
        .and_then(|()| std::fs::read_dir(&folder));
    let failed = |error: io::Error| CommandError::file("write", dir.display(), &error);
    // The folder may contain manual pages of other programs.
    let is_ours =
        |entry: &std::fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b"tinkex");
    let pages = written.map_err(failed)?.flatten().filter(is_ours).count();
    Ok(format!("{pages} pages in {}\n", dir.display()))
}
