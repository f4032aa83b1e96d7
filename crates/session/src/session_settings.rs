//! [`SessionSettings`]: access to the settings of a client.

use std::sync::Arc;

use crate::settings::ClientSettings;

/// Access to the settings of a client, with which other crates of the workspace open sessions.
///
/// The SDK implements the trait for `ServiceClient`. The settings of a `ServiceClient` are not part
/// of the API for programs. The gateway uses them to open sessions of its own.
pub trait SessionSettings {
    /// Returns the settings of the client.
    fn session_settings(&self) -> &Arc<ClientSettings>;
}
