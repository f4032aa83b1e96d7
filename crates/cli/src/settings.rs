//! What counts: flags over the environment over the profile, and the client that they make.

use std::path::PathBuf;
use std::time::Duration;

use tinkex::{BaseUrl, CredentialStore, Env, RetryPolicy, ServiceClient, ServiceClientBuilder};

use crate::args::{ColorChoice, Format, Globals};
use crate::config::{ConfigFile, Profile};
use crate::environment::Environment;
use crate::error::{CommandError, Exit};

/// How long a person waits for failures that pass.
const PATIENCE: Duration = Duration::from_secs(60);

/// What counts for this command line.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) format: Format,
    /// Whether results are coloured.
    pub(crate) colours: bool,
    /// Whether a line on standard error may be drawn over itself.
    pub(crate) redraws: bool,
    /// Whether the server is the one on this machine.
    pub(crate) local: bool,
    pub(crate) base_url: Option<BaseUrl>,
    pub(crate) project_id: Option<String>,
    timeout: Option<Duration>,
    /// How long to go on; as the command likes if nobody said.
    retry_for: Option<Duration>,
    wait_for_billing: bool,
    key: KeySource,
}

/// Which credential.
#[derive(Debug)]
enum KeySource {
    File(PathBuf),
    Given(tinkex::Secret),
    /// One of the stored keys.
    Stored(String),
    /// As the client finds it: the environment, then the default of the stored keys.
    Usual,
}

impl Settings {
    /// Puts together what was said. Touches no network.
    pub(crate) fn new(environment: &Environment, globals: &Globals) -> Result<Self, CommandError> {
        let env = &environment.variables;
        let profile = match globals.profile.as_deref().or(env.get("TINKEX_PROFILE")) {
            Some(name) => ConfigFile::load(env)?.profile(name)?,
            None => ConfigFile::load(env)?.usual_profile()?,
        };
        let format = format(env, globals)?;
        Ok(Self::of(environment, globals, format, profile))
    }

    /// The same where the profile makes no sense.
    pub(crate) fn without_profile(environment: &Environment, globals: &Globals) -> Self {
        let format = format(&environment.variables, globals).unwrap_or_default();
        Self::of(environment, globals, format, Profile::default())
    }

    fn of(
        environment: &Environment,
        globals: &Globals,
        format: Option<Format>,
        profile: Profile,
    ) -> Self {
        let env = &environment.variables;
        Self {
            format: format.or(profile.format).unwrap_or(Format::Table),
            colours: escapes(environment, globals, &profile, environment.terminals.out.is_some()),
            redraws: escapes(environment, globals, &profile, environment.terminals.err.is_some())
                && !dumb(env),
            local: globals.local
                || (profile.local == Some(true)
                    && globals.base_url.is_none()
                    && env.get("TINKER_BASE_URL").is_none()),
            base_url: or_else(globals.base_url.clone(), env, "TINKER_BASE_URL", profile.base_url),
            project_id: or_else(
                globals.project_id.clone(),
                env,
                "TINKER_PROJECT_ID",
                profile.project_id,
            ),
            timeout: globals.timeout.or(profile.timeout),
            retry_for: globals.retry_for.or(profile.retry_for),
            wait_for_billing: globals.wait_for_billing,
            key: key(env, globals, profile.key_id),
        }
    }

    /// The server that is asked, as people know it.
    pub(crate) fn server(&self, environment: &Environment) -> String {
        let said = || environment.variables.get("TINKER_BASE_URL")?.parse().ok();
        let server = self.base_url.clone().or_else(said);
        server.unwrap_or_else(BaseUrl::production).to_string()
    }

    /// From now on this server, with this key.
    pub(crate) fn use_server(&mut self, url: BaseUrl, key: String) {
        self.base_url = Some(url);
        self.key = KeySource::Given(key.into());
    }

    /// A server may be gone for so long, unless somebody says otherwise.
    pub(crate) fn be_patient(&mut self, usually: Duration) {
        self.retry_for.get_or_insert(usually);
    }

    /// A client as these settings want it. Nothing is sent yet.
    pub(crate) fn client(&self, environment: &Environment) -> Result<ServiceClient, CommandError> {
        self.within(environment, self.retry_for.unwrap_or(PATIENCE))
    }

    /// The same, that tries once unless somebody wants more.
    pub(crate) fn client_for_one_try(
        &self,
        environment: &Environment,
    ) -> Result<ServiceClient, CommandError> {
        self.within(environment, self.retry_for.unwrap_or(Duration::ZERO))
    }

    fn within(
        &self,
        environment: &Environment,
        patience: Duration,
    ) -> Result<ServiceClient, CommandError> {
        let client = self.base(environment, patience)?;
        let key = match &self.key {
            KeySource::File(file) => {
                let shown = file.display().to_string();
                let text = std::fs::read_to_string(environment.path(file))
                    .map_err(|why| CommandError::file("read", &shown, &why))?;
                Some(text.trim().to_owned())
            }
            KeySource::Given(key) => Some(key.expose().to_owned()),
            KeySource::Stored(id) => Some(stored(&environment.variables, id)?),
            KeySource::Usual => None,
        };
        Ok(key.into_iter().fold(client, ServiceClientBuilder::api_key).build()?)
    }

    /// The same with a key that is not stored yet.
    pub(crate) fn client_with_key(
        &self,
        environment: &Environment,
        key: &str,
    ) -> Result<ServiceClient, CommandError> {
        let patience = self.retry_for.unwrap_or(Duration::ZERO);
        Ok(self.base(environment, patience)?.api_key(key).build()?)
    }

    fn base(
        &self,
        environment: &Environment,
        patience: Duration,
    ) -> Result<ServiceClientBuilder, CommandError> {
        let retry =
            if patience.is_zero() { RetryPolicy::disabled() } else { RetryPolicy::default() };
        let mut retry = retry.within(patience);
        if self.wait_for_billing {
            retry = retry.wait_for_billing();
        }
        if let Some(timeout) = self.timeout {
            retry = retry.with_timeout(timeout);
        }
        let mut client = ServiceClient::builder()
            .env(environment.variables.clone())
            .retry(retry)
            // A short command must not wait for its own news to leave.
            .without_telemetry();
        let said = environment.variables.get("TINKER_BASE_URL").filter(|_| self.base_url.is_none());
        // The client would read it as well, but a mistake in it is one like that of the flag.
        let said = said.map(|text| text.parse::<BaseUrl>()).transpose();
        let said = said.map_err(|why| CommandError::usage(format!("TINKER_BASE_URL: {why}")))?;
        if let Some(url) = self.base_url.clone().or(said) {
            client = client.base_url(url);
        }
        if let Some(project) = &self.project_id {
            client = client.project_id(project);
        }
        Ok((environment.prepare)(client))
    }
}

/// The flag; else nothing if the environment has a say, which the client reads itself; else the
/// profile.
fn or_else<T>(flag: Option<T>, env: &Env, variable: &str, profile: Option<T>) -> Option<T> {
    flag.or_else(|| profile.filter(|_| env.get(variable).is_none()))
}

fn key(env: &Env, globals: &Globals, profile: Option<String>) -> KeySource {
    let said = ["TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"];
    let env_has = said.iter().any(|name| env.get(name).is_some());
    match (&globals.api_key_file, &globals.api_key, profile) {
        (Some(file), _, _) => KeySource::File(file.clone()),
        (None, Some(key), _) => KeySource::Given(key.clone()),
        (None, None, Some(id)) if !env_has => KeySource::Stored(id),
        _ => KeySource::Usual,
    }
}

fn stored(env: &Env, id: &str) -> Result<String, CommandError> {
    let store = CredentialStore::load(env)?;
    let key = store.keys().find(|(known, _)| *known == id);
    key.map(|(_, key)| key.key.expose().to_owned()).ok_or_else(|| {
        CommandError::new(
            Exit::Credentials,
            format!("the profile wants the key {id:?}, which is gone"),
        )
        .hint("see `tinkex auth list` and `tinkex config set key_id`")
    })
}

/// How results are written, if the command line or the environment says so.
pub(crate) fn format(env: &Env, globals: &Globals) -> Result<Option<Format>, CommandError> {
    match (globals.json, globals.format, env.get("TINKEX_FORMAT")) {
        (true, _, _) => Ok(Some(Format::Json)),
        (false, Some(format), _) => Ok(Some(format)),
        (false, None, Some(word)) => match clap::ValueEnum::from_str(word, true) {
            Ok(format) => Ok(Some(format)),
            Err(_) => Err(CommandError::usage(format!("TINKEX_FORMAT is {word:?}"))
                .hint("say table, json, csv or plain")),
        },
        (false, None, None) => Ok(None),
    }
}

/// Whether a stream may have colours, and other escapes.
fn escapes(
    environment: &Environment,
    globals: &Globals,
    profile: &Profile,
    terminal: bool,
) -> bool {
    if globals.no_color {
        return false;
    }
    match globals.color {
        Some(ColorChoice::Always) => true,
        Some(ColorChoice::Never) => false,
        Some(ColorChoice::Auto) | None => {
            let forced =
                environment.variables.get("CLICOLOR_FORCE").is_some_and(|value| value != "0");
            let usual = match profile.color {
                Some(ColorChoice::Always) => true,
                Some(ColorChoice::Never) => false,
                Some(ColorChoice::Auto) | None => terminal && !dumb(&environment.variables),
            };
            environment.variables.get("NO_COLOR").is_none() && (forced || usual)
        }
    }
}

/// Whether the terminal says that it knows no escapes.
fn dumb(env: &Env) -> bool {
    env.get("TERM") == Some("dumb")
}
