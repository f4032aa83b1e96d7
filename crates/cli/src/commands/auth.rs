//! `tinkex auth`: logs in and out, and manages stored API keys.

use clap::Subcommand;
use serde_json::{Value, json};
use tinkex::rest::ApiKeyInfo;
use tinkex::{CredentialStore, StoredKey, StoredKeyKind};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format::{self, escape_controls};
use crate::table::Table;

/// Web console in which users manage their keys.
const CONSOLE: &str = "https://tinker.thinkingmachines.ai";

#[derive(Debug, Subcommand)]
pub(crate) enum AuthCommand {
    /// Validate an API key and store it
    #[command(
        after_help = "The key is stored in ~/.tinker/credentials.json, readable only by you. The Python tools
use the same file.

Examples:
  tinkex auth login
  tinkex auth login --key-stdin < key.txt      log in from a script
  tinkex auth login --add                      store another key, see `tinkex auth use`"
    )]
    Login {
        /// Read the key from standard input without a prompt
        #[arg(long)]
        key_stdin: bool,
        /// Keep the other stored keys and make this one the default
        #[arg(long)]
        add: bool,
    },
    /// Remove a stored key
    #[command(after_help = "Examples:
  tinkex auth logout
  tinkex auth logout 42")]
    Logout {
        /// Id of the key, see `tinkex auth list` [default: the default key]
        key_id: Option<String>,
    },
    /// Check whether a credential is available and accepted
    #[command(after_help = "Example:
  tinkex auth status && echo ready")]
    Status,
    /// Show the user and organization of the credential
    #[command(after_help = "Example:
  tinkex auth whoami --json")]
    Whoami,
    /// List the stored keys, without their secrets
    #[command(after_help = "Example:
  tinkex auth list")]
    List,
    /// Choose the default key
    #[command(after_help = "Examples:
  tinkex auth list
  tinkex auth use 42

To use a key in one profile only: tinkex config set --profile work key_id 42")]
    Use {
        /// Id of the key, see `tinkex auth list`
        key_id: String,
    },
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: AuthCommand,
) -> Result<Exit, CommandError> {
    match command {
        AuthCommand::Login { key_stdin, add } => login(context, key_stdin, add).await?,
        AuthCommand::Logout { key_id } => logout(context, key_id).await?,
        AuthCommand::Status => return status(context).await,
        AuthCommand::Whoami => whoami(context).await?,
        AuthCommand::List => list(context)?,
        AuthCommand::Use { key_id } => set_default(context, &key_id)?,
    }
    Ok(Exit::Success)
}

async fn login(
    context: &mut CommandContext<'_>,
    key_stdin: bool,
    add: bool,
) -> Result<(), CommandError> {
    let mut store = CredentialStore::load(&context.environment.variables)?;
    if let Some(key) = store.default_key().filter(|_| !add) {
        let message = format!("already logged in with the key {:?}", key.name);
        return Err(CommandError::new(Exit::Failed, message)
            .hint("Log out with `tinkex auth logout`, or pass --add to store another key."));
    }
    reject_local(context)?;
    let interactive = context.environment.terminals.input && !key_stdin;
    let key = if interactive {
        ask_key(context).await?
    } else {
        context.environment.input.line().await?
    };
    let key = key.unwrap_or_default();
    let key = key.trim();
    if key.is_empty() {
        let message = "no API key entered";
        return Err(CommandError::new(Exit::Credentials, message)
            .hint(format!("Create a key at {CONSOLE}/keys.")));
    }
    let client = context.settings.client_with_key(context.environment, key)?;
    let checked = client.rest().get_api_key().await;
    let info = checked
        .map_err(|error| CommandError::from(error).context("cannot validate the API key"))?;
    let ApiKeyInfo { key_id, name, note, details, .. } = info;
    let email = details.user_details.email.clone();
    let org = details.org_details.name.clone();
    let stored = StoredKey {
        kind: StoredKeyKind::Manual,
        key: key.into(),
        name: name.clone(),
        note: Some(note).filter(|note| !note.is_empty()),
        details: Some(details),
    };
    store.insert(key_id.to_string(), stored);
    store.save()?;
    let text = format!(
        "Logged in as {} ({}). Stored API key '{}' as the default credential.",
        escape_controls(&email),
        escape_controls(&org),
        escape_controls(&name)
    );
    let json = json!({ "key_id": key_id.to_string(), "name": name, "email": email,
        "organization": org });
    context.text(&text, &json)
}

/// Prompts for an API key, echoed as stars.
async fn ask_key(context: &mut CommandContext<'_>) -> Result<Option<String>, CommandError> {
    let url = format!("{CONSOLE}/keys?new_key=true&key_name=tinker-cli-{}", host_name());
    let link = context.link(&url);
    context.styled_prompt(&format!("Create an API Key: {link}\n\n"));
    let echo = context.prompt_writer();
    let typed = context.environment.input.clone().secret("Paste your API key: ", echo).await;
    context.prompt("\n");
    match typed {
        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
            Err(CommandError::interrupted())
        }
        other => Ok(other?),
    }
}

/// Returns the host name, reduced to the characters that a key's name may contain.
fn host_name() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let name = String::from("host");
    let short = name.split('.').next().unwrap_or_default();
    short.chars().filter(|letter| letter.is_ascii_alphanumeric() || *letter == '-').collect()
}

async fn logout(
    context: &mut CommandContext<'_>,
    key_id: Option<String>,
) -> Result<(), CommandError> {
    let mut store = CredentialStore::load(&context.environment.variables)?;
    let id = key_id.clone().or_else(|| store.default_id().map(str::to_owned));
    let Some((id, key)) = id.and_then(|id| Some((id.clone(), store.remove(&id)?))) else {
        return Err(match key_id {
            Some(id) => no_such_key(&id),
            None => CommandError::new(
                Exit::Credentials,
                "not logged in: no default credential is stored",
            )
            .hint("Log in with `tinkex auth login`."),
        });
    };
    let org = key.details.as_ref().map(|details| details.org_details.name.clone());
    let name = escape_controls(&key.name);
    let page = format!("{CONSOLE}/keys/{id}");
    let json = |revoked: bool| {
        json!({ "key_id": id, "name": key.name, "organization": org,
            "deleted_on_server": revoked, "console": page })
    };
    if key.kind == StoredKeyKind::Manual {
        store.save()?;
        let shown = org
            .as_deref()
            .map_or("unknown (not stored with this credential)".into(), escape_controls);
        let text = format!(
            "Removed credential '{name}'. The API key is still active.\n\
             API key organization: {shown}\nDelete api key here: {}",
            context.link_in_result(&page)
        );
        return context.styled_text(&text, &json(false));
    }
    // A login created this key for the command line alone, so it is deleted on the server too.
    reject_local(context)?;
    let client = context.settings.client_with_key(context.environment, key.key.expose())?;
    let revoked = client.rest().delete_api_key().await;
    store.save()?;
    match revoked {
        Ok(()) => {
            let text =
                format!("Removed credential '{name}' and deleted its API key on the server.");
            context.text(&text, &json(true))
        }
        Err(error) => {
            let owner = org.as_deref().map_or("an unknown organization".into(), escape_controls);
            let what = format!(
                "removed credential '{name}', but its API key {id} of {owner} is still active: \
                 cannot delete it on the server"
            );
            Err(CommandError::from(error).partial(&what).hint(format!("Delete the key at {page}.")))
        }
    }
}

/// Rejects `--local`: stored keys belong to another server and must not be sent to the local one.
fn reject_local(context: &CommandContext<'_>) -> Result<(), CommandError> {
    if !context.settings.local {
        return Ok(());
    }
    Err(CommandError::usage("the key of the local server is found automatically")
        .hint("Omit --local. If the profile sets it, pass the server of the key with --base-url."))
}

fn no_such_key(id: &str) -> CommandError {
    CommandError::new(Exit::NotFound, format!("no stored key {id:?}"))
        .hint("List the stored keys with `tinkex auth list`.")
}

/// Prints the status as a result, and returns the error if the server is not accessible.
async fn status(context: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    context.start_local().await?;
    let mut available = true;
    let checked = match context.settings.client_without_retries(context.environment) {
        Ok(client) => client.server_capabilities().await.map(|_| ()).map_err(CommandError::from),
        Err(error) => {
            available = false;
            Err(error)
        }
    };
    let word = |yes: bool| if yes { "yes" } else { "no" };
    let mut text = format!("Credentials available: {}", word(available));
    if available {
        text += &format!("\nTinker accessible: {}", word(checked.is_ok()));
    }
    let json = json!({ "credentials_available": available, "tinker_accessible": checked.is_ok() });
    context.text(&text, &json)?;
    checked.map(|()| Exit::Success)
}

async fn whoami(context: &mut CommandContext<'_>) -> Result<(), CommandError> {
    let who = context.client().await?.whoami().await?;
    let mut table = Table::of_properties();
    let email = who.email.filter(|email| !email.is_empty());
    table.property("Email", format::or_na(email.as_ref()));
    table.property("User", &who.user_urn);
    table.property("Organization", &who.org_urn);
    let json = json!({ "user_urn": who.user_urn, "org_urn": who.org_urn, "email": email });
    context.table(&table, &json)
}

fn list(context: &mut CommandContext<'_>) -> Result<(), CommandError> {
    let store = CredentialStore::load(&context.environment.variables)?;
    let mut table = Table::new(["Key ID", "Name", "In Use", "Organization", "Email", "Note"]);
    let mut keys: Vec<Value> = Vec::new();
    for (id, key) in store.keys() {
        let details = key.details.as_ref();
        let used = store.default_id() == Some(id);
        let org = details.map(|details| details.org_details.name.as_str());
        let email = details.map(|details| details.user_details.email.as_str());
        table.row([
            id.to_owned(),
            key.name.clone(),
            format::yes_no(used).to_owned(),
            format::or_na(org),
            format::or_na(email),
            key.note.clone().unwrap_or_default(),
        ]);
        keys.push(json!({ "key_id": id, "name": key.name, "default": used, "organization": org,
            "email": email, "note": key.note }));
    }
    context.table(&table, &json!({ "keys": keys }))
}

fn set_default(context: &mut CommandContext<'_>, id: &str) -> Result<(), CommandError> {
    let mut store = CredentialStore::load(&context.environment.variables)?;
    let key = store.keys().find(|(known, _)| *known == id).map(|(_, key)| key.clone());
    let key = key.ok_or_else(|| no_such_key(id))?;
    let name = key.name.clone();
    store.insert(id, key);
    store.save()?;
    context.confirm_change(
        &format!("The default key is now '{}'.", escape_controls(&name)),
        &json!({
            "key_id": id, "name": name,
        }),
    )
}
