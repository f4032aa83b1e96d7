//! [`Hint`]: what the user can do about an error.

use std::fmt;

/// Advice attached to an [`Error`](crate::Error).
///
/// `Display` and [`as_str`](Self::as_str) give the text, an imperative sentence. A program that has
/// better advice, for example a command-line flag, matches on the variant:
///
/// ```
/// use tinkex::{Env, Hint, ServiceClient};
///
/// let error = ServiceClient::builder().env(Env::empty()).build().unwrap_err();
/// match error.hint() {
///     Some(Hint::SetCredential) => eprintln!("pass --api-key or set TINKER_API_KEY"),
///     Some(hint) => eprintln!("{hint}"),
///     None => {}
/// }
/// # assert_eq!(error.hint(), Some(Hint::SetCredential));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hint {
    /// No credential was found: neither an argument, nor an environment variable, nor a stored key.
    SetCredential,
    /// The server rejected the credential (401).
    CheckApiKey,
    /// The credential lacks the permission for this request (403).
    CheckPermissions,
    /// The account has an open billing problem (402).
    SettleAccount,
    /// The server has no object with the requested id (404).
    CheckId,
    /// The server does not have this endpoint (404 for the route, 405, 501).
    CheckEndpoint,
    /// No connection to the server could be made, or it was interrupted.
    CheckNetwork,
    /// No server listens at a loopback address.
    StartServer,
    /// The server uses HTTP but the scheme of the base URL is HTTPS, or the other way round.
    CheckScheme,
    /// The server's TLS certificate was rejected.
    CheckCertificate,
    /// The response is not from a Tinker server.
    CheckServer,
    /// The prompt and the requested tokens exceed the model's context length.
    ShortenPrompt,
    /// A batch failed partly, or an optimizer step failed, and the server holds gradients.
    DiscardGradient,
    /// A checkpoint of that name exists and can be replaced.
    OverwriteCheckpoint,
    /// A checkpoint of that name exists and cannot be replaced.
    ChooseAnotherName,
    /// The client was closed.
    CreateNewClient,
    /// The server asks to wait longer than a limit of the call allows.
    RetryLater,
    /// The call was made outside a tokio runtime.
    EnterRuntime,
    /// A call of the blocking interface was made in an async task.
    UseAsyncClient,
    /// Advice for one specific error, with its text.
    Other(&'static str),
}

impl Hint {
    /// Returns the text of the hint: an imperative sentence.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SetCredential => "Set TINKER_API_KEY, or store a key with `tinkex auth login`.",
            Self::CheckApiKey => "Check the API key (TINKER_API_KEY).",
            Self::CheckPermissions => {
                "Check the project and organization of the API key; it lacks the permission for \
                 this request."
            }
            Self::SettleAccount => "Settle the account's balance, or contact its owner.",
            Self::CheckId => "Check the id and the base URL (TINKER_BASE_URL).",
            Self::CheckEndpoint => {
                "Check the base URL (TINKER_BASE_URL); this server may not support the request."
            }
            Self::CheckNetwork => "Check the network and the base URL (TINKER_BASE_URL).",
            Self::StartServer => {
                "Start the server, for example with `tinkex serve`, or correct the base URL \
                 (TINKER_BASE_URL)."
            }
            Self::CheckScheme => {
                "Check the scheme of the base URL (TINKER_BASE_URL): http:// for a server without \
                 TLS, https:// for a server with TLS."
            }
            Self::CheckCertificate => {
                "Check the base URL (TINKER_BASE_URL), the system's trusted certificates and its \
                 clock."
            }
            Self::CheckServer => {
                "Check that the base URL (TINKER_BASE_URL) is the URL of a Tinker server."
            }
            Self::ShortenPrompt => {
                "Shorten the prompt or lower max_tokens; server_capabilities lists the model's \
                 context length."
            }
            Self::DiscardGradient => {
                "Call discard_gradient before the next optim_step, which would apply the gradients \
                 that the server holds; on a server that cannot discard them, create a training \
                 client from the last checkpoint."
            }
            Self::OverwriteCheckpoint => {
                "Replace the checkpoint with SaveOptions::overwrite, or choose another name."
            }
            Self::ChooseAnotherName => "Choose another name, or delete the checkpoint first.",
            Self::CreateNewClient => "Create another ServiceClient to continue.",
            Self::RetryLater => {
                "Repeat the call after the time that Error::retry_after returns, or raise the \
                 limits of the call (CallOptions)."
            }
            Self::EnterRuntime => {
                "Make the call inside a tokio runtime, for example in #[tokio::main]."
            }
            Self::UseAsyncClient => {
                "Use the async clients there, or make the call in tokio::task::spawn_blocking."
            }
            Self::Other(text) => text,
        }
    }

    /// Returns the hint for a response with an error status, if there is one.
    ///
    /// `message` is the server's error message.
    pub(crate) fn for_response(status: u16, message: Option<&str>) -> Option<Self> {
        /// Message of servers for an unknown route. For an unknown id they send another message.
        const UNKNOWN_ROUTE: &str = "Not Found";
        match status {
            404 if message == Some(UNKNOWN_ROUTE) => Some(Self::CheckEndpoint),
            405 | 501 => Some(Self::CheckEndpoint),
            401 => Some(Self::CheckApiKey),
            402 => Some(Self::SettleAccount),
            403 => Some(Self::CheckPermissions),
            404 => Some(Self::CheckId),
            _ => Self::for_message(message?),
        }
    }

    /// Recognizes a context-length error by common words, because the message differs between
    /// servers.
    pub(crate) fn for_message(message: &str) -> Option<Self> {
        let message = message.to_ascii_lowercase();
        let too_long =
            ["length", "long", "exceed", "window"].iter().any(|word| message.contains(word));
        (message.contains("context") && too_long).then_some(Self::ShortenPrompt)
    }
}

impl From<&'static str> for Hint {
    fn from(text: &'static str) -> Self {
        Self::Other(text)
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_statuses_and_messages_have_a_hint() {
        for (status, message, hint) in [
            (400, Some("prompt exceeds the context window of 4096"), Some(Hint::ShortenPrompt)),
            (400, Some("odd"), None),
            (401, None, Some(Hint::CheckApiKey)),
            (402, None, Some(Hint::SettleAccount)),
            (403, None, Some(Hint::CheckPermissions)),
            (404, Some("Not Found"), Some(Hint::CheckEndpoint)),
            (404, Some("Model not found"), Some(Hint::CheckId)),
            (501, None, Some(Hint::CheckEndpoint)),
            (503, None, None),
        ] {
            assert_eq!(Hint::for_response(status, message), hint, "{status} {message:?}");
        }
        assert_eq!(Hint::for_message("Context length exceeded"), Some(Hint::ShortenPrompt));
    }
}
