//! `tinkex chat`: a conversation with a model, on a terminal or through a pipe.

mod conversation;
mod line_reader;

use std::io::Write as _;

use clap::Args;
use serde_json::json;
use tinkex::{Message, SamplingParams, ServiceClient};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::local;
use crate::output::to_json_line;

use super::sample::{CHAT_TEMPERATURE, SamplingArgs};
use super::weights::WeightsArgs;
use conversation::Conversation;
use line_reader::{InputLine, LineReader};

const COMMANDS: &str = "  /system TEXT   set the system message; without TEXT, remove it
  /model NAME    switch to another model, run or checkpoint and keep the conversation
  /save FILE     append the conversation to a file, as a line that `tinkex train` accepts
  /reset         clear the conversation
  /help          show this list
  /quit          end the chat; so does Ctrl-D
Ctrl-C stops a response.";

/// Arguments of `tinkex chat`.
#[derive(Debug, Args)]
#[command(after_help = "\
Commands in the chat: /system, /model, /save, /reset, /help, /quit. Ctrl-C stops a response, Ctrl-D
ends the chat.

Examples:
  tinkex chat --local                                       chat with the built-in model
  tinkex chat animals                                       chat with the run animals
  tinkex chat animals/step-30 --system 'You are a pirate.'  chat with a checkpoint of the run
  tinkex chat tinker://RUN/sampler_weights/final            chat with a checkpoint by its path
  tinkex chat models/Qwen3-0.6B --local                     chat with a model folder or GGUF file
  printf 'Hello!\\nWho are you?\\n' | tinkex chat --local      one response per line")]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    weights: WeightsArgs,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    mut args: ChatArgs,
) -> Result<Exit, CommandError> {
    let interrupt = context.environment.interrupt.clone();
    let service = interrupt.run_until(1, args.weights.connect(context)).await?;
    context.announce_dashboard();
    let opened = open(context, &service, &args.weights);
    let (mut conversation, name) = interrupt.run_until(1, opened).await?;
    conversation.system = args.system;
    let interactive = context.environment.terminals.input;
    if interactive {
        context
            .notice(&format!("chatting with {name}; /help lists commands, Ctrl-D ends the chat"));
    }
    let history = local::data_home(&context.environment.variables).ok();
    let history = history.filter(|home| std::fs::create_dir_all(home).is_ok());
    let lines = LineReader::new(
        &context.environment.input,
        history.map(|home| home.join("chat-history")),
        &interrupt,
    );
    loop {
        if interrupt.is_terminated() {
            return Err(CommandError::interrupted());
        }
        // On a terminal, Ctrl-C concerns only the current line or response: earlier interruptions
        // do not count. In a pipe, any interruption ends the chat.
        let interruptions = if interactive { interrupt.count() } else { 0 };
        let (line, interruptions) = match lines.next("> ", &interrupt, interruptions + 1).await? {
            InputLine::Text { line, interruptions } => (line, interruptions),
            InputLine::Cancelled => continue,
            InputLine::End => return Ok(Exit::Success),
        };
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        if let Some(command) = line.strip_prefix('/') {
            let command =
                run_chat_command(context, &service, &args.weights, &mut conversation, command);
            match interrupt.run_until(interruptions + 1, command).await {
                Ok(true) => return Ok(Exit::Success),
                Ok(false) => {}
                // On a terminal the user can try again; a script must fail.
                Err(failure) if interactive => report(context, &failure),
                Err(failure) => return Err(failure),
            }
            continue;
        }
        conversation.messages.push(Message::user(line));
        let params = args.sampling.params(CHAT_TEMPERATURE);
        match interrupt.run_until(interruptions + 1, respond(context, &conversation, params)).await
        {
            Ok(text) => conversation.messages.push(Message::assistant(text)),
            Err(failure) if failure.exit() == Exit::Interrupted && interactive => {
                // Remove the message that has no response.
                conversation.messages.pop();
                let _ = context.write("\n");
                context.notice("(stopped)");
            }
            Err(failure) if interactive && failure.exit() != Exit::Success => {
                conversation.messages.pop();
                report(context, &failure);
            }
            Err(failure) => return Err(failure),
        }
    }
}

async fn open(
    context: &mut CommandContext<'_>,
    service: &ServiceClient,
    weights: &WeightsArgs,
) -> Result<(Conversation, String), CommandError> {
    let (sampler, name) = weights.open(context, service).await?;
    let tokenizer = weights.tokenizer(&context.environment.variables, &sampler).await?;
    let chat = tokenizer.chat()?;
    Ok((Conversation { sampler, chat, system: None, messages: Vec::new() }, name))
}

/// Prints an error after which the chat continues.
fn report(context: &mut CommandContext<'_>, failure: &CommandError) {
    let verbose = context.globals.verbose > 0;
    let style = context.console().style();
    crate::error::report(context.environment, failure, false, verbose, style);
}

/// Prints a response while it is sampled, and returns it.
async fn respond(
    context: &mut CommandContext<'_>,
    conversation: &Conversation,
    params: SamplingParams,
) -> Result<String, CommandError> {
    let mut completion = conversation.complete(params)?;
    let mut response = String::new();
    let mut tokens = 0;
    let json = context.is_json();
    while let Some(token) = completion.next().await {
        let text = token?.text;
        tokens += 1;
        if !json && !text.is_empty() {
            context.write_text(&text)?;
        }
        response += &text;
    }
    if json {
        let line = json!({ "role": "assistant", "content": response, "tokens": tokens });
        context.write(&to_json_line(&line)?)?;
    } else {
        context.write("\n")?;
    }
    Ok(response)
}

/// Runs a chat command, given without its slash. Returns whether the chat ends.
async fn run_chat_command(
    context: &mut CommandContext<'_>,
    service: &ServiceClient,
    weights: &WeightsArgs,
    conversation: &mut Conversation,
    command: &str,
) -> Result<bool, CommandError> {
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    let rest = rest.trim();
    match (name, rest) {
        ("quit" | "exit" | "q", _) => return Ok(true),
        ("help", _) => context.notice(COMMANDS),
        ("reset", _) => {
            conversation.messages.clear();
            context.notice("(conversation cleared)");
        }
        ("system", "") => {
            conversation.system = None;
            context.notice("(system message removed)");
        }
        ("system", text) => {
            conversation.system = Some(text.to_owned());
            context.notice("(system message set)");
        }
        ("save", "") => {
            return Err(CommandError::usage("/save requires a file").hint("Type /save FILE."));
        }
        ("save", file) => save(context, conversation, file)?,
        ("model", "") => {
            return Err(CommandError::usage("/model requires a name")
                .hint("Type /model and the name of a model, run or checkpoint."));
        }
        ("model", name) => {
            let name = context.serve_model(name).await?.unwrap_or_else(|| name.to_owned());
            let (new, name) = open(context, service, &weights.with_model(name)).await?;
            conversation.sampler = new.sampler;
            conversation.chat = new.chat;
            context.notice(&format!("(chatting with {name})"));
        }
        _ => {
            return Err(CommandError::usage(format!("unknown command /{name}"))
                .hint("Type /help for the list of commands."));
        }
    }
    Ok(false)
}

/// Appends the conversation to a file as one line of training data.
fn save(
    context: &mut CommandContext<'_>,
    conversation: &Conversation,
    file: &str,
) -> Result<(), CommandError> {
    if conversation.messages.is_empty() {
        return Err(CommandError::usage("cannot save the conversation: it is empty"));
    }
    let to_json = |message: &Message| {
        let content = message.content().unwrap_or_default();
        json!({ "role": message.role(), "content": content })
    };
    let messages: Vec<_> = conversation.all_messages().iter().map(to_json).collect();
    let line = json!({ "messages": messages });
    let open = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(context.environment.path(file.as_ref()));
    let written = open.and_then(|mut out| writeln!(out, "{line}"));
    written.map_err(|error| CommandError::file("write", file, &error))?;
    context.notice(&format!("(saved to {file})"));
    Ok(())
}
