//! A conversation with a model, in the terminal or through a pipe.

mod lines;
mod talk;

use std::io::Write as _;

use clap::Args;
use serde_json::json;
use tinkex::{Message, SamplingParams, ServiceClient};

use crate::failure::{Exit, Failure};
use crate::human;
use crate::local;
use crate::output::Shell;

use super::sample::How;
use super::weights::Weights;
use lines::{Line, Lines};
use talk::Talk;

const COMMANDS: &str = "\
  /system TEXT   what the model is told before everything; without TEXT nothing
  /model NAME    talk to another model or checkpoint (tinker://…), about the same things
  /save FILE     write the conversation to a file, as a line that tinkex train reads
  /reset         forget what was said
  /help          this
  /quit          the end; so is Ctrl-D
Ctrl-C stops an answer.";

/// What can be typed after `chat`.
#[derive(Debug, Args)]
#[command(after_help = "\
Within the conversation:
  /system, /model, /save, /reset, /help, /quit; Ctrl-C stops an answer, Ctrl-D ends it all

Examples:
  tinkex chat --local                                       the built-in model
  tinkex chat tinker://RUN/sampler_weights/final            a checkpoint
  tinkex chat --run RUN_ID --system 'You are a pirate.'     a run's latest
  printf 'Hello!\\nWho are you?\\n' | tinkex chat --local      an answer for every line")]
pub(crate) struct Chat {
    #[command(flatten)]
    weights: Weights,
    /// What the model is told before everything
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    how: How,
}

pub(super) async fn run(shell: &mut Shell<'_>, chat: Chat) -> Result<Exit, Failure> {
    let interrupt = shell.world.interrupt.clone();
    let service = interrupt.stops(1, shell.client()).await?;
    let opened = open(shell, &service, &chat.weights);
    let (mut talk, name) = interrupt.stops(1, opened).await?;
    talk.system = chat.system;
    let watched = shell.world.terminals.input;
    if watched {
        shell.notice(&format!("talking to {name}; /help for commands, Ctrl-D to end"));
    }
    let history = local::data_home(&shell.world.env).ok();
    let history = history.filter(|home| std::fs::create_dir_all(home).is_ok());
    let lines = Lines::new(&shell.world.input, history.map(|home| home.join("chat-history")));
    loop {
        // What is pressed from here on is about this line; an editor reads Ctrl-C itself.
        // Where nobody types, there is nothing to go back to.
        let presses = if watched { interrupt.count() } else { 0 };
        let line = match interrupt.stops(presses + 1, lines.next("> ")).await? {
            Line::Text(line) => line,
            Line::Cancelled => continue,
            Line::End => return Ok(Exit::Done),
        };
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        if let Some(command) = line.strip_prefix('/') {
            let work = obey(shell, &service, &chat.weights, &mut talk, command);
            match interrupt.stops(presses + 1, work).await {
                Ok(true) => return Ok(Exit::Done),
                Ok(false) => {}
                // Somebody who types can try again; a script should know.
                Err(failure) if watched => {
                    crate::failure::report(shell.world, &failure, false);
                }
                Err(failure) => return Err(failure),
            }
            continue;
        }
        talk.messages.push(Message::user(line));
        let params = chat.how.params(true);
        match interrupt.stops(presses + 1, answer(shell, &talk, params)).await {
            Ok(said) => talk.messages.push(Message::assistant(said)),
            Err(failure) if failure.exit() == Exit::Interrupted && watched => {
                // What was asked and not answered is forgotten.
                talk.messages.pop();
                let _ = shell.write("\n");
                shell.notice("(stopped)");
            }
            Err(failure) if watched && failure.exit() != Exit::Done => {
                talk.messages.pop();
                crate::failure::report(shell.world, &failure, false);
            }
            Err(failure) => return Err(failure),
        }
    }
}

async fn open(
    shell: &mut Shell<'_>,
    service: &ServiceClient,
    weights: &Weights,
) -> Result<(Talk, String), Failure> {
    let (sampler, name) = weights.open(shell, service).await?;
    let tokenizer = weights.tokenizer(&shell.world.env, &sampler).await?;
    let chat = tokenizer.chat()?;
    Ok((Talk { sampler, chat, system: None, messages: Vec::new() }, name))
}

/// Writes an answer as it comes, and returns all of it.
async fn answer(
    shell: &mut Shell<'_>,
    talk: &Talk,
    params: SamplingParams,
) -> Result<String, Failure> {
    let mut answer = talk.answer(params)?;
    let (mut said, json) = (String::new(), shell.is_json());
    while let Some(text) = answer.next().await? {
        if !json {
            shell.write(&human::visible_lines(&text))?;
        }
        said += &text;
    }
    if json {
        let line = json!({ "role": "assistant", "content": said, "tokens": answer.len() });
        shell.write(&format!("{line}\n"))?;
    } else {
        shell.write("\n")?;
    }
    Ok(said)
}

/// Does what a line with a slash says; true if that is the end.
async fn obey(
    shell: &mut Shell<'_>,
    service: &ServiceClient,
    weights: &Weights,
    talk: &mut Talk,
    command: &str,
) -> Result<bool, Failure> {
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    let rest = rest.trim();
    match (name, rest) {
        ("quit" | "exit" | "q", _) => return Ok(true),
        ("help", _) => shell.notice(COMMANDS),
        ("reset", _) => {
            talk.messages.clear();
            shell.notice("(forgotten)");
        }
        ("system", "") => {
            talk.system = None;
            shell.notice("(nothing is told first)");
        }
        ("system", text) => {
            talk.system = Some(text.to_owned());
            shell.notice("(told first from now on)");
        }
        ("save", "") => return Err(Failure::usage("save where to?").hint("/save FILE")),
        ("save", file) => save(shell, talk, file)?,
        ("model", "") => {
            return Err(Failure::usage("which model?").hint("/model NAME, or /model tinker://…"));
        }
        ("model", name) => {
            let (new, name) = open(shell, service, &weights.named(name.to_owned())).await?;
            (talk.sampler, talk.chat) = (new.sampler, new.chat);
            shell.notice(&format!("(talking to {name})"));
        }
        _ => {
            return Err(Failure::usage(format!("there is no command /{name}")).hint("see /help"));
        }
    }
    Ok(false)
}

/// Adds the conversation to a file, as one line that can be trained on.
fn save(shell: &mut Shell<'_>, talk: &Talk, file: &str) -> Result<(), Failure> {
    if talk.messages.is_empty() {
        return Err(Failure::usage("there is nothing to save yet"));
    }
    let message = |message: &Message| json!({ "role": message.role(), "content": message.content().unwrap_or_default() });
    let line = json!({ "messages": talk.whole().iter().map(message).collect::<Vec<_>>() });
    let open =
        std::fs::OpenOptions::new().create(true).append(true).open(shell.world.path(file.as_ref()));
    let written = open.and_then(|mut out| writeln!(out, "{line}"));
    written.map_err(|why| Failure::file("written", file, &why))?;
    shell.notice(&format!("(saved in {file})"));
    Ok(())
}
