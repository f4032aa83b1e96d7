//! [`SessionSettings`]: access to the settings of a client.

use std::sync::Arc;

use crate::settings::ClientSettings;

/// Client with whose settings other crates of the workspace open sessions.
///
/// The SDK implements the trait for `ServiceClient`. The settings of a `ServiceClient` are not part
/// of the API for programs; the gateway opens sessions of its own with them.
pub trait SessionSettings {
    /// Returns the settings of the client.
    fn session_settings(&self) -> &Arc<ClientSettings>;
}
