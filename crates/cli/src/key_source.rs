//! [`KeySource`]: the flag, file or stored credential that supplies the API key.

use std::path::PathBuf;

use tinkex::{
    ApiKey, CredentialStore, Env, ErrorKind, Secret, ServiceClient, ServiceClientBuilder,
};

use crate::args::Globals;
use crate::environment::Environment;
use crate::error::{CommandError, Exit};

/// Source of the API key.
#[derive(Debug)]
pub(crate) enum KeySource {
    /// The file of `--api-key-file`.
    File(PathBuf),
    /// The value of `--api-key`.
    Flag(Secret),
    /// The key of the local server.
    LocalServer(Secret),
    /// Id of the stored key that the profile selects.
    Stored(String),
    /// The SDK's own lookup: environment variables, then the default stored key.
    Default,
}

/// API key that the command line passes to the SDK.
pub(crate) struct ExplicitKey {
    key: String,
    /// Flag, file or id that supplied the key, for messages.
    source: String,
}

impl KeySource {
    /// Chooses the source: the flags, then the environment variables, then the stored key with the
    /// id that the profile selects, then the default stored key.
    pub(crate) fn choose(env: &Env, globals: &Globals, profile_key_id: Option<String>) -> Self {
        let variables = ["TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"];
        let env_has_key = variables.iter().any(|name| env.get(name).is_some());
        match (&globals.api_key_file, &globals.api_key, profile_key_id) {
            (Some(file), _, _) => Self::File(file.clone()),
            (None, Some(key), _) => Self::Flag(key.clone()),
            (None, None, Some(id)) if !env_has_key => Self::Stored(id),
            _ => Self::Default,
        }
    }

    /// Reads the key. Returns `None` if the SDK looks it up itself.
    ///
    /// # Errors
    ///
    /// If the key cannot be read or is empty. The SDK would skip an empty key and use another one.
    pub(crate) fn read(
        &self,
        environment: &Environment,
    ) -> Result<Option<ExplicitKey>, CommandError> {
        let (key, source) = match self {
            Self::File(file) => {
                let shown = format!("API key file {}", file.display());
                let text = std::fs::read_to_string(environment.path(file))
                    .map_err(|error| CommandError::file("read", &shown, &error))?;
                (text.trim().to_owned(), shown)
            }
            Self::Flag(key) => (key.expose().to_owned(), "--api-key".to_owned()),
            Self::LocalServer(key) => (key.expose().to_owned(), "local server".to_owned()),
            Self::Stored(id) => {
                (stored_key(&environment.variables, id)?, format!("stored key {id:?}"))
            }
            Self::Default => return Ok(None),
        };
        if key.is_empty() {
            return Err(CommandError::new(Exit::Credentials, format!("{source} is empty"))
                .hint("Pass an API key that starts with tml-, or omit the option."));
        }
        Ok(Some(ExplicitKey { key, source }))
    }
}

impl ExplicitKey {
    /// Builds a client with this key. Sends no request.
    ///
    /// # Errors
    ///
    /// If the SDK rejects the key, the message names its source:
    /// `--api-key: API key does not start with tml-`.
    pub(crate) fn build(self, client: ServiceClientBuilder) -> Result<ServiceClient, CommandError> {
        let Self { key, source } = self;
        let is_invalid = ApiKey::new(&*key).is_err();
        client.api_key(key).build().map_err(|error| match error.kind() {
            ErrorKind::Auth if is_invalid => CommandError::from(error).context(&source),
            _ => error.into(),
        })
    }
}

/// Returns the stored API key with this id.
fn stored_key(env: &Env, id: &str) -> Result<String, CommandError> {
    let store = CredentialStore::load(env)?;
    let key = store.keys().find(|(known, _)| *known == id);
    key.map(|(_, key)| key.key.expose().to_owned()).ok_or_else(|| {
        let message = format!("the profile's key {id:?} is not stored");
        CommandError::new(Exit::Credentials, message).hint(
            "List the stored keys with `tinkex auth list` and choose one with `tinkex config set \
             key_id ID`.",
        )
    })
}
