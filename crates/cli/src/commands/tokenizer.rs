//! Text to tokens and back, on this machine.

use clap::{Args, Subcommand};
use serde_json::json;

use crate::error::CommandError;
use crate::format;
use crate::output::Shell;
use crate::table::Table;

use super::prompt::stdin_text;
use super::{sample, weights};

/// What can be typed after `tokenizer`.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenizerCommand {
    /// The tokens of a text
    #[command(after_help = "Examples:
  tinkex tokenizer encode Qwen/Qwen3-8B 'Hello there'
  tinkex tokenizer encode ./model --format plain < text.txt")]
    Encode {
        #[command(flatten)]
        which: TokenizerArgs,
        /// The text; without it, or with -, standard input
        #[arg(allow_hyphen_values = true)]
        text: Option<String>,
        /// Only the text's own tokens, without what begins every text
        #[arg(long)]
        piece: bool,
    },
    /// The text of tokens
    #[command(after_help = "Example:
  tinkex tokenizer decode Qwen/Qwen3-8B 9707 1052")]
    Decode {
        #[command(flatten)]
        which: TokenizerArgs,
        /// Token ids; without any, standard input
        #[arg(value_delimiter = ',')]
        tokens: Vec<u32>,
        /// Leave out special tokens
        #[arg(long)]
        skip_special: bool,
    },
    /// What a tokenizer is like
    #[command(after_help = "Example:
  tinkex tokenizer info Qwen/Qwen3-8B")]
    Info {
        #[command(flatten)]
        which: TokenizerArgs,
    },
}

/// TokenizerArgs tokenizer.
#[derive(Debug, Args)]
pub(crate) struct TokenizerArgs {
    /// A model's name, or a folder with a tokenizer.json
    #[arg(value_name = "MODEL")]
    model: String,
    /// Never ask the hub; only folders and the cache
    #[arg(long)]
    offline: bool,
}

pub(super) async fn run(
    shell: &mut Shell<'_>,
    command: TokenizerCommand,
) -> Result<(), CommandError> {
    let (TokenizerCommand::Encode { which, .. }
    | TokenizerCommand::Decode { which, .. }
    | TokenizerCommand::Info { which }) = &command;
    let (env, name) = (shell.environment.variables.clone(), which.model.clone());
    let tokenizer = weights::tokenizer(&env, &name, which.offline).await?;
    match command {
        TokenizerCommand::Encode { text, piece, .. } => {
            let text = match text {
                Some(text) if text != "-" => text,
                _ => {
                    let text = stdin_text(shell).await?;
                    text.strip_suffix('\n').unwrap_or(&text).to_owned()
                }
            };
            let encoded =
                if piece { tokenizer.encode_piece(&text) } else { tokenizer.encode(&text) };
            let tokens = encoded?;
            let pieces = tokens.iter().map(|id| sample::piece(Some(&tokenizer), *id));
            let pieces: Vec<_> = pieces.collect();
            let ids = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let document = json!({
                "model": name, "tokens": &tokens[..], "count": tokens.len(), "pieces": pieces,
            });
            shell.text(&ids, &document)
        }
        TokenizerCommand::Decode { mut tokens, skip_special, .. } => {
            if tokens.is_empty() {
                tokens = numbers(&stdin_text(shell).await?)?;
            }
            let lacks: Vec<_> =
                tokens.iter().filter(|id| tokenizer.token(**id).is_none()).collect();
            if !lacks.is_empty() {
                let ids = lacks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                shell.notice(&format!("left out, as the vocabulary lacks them: {ids}"));
            }
            let text = if skip_special {
                tokenizer.decode_text(&tokens)
            } else {
                tokenizer.decode(&tokens)
            };
            let text = text?;
            shell.text(&text, &json!({ "model": name, "text": text }))
        }
        TokenizerCommand::Info { .. } => {
            let special = [
                ("begin", tokenizer.bos_id()),
                ("end", tokenizer.eos_id()),
                ("pad", tokenizer.pad_id()),
            ];
            let mut table = Table::of_properties().title(format!("Tokenizer: {name}"));
            table.property("Found at", tokenizer.name());
            table.property("Vocabulary", tokenizer.vocab_size().to_string());
            for (what, id) in special {
                let shown = id.map(|id| format!("{} ({id})", sample::piece(Some(&tokenizer), id)));
                table.property(&format!("Token: {what}"), format::or_missing(shown));
            }
            table.property("Chat template", format::yes(tokenizer.has_chat_template()));
            let document = json!({
                "model": name,
                "found_at": tokenizer.name(),
                "vocab_size": tokenizer.vocab_size(),
                "bos_id": tokenizer.bos_id(),
                "eos_id": tokenizer.eos_id(),
                "pad_id": tokenizer.pad_id(),
                "has_chat_template": tokenizer.has_chat_template(),
            });
            shell.table(&table, &document)
        }
    }
}

/// Numbers with commas or spaces between them, or a JSON list.
fn numbers(text: &str) -> Result<Vec<u32>, CommandError> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace() || c == '[' || c == ']');
    let one = |word: &str| {
        word.parse().map_err(|_| {
            CommandError::usage(format!("{word:?} is no token id")).hint("give numbers with commas")
        })
    };
    words.filter(|word| !word.is_empty()).map(one).collect()
}
