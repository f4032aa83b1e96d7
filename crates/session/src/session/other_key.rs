//! [`OtherKeyConnection`]: requests to the same server with another API key.

use std::sync::Arc;

use tinkex_wire::Secret;

use crate::connection::Connection;
use crate::error::Result;
use crate::transport::Transport;

use super::Session;

/// A connection to the session's server that uses another API key than the client, for checkpoints
/// that only the other key may read.
#[derive(Debug)]
pub struct OtherKeyConnection(Arc<Connection>);

impl Session {
    /// Creates a connection that uses `key`. Sends nothing.
    ///
    /// # Errors
    /// If `key` is not a valid API key.
    pub fn with_other_key(&self, key: &Secret) -> Result<OtherKeyConnection> {
        let settings = self.settings.with_key(key);
        let config = self.config().clone();
        let dynamic = self.dynamic.get();
        Ok(OtherKeyConnection(Connection::restore(&settings, config, dynamic)?))
    }
}

impl OtherKeyConnection {
    /// Returns the secret that grants access to the checkpoints of the other key: the key itself,
    /// or the token that the server issued in exchange for the key.
    ///
    /// # Errors
    /// If the server does not exchange the key for a token.
    pub async fn access_token(&self) -> Result<Secret> {
        self.0.transport().token().await
    }

    /// Returns the transport that uses the other key.
    pub fn transport(&self) -> &Arc<Transport> {
        self.0.transport()
    }
}
