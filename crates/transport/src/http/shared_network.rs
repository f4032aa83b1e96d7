//! Connections that the clients of a process share.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use tokio::runtime::{self, Handle};

use crate::config::{BaseUrl, Env};
use crate::error::Error;

use super::network::Network;
use super::network_builder::PROXY_VARIABLES;

/// Networks of this process. The registry holds weak references: a network is dropped, and its
/// connections are closed, with the last client that uses it.
static NETWORKS: LazyLock<Mutex<HashMap<NetworkKey, Weak<Network>>>> =
    LazyLock::new(Mutex::default);

/// Clients with equal keys share their connections.
#[derive(PartialEq, Eq, Hash)]
struct NetworkKey {
    /// Scheme, host and port of the server.
    origin: String,
    /// Variables that set proxies, with their values.
    proxies: Vec<(&'static str, String)>,
    /// Runtime that drives the connections. A connection does not progress while its runtime is not
    /// driven, so clients of different runtimes share none.
    runtime: runtime::Id,
}

/// Returns the network that all clients of the server at `base_url` with the same proxies share, if
/// they were created in the same runtime: the current one, or `runtime` outside of a runtime.
///
/// Without shared connections, the idle connections of one client would count against the server's
/// limit of connections while another client waits for a connection. A client that is created
/// without a runtime gets connections of its own.
///
/// # Errors
/// Fails like [`Network::new`].
pub fn shared_network(
    base_url: &BaseUrl,
    env: &Env,
    runtime: Option<&Handle>,
) -> Result<Arc<Network>, Error> {
    let current = Handle::try_current().ok();
    let Some(runtime) = current.as_ref().or(runtime) else {
        return Network::new(env).map(Arc::new);
    };
    let value = |name| Some((name, env.get(name)?.to_owned()));
    let key = NetworkKey {
        origin: base_url.origin().ascii_serialization(),
        proxies: PROXY_VARIABLES.into_iter().filter_map(value).collect(),
        runtime: runtime.id(),
    };
    let mut networks = NETWORKS.lock();
    if let Some(network) = networks.get(&key).and_then(Weak::upgrade) {
        return Ok(network);
    }
    networks.retain(|_, network| network.strong_count() > 0);
    let network = Arc::new(Network::new(env)?);
    networks.insert(key, Arc::downgrade(&network));
    Ok(network)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(url: &str, proxy: Option<&str>) -> Arc<Network> {
        let env = Env::from_pairs(proxy.map(|url| ("HTTPS_PROXY", url)));
        shared_network(&url.parse().unwrap(), &env, None).unwrap()
    }

    #[test]
    fn clients_of_one_server_and_runtime_share_their_connections() {
        let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (first, second) = (runtime(), runtime());
        let entered = first.enter();
        let shared = network("https://one.test", None);
        for (url, proxy, same) in [
            ("https://one.test", None, true),
            ("https://one.test:443/path", None, true),
            ("https://one.test", Some("http://proxy.test"), false),
            ("http://one.test", None, false),
            ("https://one.test:8443", None, false),
            ("https://two.test", None, false),
        ] {
            let other = network(url, proxy);
            assert_eq!(Arc::ptr_eq(&shared, &other), same, "{url} {proxy:?}");
        }
        drop(entered);
        let given = shared_network(
            &"https://one.test".parse().unwrap(),
            &Env::empty(),
            Some(first.handle()),
        );
        assert!(Arc::ptr_eq(&shared, &given.unwrap()), "the given runtime is used outside of one");
        let _entered = second.enter();
        assert!(!Arc::ptr_eq(&shared, &network("https://one.test", None)), "another runtime");
    }

    #[test]
    fn connections_are_closed_with_the_last_client() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _entered = runtime.enter();
        let weak = Arc::downgrade(&network("https://last.test", None));
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn clients_without_a_runtime_share_nothing() {
        let [a, b] = [(), ()].map(|()| network("https://one.test", None));
        assert!(!Arc::ptr_eq(&a, &b));
    }
}
