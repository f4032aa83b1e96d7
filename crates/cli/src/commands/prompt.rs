//! Prompt arguments: text, token ids and images.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;
use tinkex::ImageFormat;
use tinkex::{Message, ModelInput, Tokenizer, Tokens};

use crate::args::whole_number;
use crate::context::CommandContext;
use crate::environment::Environment;
use crate::error::CommandError;

/// Hint for a missing prompt.
const GIVE_PROMPT: &str = "Pass --prompt TEXT or --prompt-file FILE, or pipe the text in.";

/// Prompt of a model.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// Prompt text; - reads standard input
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with the prompt text, or with token ids as JSON; - reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Token ids instead of text, separated by commas
    #[arg(
        long,
        value_name = "IDS",
        value_delimiter = ',',
        value_parser = whole_number::<u32>,
        conflicts_with_all = ["prompt", "prompt_file"]
    )]
    tokens: Vec<u32>,
    /// PNG or JPEG image to put before the text; repeatable
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// Send the text as a chat message instead of continuing it
    #[arg(long)]
    chat: bool,
    /// System message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
}

/// Prompt that was read from the arguments, a file or standard input.
pub(crate) enum PromptSource {
    Text(String),
    Tokens(Tokens),
}

impl PromptArgs {
    /// Returns whether the prompt is a chat message.
    pub(crate) fn is_chat(&self) -> bool {
        self.chat
    }

    /// Reads the prompt. Call it before any request, so that a missing file is reported without delay.
    pub(crate) async fn read(
        &self,
        context: &mut CommandContext<'_>,
    ) -> Result<PromptSource, CommandError> {
        if !self.tokens.is_empty() {
            if self.chat {
                return Err(CommandError::usage("--chat requires a text prompt, not token ids")
                    .hint("Omit --chat, or pass --prompt TEXT."));
            }
            return Ok(PromptSource::Tokens(Tokens::from(self.tokens.clone())));
        }
        let stdin = Path::new("-");
        let text = match (&self.prompt, &self.prompt_file) {
            (Some(text), _) if text != "-" => return Ok(PromptSource::Text(text.clone())),
            (_, Some(path)) if path != stdin => {
                std::fs::read_to_string(context.environment.path(path))
                    .map_err(|error| CommandError::file("read", path.display(), &error))?
            }
            (None, None) if context.environment.terminals.input => {
                return Err(CommandError::usage("no prompt given").hint(GIVE_PROMPT));
            }
            _ => stdin_text(context).await?,
        };
        Ok(match parse_tokens(&text) {
            Some(tokens) if self.prompt_file.is_some() && !self.chat => {
                PromptSource::Tokens(tokens)
            }
            // Editors end a file with a newline, which is not part of the prompt.
            _ => PromptSource::Text(text.strip_suffix('\n').unwrap_or(&text).to_owned()),
        })
    }

    /// Encodes the prompt. Calls `tokenizer` only if the prompt contains text.
    pub(crate) fn input(
        &self,
        environment: &Environment,
        source: PromptSource,
        tokenizer: impl FnOnce() -> Result<Tokenizer, CommandError>,
    ) -> Result<ModelInput, CommandError> {
        let text = match source {
            PromptSource::Tokens(tokens) => ModelInput::from_tokens(tokens),
            PromptSource::Text(text) if self.chat => {
                let system = self.system.iter().map(Message::system);
                let messages: Vec<_> = system.chain([Message::user(text)]).collect();
                tokenizer()?.chat()?.prompt(&messages)?
            }
            PromptSource::Text(text) => tokenizer()?.input(&text)?,
        };
        let mut input = ModelInput::default();
        for path in &self.images {
            let shown = path.display();
            let data = std::fs::read(environment.path(path));
            let data = data.map_err(|error| CommandError::file("read", &shown, &error))?;
            let format = match path.extension().and_then(|end| end.to_str()) {
                Some("jpg") => Some(ImageFormat::Jpeg),
                end => end.and_then(ImageFormat::from_name),
            };
            let format = format.ok_or_else(|| {
                CommandError::usage(format!("unsupported image format: {shown}"))
                    .hint("Pass a file that ends in .png, .jpg or .jpeg.")
            })?;
            input = input.image(data, format);
        }
        input.chunks.extend(text.chunks);
        if input.is_empty() {
            return Err(CommandError::usage("the prompt is empty").hint(GIVE_PROMPT));
        }
        Ok(input)
    }
}

/// Reads standard input to its end.
pub(crate) async fn stdin_text(context: &CommandContext<'_>) -> Result<String, CommandError> {
    let text = context.environment.input.clone().rest().await;
    text.map_err(|error| CommandError::file("read", "standard input", &error))
}

/// Parses token ids from JSON: a list, or an object with a list under `tokens`.
fn parse_tokens(text: &str) -> Option<Tokens> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum TokenFile {
        List(Vec<u32>),
        Object { tokens: Vec<u32> },
    }
    match serde_json::from_str(text).ok()? {
        TokenFile::List(tokens) | TokenFile::Object { tokens } => Some(Tokens::from(tokens)),
    }
}
