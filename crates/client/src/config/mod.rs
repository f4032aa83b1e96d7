//! Settings: where they come from and in which order they win.
//!
//! The environment is read once, when a client is built. Nothing on the way of a request looks at
//! it again, so two clients with different settings never meet.

mod credential;
mod env;
mod store;
mod url;

pub use credential::ApiKey;
pub(crate) use credential::Credential;
pub use env::Env;
pub use store::{CredentialStore, StoredKey, StoredKeyKind};
pub use url::BaseUrl;
