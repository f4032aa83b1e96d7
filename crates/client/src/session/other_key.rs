//! [`OtherKeyConnection`]: requests to the same server with another API key.

use std::sync::Arc;

use tinkex_wire::Secret;

use crate::connection::Connection;
use crate::error::Result;
use crate::transport::Transport;

use super::Session;

/// A connection to the session's server with a key that is not the client's own, for checkpoints
/// that only the other key may read.
pub(crate) struct OtherKeyConnection(Arc<Connection>);

impl Session {
    /// Creates a connection that uses `key`. Sends nothing.
    pub(crate) fn with_other_key(&self, key: &Secret) -> Result<OtherKeyConnection> {
        let settings = self.settings.with_key(key);
        let (config, dynamic) = (self.config().clone(), self.dynamic.get());
        Ok(OtherKeyConnection(Connection::restore(&settings, config, dynamic)?))
    }
}

impl OtherKeyConnection {
    /// Returns the token that grants others access to the key's weights: the key itself, or the
    /// token that the server exchanged for it.
    pub(crate) async fn access_token(&self) -> Result<Secret> {
        Ok(self.0.transport().credential().await?.0)
    }

    pub(crate) fn transport(&self) -> &Arc<Transport> {
        self.0.transport()
    }
}
