//! [`CommandSettings`]: the effective settings of a command line, and the client built from them.
//!
//! Precedence: flag, environment variable, profile, stored credential, built-in default.

use std::net::Ipv4Addr;
use std::time::Duration;

use tinkex::{BaseUrl, CallOptions, Env, ServiceClient, ServiceClientBuilder};

use crate::args::{ColorChoice, FormatOption, Globals, OutputFormat};
use crate::config::{ConfigFile, Profile};
use crate::environment::Environment;
use crate::error::CommandError;
use crate::key_source::KeySource;
use crate::style::Style;

/// Default time to retry temporary failures for.
const RETRY_FOR: Duration = Duration::from_secs(60);

/// Effective settings of a command line.
#[derive(Debug)]
pub(crate) struct CommandSettings {
    pub(crate) format: OutputFormat,
    /// Whether results may contain colors and other escapes.
    pub(crate) colors: bool,
    /// Colors and width of messages on standard error.
    pub(crate) messages: Style,
    /// Whether standard error supports redrawing, which progress bars need.
    pub(crate) redraws: bool,
    /// Whether to use the server on this machine.
    pub(crate) local: bool,
    pub(crate) base_url: Option<BaseUrl>,
    pub(crate) project_id: Option<String>,
    timeout: Option<Duration>,
    /// Time to retry temporary failures for, if the user has set it.
    retry_for: Option<Duration>,
    /// Time to retry temporary failures for, unless the user has set it.
    default_retry_for: Duration,
    wait_for_billing: bool,
    key: KeySource,
}

impl CommandSettings {
    /// Combines flags, environment variables and profile. Sends no request.
    pub(crate) fn new(environment: &Environment, globals: &Globals) -> Result<Self, CommandError> {
        let env = &environment.variables;
        let profile = match globals.profile.as_deref().or(env.get("TINKEX_PROFILE")) {
            Some(name) => ConfigFile::load(env)?.profile(name)?,
            None => ConfigFile::load(env)?.default_profile()?,
        };
        let format = output_format(env, globals)?;
        Ok(Self::combine(environment, globals, format, profile))
    }

    /// Combines flags and environment variables only, for commands that repair an invalid profile.
    pub(crate) fn without_profile(environment: &Environment, globals: &Globals) -> Self {
        let format = output_format(&environment.variables, globals).unwrap_or_default();
        Self::combine(environment, globals, format, Profile::default())
    }

    fn combine(
        environment: &Environment,
        globals: &Globals,
        format: Option<OutputFormat>,
        profile: Profile,
    ) -> Self {
        let env = &environment.variables;
        Self {
            format: format.or(profile.format).unwrap_or(OutputFormat::Table),
            colors: allows_escapes(
                environment,
                globals,
                &profile,
                environment.terminals.out.is_some(),
            ),
            messages: stream_style(environment, globals, &profile, environment.terminals.err),
            redraws: allows_escapes(
                environment,
                globals,
                &profile,
                environment.terminals.err.is_some(),
            ) && !is_dumb_terminal(env),
            local: globals.local
                || (profile.local == Some(true)
                    && globals.base_url.is_none()
                    && env.get("TINKER_BASE_URL").is_none()),
            base_url: flag_or_profile(
                globals.base_url.clone(),
                env,
                "TINKER_BASE_URL",
                profile.base_url,
            ),
            project_id: flag_or_profile(
                globals.project_id.clone(),
                env,
                "TINKER_PROJECT_ID",
                profile.project_id,
            ),
            timeout: globals.timeout.or(profile.timeout),
            retry_for: globals.retry_for.or(profile.retry_for),
            default_retry_for: RETRY_FOR,
            wait_for_billing: globals.wait_for_billing,
            key: KeySource::choose(env, globals, profile.key_id),
        }
    }

    /// Returns the base URL of the server, for messages. An invalid `TINKER_BASE_URL` is returned
    /// unchanged.
    pub(crate) fn server(&self, environment: &Environment) -> String {
        match (&self.base_url, environment.variables.get("TINKER_BASE_URL")) {
            (Some(url), _) => url.to_string(),
            (None, Some(text)) => {
                text.parse().map_or_else(|_| text.to_owned(), |url: BaseUrl| url.to_string())
            }
            (None, None) => BaseUrl::production().to_string(),
        }
    }

    /// Returns the id of the stored API key that the profile selects, if that key is used.
    pub(crate) fn profile_key_id(&self) -> Option<&str> {
        match &self.key {
            KeySource::Stored(id) => Some(id),
            _ => None,
        }
    }

    /// Replaces the server and the API key.
    pub(crate) fn use_server(&mut self, url: BaseUrl, key: String) {
        self.base_url = Some(url);
        self.key = KeySource::LocalServer(key.into());
    }

    /// Sets the time to retry temporary failures for, unless the user has set it.
    pub(crate) fn default_retry_for(&mut self, duration: Duration) {
        self.default_retry_for = duration;
    }

    /// Builds a client. Sends no request.
    pub(crate) fn client(&self, environment: &Environment) -> Result<ServiceClient, CommandError> {
        self.client_with_retries(environment, self.retry_for.unwrap_or(self.default_retry_for))
    }

    /// Builds a client that does not retry, unless the user passed `--retry-for`.
    pub(crate) fn client_without_retries(
        &self,
        environment: &Environment,
    ) -> Result<ServiceClient, CommandError> {
        self.client_with_retries(environment, self.retry_for.unwrap_or(Duration::ZERO))
    }

    fn client_with_retries(
        &self,
        environment: &Environment,
        retry_for: Duration,
    ) -> Result<ServiceClient, CommandError> {
        let client = self.builder(environment, retry_for)?;
        match self.key.read(environment)? {
            Some(key) => key.build(client),
            None => Ok(client.build()?),
        }
    }

    /// Builds a client with an API key that is not stored yet. It does not retry, unless the user
    /// passed `--retry-for`.
    pub(crate) fn client_with_key(
        &self,
        environment: &Environment,
        key: &str,
    ) -> Result<ServiceClient, CommandError> {
        let retry_for = self.retry_for.unwrap_or(Duration::ZERO);
        Ok(self.builder(environment, retry_for)?.api_key(key).build()?)
    }

    /// Creates a client builder with all settings except the API key.
    fn builder(
        &self,
        environment: &Environment,
        retry_for: Duration,
    ) -> Result<ServiceClientBuilder, CommandError> {
        let retry =
            if retry_for.is_zero() { CallOptions::without_retries() } else { CallOptions::new() };
        let mut retry = retry.give_up_after(retry_for);
        if self.retry_for.is_some() {
            // The user may be waiting for a server that is being started.
            retry = retry.unreached_timeout(retry_for);
        } else if !self.local {
            // A server that refuses the first connection is reported at once. The local server may
            // be about to be taken over by this command.
            retry = retry.unreached_timeout(Duration::ZERO);
        }
        if self.wait_for_billing {
            retry = retry.wait_for_billing();
        }
        if let Some(timeout) = self.timeout {
            retry = retry.request_timeout(timeout);
        }
        let mut client = ServiceClient::builder()
            .env(environment.variables.clone())
            .options(retry)
            // Flushing telemetry would delay the end of a short command.
            .without_telemetry();
        let variable =
            environment.variables.get("TINKER_BASE_URL").filter(|_| self.base_url.is_none());
        // The SDK reads the variable too, but an invalid value should be a usage error here.
        let variable = variable.map(|text| text.parse::<BaseUrl>()).transpose();
        let variable = variable.map_err(|error| {
            CommandError::usage(format!("TINKER_BASE_URL: {error}"))
                .hint("Set it to a URL such as http://localhost:8080.")
        })?;
        if let Some(url) = self.base_url.clone().or(variable) {
            client = client.base_url(url);
        }
        if let Some(project) = &self.project_id {
            client = client.project_id(project);
        }
        Ok((environment.prepare)(client))
    }
}

/// Returns the flag, or the profile's value if the variable is not set. The SDK reads the variable
/// itself.
fn flag_or_profile<T>(flag: Option<T>, env: &Env, variable: &str, profile: Option<T>) -> Option<T> {
    flag.or_else(|| profile.filter(|_| env.get(variable).is_none()))
}

/// Returns the output format that the command line or `TINKEX_FORMAT` chooses.
pub(crate) fn output_format(
    env: &Env,
    globals: &Globals,
) -> Result<Option<OutputFormat>, CommandError> {
    let format = match globals.format {
        Some(FormatOption::Output(format)) => Some(format),
        // The format of an export says nothing about the format of the result.
        Some(FormatOption::Export(_)) | None => None,
    };
    match (globals.json, format, env.get("TINKEX_FORMAT")) {
        (true, _, _) => Ok(Some(OutputFormat::Json)),
        (false, Some(format), _) => Ok(Some(format)),
        (false, None, Some(word)) => match clap::ValueEnum::from_str(word, true) {
            Ok(format) => Ok(Some(format)),
            Err(_) => Err(CommandError::usage(format!("invalid TINKEX_FORMAT {word:?}"))
                .hint("Set it to table, json, csv or plain.")),
        },
        (false, None, None) => Ok(None),
    }
}

/// Returns the style of messages on standard error, without a profile.
pub(crate) fn message_style(environment: &Environment, globals: &Globals) -> Style {
    stream_style(environment, globals, &Profile::default(), environment.terminals.err)
}

/// Returns the style of help on standard output, without a profile.
pub(crate) fn help_style(environment: &Environment, globals: &Globals) -> Style {
    stream_style(environment, globals, &Profile::default(), environment.terminals.out)
}

/// Returns the style of a stream. `terminal` is its width if it is a terminal.
fn stream_style(
    environment: &Environment,
    globals: &Globals,
    profile: &Profile,
    terminal: Option<usize>,
) -> Style {
    let colors = allows_escapes(environment, globals, profile, terminal.is_some());
    Style { colors, width: terminal }
}

/// Returns whether a stream may contain colors and other escapes.
fn allows_escapes(
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
            let by_default = match profile.color {
                Some(ColorChoice::Always) => true,
                Some(ColorChoice::Never) => false,
                Some(ColorChoice::Auto) | None => {
                    terminal && !is_dumb_terminal(&environment.variables)
                }
            };
            environment.variables.get("NO_COLOR").is_none() && (forced || by_default)
        }
    }
}

/// Returns whether a base URL is an `http` URL of a loopback address or of `localhost`.
pub(crate) fn is_loopback(url: &str) -> bool {
    let Some(rest) = url.strip_prefix("http://") else { return false };
    let host = rest.split([':', '/']).next().unwrap_or_default();
    rest.starts_with("[::1]")
        || host == "localhost"
        || host.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback())
}

/// Returns whether `TERM` names a terminal without escapes.
fn is_dumb_terminal(env: &Env) -> bool {
    env.get("TERM") == Some("dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_urls_are_recognized_by_their_host() {
        for url in ["http://127.0.0.1:8080", "http://localhost", "http://[::1]:80/x"] {
            assert!(is_loopback(url), "{url}");
        }
        for url in ["https://127.0.0.1", "http://localhost.example.com", "http://127.example.com"] {
            assert!(!is_loopback(url), "{url}");
        }
    }
}
