//! Who the user is: keys, and where they are kept.

use clap::Subcommand;
use serde_json::{Value, json};
use tinkex::wire::ApiKeyInfo;
use tinkex::{CredentialStore, StoredKey, StoredKeyKind};

use crate::error::{CommandError, Exit};
use crate::format::{self, visible};
use crate::output::Shell;
use crate::table::Table;

/// Where people manage their keys.
const CONSOLE: &str = "https://tinker.thinkingmachines.ai";

#[derive(Debug, Subcommand)]
pub(crate) enum AuthCommand {
    /// Check an API key and store it
    #[command(
        after_help = "The key goes to ~/.tinker/credentials.json, which only you can read; the
Python tools use the same file.

Examples:
  tinkex auth login
  tinkex auth login --key-stdin < key.txt      in a script
  tinkex auth login --add                      one more key, see `tinkex auth use`"
    )]
    Login {
        /// Read the key from standard input, without a question
        #[arg(long)]
        key_stdin: bool,
        /// Store it beside the keys that are there, and use it from now on
        #[arg(long)]
        add: bool,
    },
    /// Remove a stored key: the one in use, or another
    #[command(after_help = "Examples:
  tinkex auth logout
  tinkex auth logout 42")]
    Logout {
        /// Which, see `tinkex auth list`
        key_id: Option<String>,
    },
    /// Whether there is a credential, and whether the server takes it
    #[command(after_help = "Example:
  tinkex auth status && echo ready")]
    Status,
    /// Whose credential it is
    #[command(after_help = "Example:
  tinkex auth whoami --json")]
    Whoami,
    /// List the stored keys, without the keys themselves
    #[command(after_help = "Example:
  tinkex auth list")]
    List,
    /// Use another of the stored keys from now on
    #[command(after_help = "Examples:
  tinkex auth list
  tinkex auth use 42

A profile can name a key of its own: tinkex config set --profile work key_id 42")]
    Use {
        /// Which, see `tinkex auth list`
        key_id: String,
    },
}

pub(super) async fn run(shell: &mut Shell<'_>, command: AuthCommand) -> Result<Exit, CommandError> {
    match command {
        AuthCommand::Login { key_stdin, add } => login(shell, key_stdin, add).await?,
        AuthCommand::Logout { key_id } => logout(shell, key_id).await?,
        AuthCommand::Status => return status(shell).await,
        AuthCommand::Whoami => whoami(shell).await?,
        AuthCommand::List => list(shell)?,
        AuthCommand::Use { key_id } => choose(shell, &key_id)?,
    }
    Ok(Exit::Success)
}

async fn login(shell: &mut Shell<'_>, key_stdin: bool, add: bool) -> Result<(), CommandError> {
    let mut store = CredentialStore::load(&shell.environment.variables)?;
    if let Some(key) = store.default_key().filter(|_| !add) {
        let why = format!("you are logged in already, with the key {:?}", key.name);
        return Err(CommandError::new(Exit::Failed, why)
            .hint("log out first with `tinkex auth logout`, or store one more with --add"));
    }
    refuse_local(shell)?;
    let asked = shell.environment.terminals.input && !key_stdin;
    let key = if asked { ask(shell).await? } else { shell.environment.input.line().await? };
    let key = key.unwrap_or_default();
    let key = key.trim();
    if key.is_empty() {
        let why = "no API key was given";
        return Err(CommandError::new(Exit::Credentials, why)
            .hint(format!("create one at {CONSOLE}/keys and paste it")));
    }
    let client = shell.settings.client_with_key(shell.environment, key)?;
    let checked = client.rest().get_api_key().await;
    let info =
        checked.map_err(|why| CommandError::from(why).during("the API key was not stored"))?;
    let ApiKeyInfo { key_id, name, note, details, .. } = info;
    let (email, org) = (details.user_details.email.clone(), details.org_details.name.clone());
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
        visible(&email),
        visible(&org),
        visible(&name)
    );
    let json = json!({ "key_id": key_id.to_string(), "name": name, "email": email,
        "organization": org });
    shell.text(&text, &json)
}

/// Says where keys come from, and lets the user paste one that nobody else can read.
async fn ask(shell: &mut Shell<'_>) -> Result<Option<String>, CommandError> {
    let url = format!("{CONSOLE}/keys?new_key=true&key_name=tinker-cli-{}", host());
    let link = shell.link(&url);
    shell.say(&format!("Create an API Key: {link}\n\n"));
    let echo = shell.stderr();
    let typed = shell.environment.input.clone().secret("Paste your API key: ", echo).await;
    shell.say("\n");
    match typed {
        Err(why) if why.kind() == std::io::ErrorKind::Interrupted => {
            Err(CommandError::interrupted())
        }
        other => Ok(other?),
    }
}

/// The name of this machine, as far as it can be part of a key's name.
fn host() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let name = String::from("host");
    let short = name.split('.').next().unwrap_or_default();
    short.chars().filter(|letter| letter.is_ascii_alphanumeric() || *letter == '-').collect()
}

async fn logout(shell: &mut Shell<'_>, key_id: Option<String>) -> Result<(), CommandError> {
    let mut store = CredentialStore::load(&shell.environment.variables)?;
    let id = key_id.clone().or_else(|| store.default_id().map(str::to_owned));
    let Some((id, key)) = id.and_then(|id| Some((id.clone(), store.remove(&id)?))) else {
        return Err(match key_id {
            Some(id) => no_such_key(&id),
            None => CommandError::new(Exit::Credentials, "no default credential is stored")
                .hint("there is nothing to log out from; `tinkex auth login` logs in"),
        });
    };
    let org = key.details.as_ref().map(|details| details.org_details.name.clone());
    let (name, page) = (visible(&key.name), format!("{CONSOLE}/keys/{id}"));
    let json = |revoked: bool| {
        json!({ "key_id": id, "name": key.name, "organization": org,
            "deleted_on_server": revoked, "console": page })
    };
    if key.kind == StoredKeyKind::Manual {
        store.save()?;
        let shown =
            org.as_deref().map_or("unknown (not stored with this credential)".into(), visible);
        let text = format!(
            "Removed credential '{name}'. The API key is still active.\n\
             API key organization: {shown}\nDelete api key here: {}",
            shell.link_in_result(&page)
        );
        return shell.text(&text, &json(false));
    }
    // A login made it; nobody will need it any more.
    refuse_local(shell)?;
    let client = shell.settings.client_with_key(shell.environment, key.key.expose())?;
    let revoked = client.rest().delete_api_key().await;
    store.save()?;
    match revoked {
        Ok(()) => {
            let text =
                format!("Removed credential '{name}' and deleted its API key on the server.");
            shell.text(&text, &json(true))
        }
        Err(why) => {
            let whose = org.as_deref().map_or("an unknown organization".into(), visible);
            let what = format!(
                "the credential '{name}' is removed here, but its API key {id} of {whose} is still \
                 active: the server could not be told"
            );
            Err(CommandError::from(why).partly(&what).hint(format!("delete it at {page}")))
        }
    }
}

/// A stored key belongs to another server than the one on this machine, and neither may see what is
/// meant for the other.
fn refuse_local(shell: &Shell<'_>) -> Result<(), CommandError> {
    if !shell.settings.local {
        return Ok(());
    }
    Err(CommandError::usage("the local server needs no key")
        .hint("leave --local out; if the profile says it, name the key's server with --base-url"))
}

fn no_such_key(id: &str) -> CommandError {
    CommandError::new(Exit::NotFound, format!("there is no stored key {id:?}"))
        .hint("`tinkex auth list` shows them")
}

/// A result with two lines, and the reason if one of them is a no.
async fn status(shell: &mut Shell<'_>) -> Result<Exit, CommandError> {
    shell.start_local().await?;
    let mut available = true;
    let tried = match shell.settings.client_for_one_try(shell.environment) {
        Ok(client) => client.server_capabilities().await.map(|_| ()).map_err(CommandError::from),
        Err(why) => {
            available = false;
            Err(why)
        }
    };
    let word = |yes: bool| if yes { "yes" } else { "no" };
    let mut text = format!("Credentials available: {}", word(available));
    if available {
        text += &format!("\nTinker accessible: {}", word(tried.is_ok()));
    }
    let json = json!({ "credentials_available": available, "tinker_accessible": tried.is_ok() });
    shell.text(&text, &json)?;
    tried.map(|()| Exit::Success)
}

async fn whoami(shell: &mut Shell<'_>) -> Result<(), CommandError> {
    let who = shell.client().await?.whoami().await?;
    let mut table = Table::of_properties();
    let email = who.email.filter(|email| !email.is_empty());
    table.property("Email", format::or_missing(email.as_ref()));
    table.property("User", &who.user_urn);
    table.property("Organization", &who.org_urn);
    let json = json!({ "user_urn": who.user_urn, "org_urn": who.org_urn, "email": email });
    shell.table(&table, &json)
}

fn list(shell: &mut Shell<'_>) -> Result<(), CommandError> {
    let store = CredentialStore::load(&shell.environment.variables)?;
    let mut table = Table::new(["Key ID", "Name", "In Use", "Organization", "Email", "Note"]);
    let mut keys: Vec<Value> = Vec::new();
    for (id, key) in store.keys() {
        let (details, used) = (key.details.as_ref(), store.default_id() == Some(id));
        let org = details.map(|details| details.org_details.name.as_str());
        let email = details.map(|details| details.user_details.email.as_str());
        table.row([
            id.to_owned(),
            key.name.clone(),
            format::yes(used).to_owned(),
            format::or_missing(org),
            format::or_missing(email),
            key.note.clone().unwrap_or_default(),
        ]);
        keys.push(json!({ "key_id": id, "name": key.name, "default": used, "organization": org,
            "email": email, "note": key.note }));
    }
    shell.table(&table, &json!({ "keys": keys }))
}

fn choose(shell: &mut Shell<'_>, id: &str) -> Result<(), CommandError> {
    let mut store = CredentialStore::load(&shell.environment.variables)?;
    let key = store.keys().find(|(known, _)| *known == id).map(|(_, key)| key.clone());
    let key = key.ok_or_else(|| no_such_key(id))?;
    let name = key.name.clone();
    store.insert(id, key);
    store.save()?;
    shell.done(
        &format!("Using the key '{}' from now on.", visible(&name)),
        &json!({
            "key_id": id, "name": name,
        }),
    )
}
