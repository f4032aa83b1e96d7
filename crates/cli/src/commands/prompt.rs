//! What a model is to read: text, tokens, or pictures.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;
use tinkex::wire::ImageFormat;
use tinkex::{Message, ModelInput, Tokenizer, Tokens};

use crate::environment::Environment;
use crate::error::CommandError;
use crate::output::Shell;

/// What a model is to read.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// The text to go on from; - reads standard input
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file with the text, or with token ids as JSON; - reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Token ids in place of text, with commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with_all = ["prompt", "prompt_file"])]
    tokens: Vec<u32>,
    /// A picture that stands before the text (PNG or JPEG); may be repeated
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// The text is a message to the model, which answers; otherwise it is gone on with
    #[arg(long)]
    chat: bool,
    /// What the model is told before the message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
}

/// A prompt as it was given.
pub(crate) enum PromptSource {
    Text(String),
    Tokens(Tokens),
}

impl PromptArgs {
    /// Whether the answer ends as an answer in a conversation does.
    pub(crate) fn is_chat(&self) -> bool {
        self.chat
    }

    /// Reads what was given, before anything is asked of a server.
    pub(crate) async fn read(&self, shell: &mut Shell<'_>) -> Result<PromptSource, CommandError> {
        if !self.tokens.is_empty() {
            if self.chat {
                return Err(CommandError::usage("--chat needs text, and there are only tokens")
                    .hint("leave --chat out, or give --prompt"));
            }
            return Ok(PromptSource::Tokens(Tokens::from(self.tokens.clone())));
        }
        let stdin = Path::new("-");
        let text = match (&self.prompt, &self.prompt_file) {
            (Some(text), _) if text != "-" => return Ok(PromptSource::Text(text.clone())),
            (_, Some(path)) if path != stdin => {
                std::fs::read_to_string(shell.environment.path(path))
                    .map_err(|why| CommandError::file("read", &path.display().to_string(), &why))?
            }
            (None, None) if shell.environment.terminals.input => {
                return Err(CommandError::usage("there is no prompt")
                    .hint("say --prompt TEXT, or --prompt-file FILE, or pipe it in"));
            }
            _ => stdin_text(shell).await?,
        };
        Ok(match tokens(&text) {
            Some(tokens) if self.prompt_file.is_some() && !self.chat => {
                PromptSource::Tokens(tokens)
            }
            // An editor ends a file with a newline that nobody meant.
            _ => PromptSource::Text(text.strip_suffix('\n').unwrap_or(&text).to_owned()),
        })
    }

    /// What a model reads of it.
    pub(crate) fn input(
        &self,
        environment: &Environment,
        given: PromptSource,
        tokenizer: impl FnOnce() -> Result<Tokenizer, CommandError>,
    ) -> Result<ModelInput, CommandError> {
        let text = match given {
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
            let shown = path.display().to_string();
            let data = std::fs::read(environment.path(path));
            let data = data.map_err(|why| CommandError::file("read", &shown, &why))?;
            let format = match path.extension().and_then(|end| end.to_str()) {
                Some("jpg") => Some(ImageFormat::Jpeg),
                end => end.and_then(ImageFormat::from_name),
            };
            let format = format.ok_or_else(|| {
                CommandError::usage(format!("{shown} is no picture that can be sent"))
                    .hint("give a file that ends in .png or .jpeg")
            })?;
            input = input.image(data, format);
        }
        input.chunks.extend(text.chunks);
        if input.is_empty() {
            return Err(CommandError::usage("the prompt is empty")
                .hint("say --prompt TEXT, or --prompt-file FILE, or pipe it in"));
        }
        Ok(input)
    }
}

/// All of standard input.
pub(crate) async fn stdin_text(shell: &Shell<'_>) -> Result<String, CommandError> {
    let text = shell.environment.input.clone().rest().await;
    text.map_err(|why| CommandError::file("read", "standard input", &why))
}

/// Token ids as JSON: a list, or an object with one.
fn tokens(text: &str) -> Option<Tokens> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        List(Vec<u32>),
        Object { tokens: Vec<u32> },
    }
    match serde_json::from_str(text).ok()? {
        Form::List(tokens) | Form::Object { tokens } => Some(Tokens::from(tokens)),
    }
}
