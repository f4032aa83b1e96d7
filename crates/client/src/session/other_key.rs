//! [`OtherKeyConnection`]: another key's view of the same server.

use std::sync::Arc;

use tinkex_wire::Secret;

use crate::connection::Connection;
use crate::error::Result;
use crate::transport::Transport;

use super::Session;

/// The same server, asked with a key that is not this client's.
pub(crate) struct OtherKeyConnection(Connection);

impl Session {
    /// Asks nothing yet.
    pub(crate) fn with_other_key(&self, key: &Secret) -> Result<OtherKeyConnection> {
        let settings = self.settings.with_key(key);
        let (config, dynamic) = (self.config().clone(), self.dynamic.get());
        Ok(OtherKeyConnection(Connection::restore(&settings, config, dynamic)?))
    }
}

impl OtherKeyConnection {
    /// What gives others access to that key's weights: the key, or the token it is exchanged for
    /// where the server wants that.
    pub(crate) async fn access_token(&self) -> Result<Secret> {
        Ok(self.0.transport().signature().await?.0)
    }

    pub(crate) fn transport(&self) -> &Arc<Transport> {
        self.0.transport()
    }
}
