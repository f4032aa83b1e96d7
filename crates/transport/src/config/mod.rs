//! Sources of settings: environment variables, base URL, credentials and the credential store.
//!
//! The environment is read once, when a client is built, so clients with different settings do not
//! affect each other.

mod credential;
mod env;
mod store;
mod url;

pub use credential::ApiKey;
pub use credential::Credential;
pub use env::Env;
pub use env::is_on;
pub use store::{CredentialStore, StoredKey, StoredKeyKind};
pub use url::BaseUrl;
