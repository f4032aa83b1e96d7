//! `tinkex tokenizer`: converts text to tokens and back, without a server.

use clap::{Args, Subcommand};
use serde_json::json;

use crate::args::whole_number;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::table::Table;

use super::prompt::stdin_text;
use super::{sample, weights};

#[derive(Debug, Subcommand)]
pub(crate) enum TokenizerCommand {
    /// Convert text to token ids
    #[command(after_help = "Examples:
  tinkex tokenizer encode Qwen/Qwen3-8B 'Hello there'
  tinkex tokenizer encode ./model --format plain < text.txt")]
    Encode {
        #[command(flatten)]
        tokenizer: TokenizerArgs,
        /// Text to encode [default: standard input]
        #[arg(allow_hyphen_values = true)]
        text: Option<String>,
        /// Omit the tokens that start every text, such as a BOS token
        #[arg(long)]
        piece: bool,
    },
    /// Convert token ids to text
    #[command(after_help = "Example:
  tinkex tokenizer decode Qwen/Qwen3-8B 9707 1052")]
    Decode {
        #[command(flatten)]
        tokenizer: TokenizerArgs,
        /// Token ids [default: standard input]
        #[arg(value_delimiter = ',', value_parser = whole_number::<u32>)]
        tokens: Vec<u32>,
        /// Omit special tokens
        #[arg(long)]
        skip_special: bool,
    },
    /// Show the properties of a tokenizer
    #[command(after_help = "Example:
  tinkex tokenizer info Qwen/Qwen3-8B")]
    Info {
        #[command(flatten)]
        tokenizer: TokenizerArgs,
    },
}

/// Selects a tokenizer.
#[derive(Debug, Args)]
pub(crate) struct TokenizerArgs {
    /// Name of a model on the hub, or a folder that contains tokenizer.json
    #[arg(value_name = "MODEL")]
    model: String,
    /// Use only folders and the hub cache, never the network
    #[arg(long)]
    offline: bool,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: TokenizerCommand,
) -> Result<(), CommandError> {
    let (TokenizerCommand::Encode { tokenizer: args, .. }
    | TokenizerCommand::Decode { tokenizer: args, .. }
    | TokenizerCommand::Info { tokenizer: args }) = &command;
    let env = context.environment.variables.clone();
    let name = args.model.clone();
    let tokenizer = weights::load_tokenizer(&env, &name, args.offline).await?;
    match command {
        TokenizerCommand::Encode { text, piece, .. } => {
            let text = match text {
                Some(text) if text != "-" => text,
                _ => {
                    let text = stdin_text(context).await?;
                    text.strip_suffix('\n').unwrap_or(&text).to_owned()
                }
            };
            let encoded =
                if piece { tokenizer.encode_piece(&text) } else { tokenizer.encode(&text) };
            let tokens = encoded?;
            let pieces = tokens.iter().map(|id| sample::token_text(&tokenizer, *id));
            let pieces: Vec<_> = pieces.collect();
            let ids = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let document = json!({
                "model": name, "tokens": &tokens[..], "count": tokens.len(), "pieces": pieces,
            });
            context.text(&ids, &document)
        }
        TokenizerCommand::Decode { mut tokens, skip_special, .. } => {
            if tokens.is_empty() {
                tokens = parse_ids(&stdin_text(context).await?)?;
            }
            let unknown: Vec<_> =
                tokens.iter().filter(|id| tokenizer.token(**id).is_none()).collect();
            if !unknown.is_empty() {
                let ids = unknown.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                context.notice(&format!("ignoring ids that are not in the vocabulary: {ids}"));
            }
            let text = if skip_special {
                tokenizer.decode_text(&tokens)
            } else {
                tokenizer.decode(&tokens)
            };
            let text = text?;
            context.text(&text, &json!({ "model": name, "text": text }))
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
            for (name, id) in special {
                let shown =
                    id.map(|id| format!("{} ({id})", sample::quoted_token(Some(&tokenizer), id)));
                table.property(&format!("Token: {name}"), format::or_na(shown));
            }
            table.property("Chat template", format::yes_no(tokenizer.has_chat_template()));
            let document = json!({
                "model": name,
                "found_at": tokenizer.name(),
                "vocab_size": tokenizer.vocab_size(),
                "bos_id": tokenizer.bos_id(),
                "eos_id": tokenizer.eos_id(),
                "pad_id": tokenizer.pad_id(),
                "has_chat_template": tokenizer.has_chat_template(),
            });
            context.table(&table, &document)
        }
    }
}

/// Parses token ids separated by commas or spaces, or as a JSON list.
fn parse_ids(text: &str) -> Result<Vec<u32>, CommandError> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace() || c == '[' || c == ']');
    let parse = |word: &str| {
        word.parse().map_err(|_| {
            CommandError::usage(format!("invalid token id {word:?}"))
                .hint("Separate the ids with commas or spaces.")
        })
    };
    words.filter(|word| !word.is_empty()).map(parse).collect()
}
