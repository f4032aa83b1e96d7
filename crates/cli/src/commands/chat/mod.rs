//! A conversation with a model, in the terminal or through a pipe.

mod conversation;
mod line_reader;

use std::io::Write as _;

use clap::Args;
use serde_json::json;
use tinkex::{Message, SamplingParams, ServiceClient};

use crate::error::{CommandError, Exit};
use crate::format;
use crate::local;
use crate::output::Shell;

use super::sample::SamplingArgs;
use super::weights::WeightsArgs;
use conversation::Conversation;
use line_reader::{InputLine, LineReader};

const COMMANDS: &str = "\
  /system TEXT   what the model is told before everything; without TEXT nothing
  /model NAME    conversation to another model or checkpoint (tinker://…), about the same things
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
pub(crate) struct ChatArgs {
    #[command(flatten)]
    weights: WeightsArgs,
    /// What the model is told before everything
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    how: SamplingArgs,
}

pub(super) async fn run(shell: &mut Shell<'_>, chat: ChatArgs) -> Result<Exit, CommandError> {
    let interrupt = shell.environment.interrupt.clone();
    let service = interrupt.stops(1, shell.client()).await?;
    let opened = open(shell, &service, &chat.weights);
    let (mut conversation, name) = interrupt.stops(1, opened).await?;
    conversation.system = chat.system;
    let watched = shell.environment.terminals.input;
    if watched {
        shell.notice(&format!("talking to {name}; /help for commands, Ctrl-D to end"));
    }
    let history = local::data_home(&shell.environment.variables).ok();
    let history = history.filter(|home| std::fs::create_dir_all(home).is_ok());
    let lines =
        LineReader::new(&shell.environment.input, history.map(|home| home.join("chat-history")));
    loop {
        // What is pressed from here on is about this line; an editor reads Ctrl-C itself.
        // Where nobody types, there is nothing to go back to.
        let presses = if watched { interrupt.count() } else { 0 };
        let line = match interrupt.stops(presses + 1, lines.next("> ")).await? {
            InputLine::Text(line) => line,
            InputLine::Cancelled => continue,
            InputLine::End => return Ok(Exit::Success),
        };
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        if let Some(command) = line.strip_prefix('/') {
            let work = obey(shell, &service, &chat.weights, &mut conversation, command);
            match interrupt.stops(presses + 1, work).await {
                Ok(true) => return Ok(Exit::Success),
                Ok(false) => {}
                // Somebody who types can try again; a script should know.
                Err(failure) if watched => {
                    crate::error::report(shell.environment, &failure, false);
                }
                Err(failure) => return Err(failure),
            }
            continue;
        }
        conversation.messages.push(Message::user(line));
        let params = chat.how.params(true);
        match interrupt.stops(presses + 1, answer(shell, &conversation, params)).await {
            Ok(said) => conversation.messages.push(Message::assistant(said)),
            Err(failure) if failure.exit() == Exit::Interrupted && watched => {
                // What was asked and not answered is forgotten.
                conversation.messages.pop();
                let _ = shell.write("\n");
                shell.notice("(stopped)");
            }
            Err(failure) if watched && failure.exit() != Exit::Success => {
                conversation.messages.pop();
                crate::error::report(shell.environment, &failure, false);
            }
            Err(failure) => return Err(failure),
        }
    }
}

async fn open(
    shell: &mut Shell<'_>,
    service: &ServiceClient,
    weights: &WeightsArgs,
) -> Result<(Conversation, String), CommandError> {
    let (sampler, name) = weights.open(shell, service).await?;
    let tokenizer = weights.tokenizer(&shell.environment.variables, &sampler).await?;
    let chat = tokenizer.chat()?;
    Ok((Conversation { sampler, chat, system: None, messages: Vec::new() }, name))
}

/// Writes an answer as it comes, and returns all of it.
async fn answer(
    shell: &mut Shell<'_>,
    conversation: &Conversation,
    params: SamplingParams,
) -> Result<String, CommandError> {
    let mut answer = conversation.answer(params)?;
    let (mut said, json) = (String::new(), shell.is_json());
    while let Some(text) = answer.next().await? {
        if !json {
            shell.write(&format::visible_lines(&text))?;
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
    weights: &WeightsArgs,
    conversation: &mut Conversation,
    command: &str,
) -> Result<bool, CommandError> {
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    let rest = rest.trim();
    match (name, rest) {
        ("quit" | "exit" | "q", _) => return Ok(true),
        ("help", _) => shell.notice(COMMANDS),
        ("reset", _) => {
            conversation.messages.clear();
            shell.notice("(forgotten)");
        }
        ("system", "") => {
            conversation.system = None;
            shell.notice("(nothing is told first)");
        }
        ("system", text) => {
            conversation.system = Some(text.to_owned());
            shell.notice("(told first from now on)");
        }
        ("save", "") => return Err(CommandError::usage("save where to?").hint("/save FILE")),
        ("save", file) => save(shell, conversation, file)?,
        ("model", "") => {
            return Err(
                CommandError::usage("which model?").hint("/model NAME, or /model tinker://…")
            );
        }
        ("model", name) => {
            let (new, name) = open(shell, service, &weights.named(name.to_owned())).await?;
            (conversation.sampler, conversation.chat) = (new.sampler, new.chat);
            shell.notice(&format!("(talking to {name})"));
        }
        _ => {
            return Err(
                CommandError::usage(format!("there is no command /{name}")).hint("see /help")
            );
        }
    }
    Ok(false)
}

/// Adds the conversation to a file, as one line that can be trained on.
fn save(
    shell: &mut Shell<'_>,
    conversation: &Conversation,
    file: &str,
) -> Result<(), CommandError> {
    if conversation.messages.is_empty() {
        return Err(CommandError::usage("there is nothing to save yet"));
    }
    let message = |message: &Message| json!({ "role": message.role(), "content": message.content().unwrap_or_default() });
    let line = json!({ "messages": conversation.whole().iter().map(message).collect::<Vec<_>>() });
    let open = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(shell.environment.path(file.as_ref()));
    let written = open.and_then(|mut out| writeln!(out, "{line}"));
    written.map_err(|why| CommandError::file("written", file, &why))?;
    shell.notice(&format!("(saved in {file})"));
    Ok(())
}
