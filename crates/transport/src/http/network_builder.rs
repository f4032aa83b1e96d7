//! [`NetworkBuilder`]: the settings of a [`Network`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls_platform_verifier::Verifier;

use crate::config::Env;
use crate::error::{Error, ErrorKind, Result};

use super::network::Network;

/// Default timeout of the connection setup.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Default time after which an unused connection is closed. Unused connections count against the
/// server's limit of connections.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// Default maximum number of unused connections of each HTTP client to a server. With 50 requests
/// per client, a burst of requests leaves at most two fifths of its connections open.
const MAX_IDLE_CONNECTIONS: usize = 20;
/// Environment variables that set proxies. Upper case names take precedence.
pub(super) const PROXY_VARIABLES: [&str; 8] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
];

/// Builder of a [`Network`].
///
/// ```
/// use std::time::Duration;
/// use tinkex::{Env, Network, ServiceClient};
///
/// let network = Network::builder()
///     .proxy("http://proxy.example.com:3128")
///     .connect_timeout(Duration::from_secs(20))
///     .max_idle_connections(8)
///     .build()?;
/// // Both clients share the connections of the network.
/// let builder = ServiceClient::builder().env(Env::empty()).network(network);
/// let first = builder.clone().api_key("tml-first").build()?;
/// let second = builder.api_key("tml-second").build()?;
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct NetworkBuilder {
    env: Option<Env>,
    certificates: Vec<Vec<u8>>,
    proxy: ProxySource,
    connect_timeout: Duration,
    idle_timeout: Duration,
    max_idle_connections: usize,
}

/// Proxy of the requests.
#[derive(Clone)]
enum ProxySource {
    /// The proxies that environment variables set.
    Environment,
    /// The proxy of this URL, for all hosts.
    Url(String),
    /// No proxy.
    None,
}

impl Default for NetworkBuilder {
    fn default() -> Self {
        Self {
            env: None,
            certificates: Vec::new(),
            proxy: ProxySource::Environment,
            connect_timeout: CONNECT_TIMEOUT,
            idle_timeout: IDLE_TIMEOUT,
            max_idle_connections: MAX_IDLE_CONNECTIONS,
        }
    }
}

impl NetworkBuilder {
    /// Sets the environment variables to read. Defaults to the environment of the process.
    pub fn env(mut self, env: Env) -> Self {
        self.env = Some(env);
        self
    }

    /// Trusts the certificate authorities in `pem`, a list of certificates in PEM format, in
    /// addition to those of the operating system. [`build`](Self::build) reports invalid
    /// certificates.
    ///
    /// ```no_run
    /// use tinkex::Network;
    ///
    /// let network = Network::builder().ca_certificates(std::fs::read("company-ca.pem")?).build()?;
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn ca_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.push(pem.into());
        self
    }

    /// Sends all requests through the proxy at `url`, which may contain a user name and a password.
    /// By default `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` set the proxies, which do
    /// not apply to loopback addresses.
    pub fn proxy(mut self, url: impl Into<String>) -> Self {
        self.proxy = ProxySource::Url(url.into());
        self
    }

    /// Ignores the proxies that environment variables set.
    pub fn without_proxy(mut self) -> Self {
        self.proxy = ProxySource::None;
        self
    }

    /// Sets the maximum duration of the setup of a connection. Defaults to 5 seconds.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the time after which an unused connection is closed. Defaults to 20 seconds.
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeout = timeout;
        self
    }

    /// Sets the maximum number of unused connections that are kept open. Applies to each HTTP client
    /// of the network; a client serves up to 50 concurrent requests of one [`Lane`](super::Lane).
    /// Defaults to 20.
    ///
    /// [`ServiceClientBuilder::max_concurrent_samples`] limits how many connections samples use.
    ///
    /// [`ServiceClientBuilder::max_concurrent_samples`]: https://docs.rs/tinkex
    pub fn max_idle_connections(mut self, connections: usize) -> Self {
        self.max_idle_connections = connections;
        self
    }

    /// Builds the network. Opens no connection.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if a certificate or the URL of a proxy is invalid.
    pub fn build(self) -> Result<Network> {
        let env = self.env.unwrap_or_else(Env::from_process);
        let proxies = match self.proxy {
            ProxySource::Environment => proxies(&env)?,
            ProxySource::Url(url) => {
                vec![proxy("the proxy", &url, |url| reqwest::Proxy::all(url))?]
            }
            ProxySource::None => Vec::new(),
        };
        Network::with_settings(ConnectionSettings {
            tls: tls(&self.certificates)?,
            proxies,
            connect_timeout: self.connect_timeout,
            idle_timeout: self.idle_timeout,
            max_idle_connections: self.max_idle_connections,
        })
    }
}

impl fmt::Debug for NetworkBuilder {
    /// Omits the proxy, whose URL may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetworkBuilder")
            .field("connect_timeout", &self.connect_timeout)
            .field("idle_timeout", &self.idle_timeout)
            .field("max_idle_connections", &self.max_idle_connections)
            .finish_non_exhaustive()
    }
}

/// Settings of the connections of a [`Network`].
pub(super) struct ConnectionSettings {
    pub(super) tls: rustls::ClientConfig,
    pub(super) proxies: Vec<reqwest::Proxy>,
    /// Maximum duration of the connection setup.
    pub(super) connect_timeout: Duration,
    /// Time after which an unused connection is closed.
    pub(super) idle_timeout: Duration,
    /// Maximum number of unused connections of an HTTP client to one host.
    pub(super) max_idle_connections: usize,
}

/// Creates a proxy.
type MakeProxy = fn(&str) -> reqwest::Result<reqwest::Proxy>;

/// Creates the proxy at `url`. The error contains `name` instead of the URL, which may contain a
/// password.
fn proxy(name: &str, url: &str, make: MakeProxy) -> Result<reqwest::Proxy> {
    make(url).map_err(|_| Error::new(ErrorKind::Config, format!("{name} is not a valid URL")))
}

/// Hosts that the proxies of environment variables never apply to, in the form of `NO_PROXY`. A
/// proxy on another machine cannot reach them, and would receive the API key in plain text.
const LOOPBACK: &str = "localhost,127.0.0.0/8,::1,::ffff:127.0.0.0/104";

/// Returns the proxies that `HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` set. They do not apply to
/// the hosts in `NO_PROXY` and to loopback addresses. Upper and lower case names are accepted.
fn proxies(env: &Env) -> Result<Vec<reqwest::Proxy>> {
    let get = |name: &str| env.get(name).or_else(|| env.get(&name.to_ascii_lowercase()));
    let exceptions = format!("{},{LOOPBACK}", get("NO_PROXY").unwrap_or_default());
    let exceptions = || reqwest::NoProxy::from_string(&exceptions);
    let kinds: [(&str, MakeProxy); 3] = [
        ("HTTP_PROXY", |url| reqwest::Proxy::http(url)),
        ("HTTPS_PROXY", |url| reqwest::Proxy::https(url)),
        ("ALL_PROXY", |url| reqwest::Proxy::all(url)),
    ];
    let set = kinds.into_iter().filter_map(|(name, make)| Some((name, make, get(name)?)));
    set.map(|(name, make, url)| Ok(proxy(name, url, make)?.no_proxy(exceptions()))).collect()
}

/// Returns the TLS settings. The certificate authorities of the operating system and those in
/// `certificates`, lists in PEM format, are trusted.
fn tls(certificates: &[Vec<u8>]) -> Result<rustls::ClientConfig> {
    let failed = |error: rustls::Error| {
        Error::new(ErrorKind::Config, "cannot set up TLS").with_source(error)
    };
    let mut authorities = Vec::new();
    for pem in certificates {
        let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        let read = read.map_err(|error| invalid_certificates(&error.to_string()))?;
        if read.is_empty() {
            return Err(invalid_certificates("no certificate in PEM format"));
        }
        authorities.extend(read);
    }
    // The verifier skips certificates that it cannot read, so check them here.
    for authority in &authorities {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(authority.clone()).map_err(|error| invalid_certificates(&error.to_string()))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Verifier::new_with_extra_roots(authorities, Arc::clone(&provider));
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(failed)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier.map_err(failed)?))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn invalid_certificates(reason: &str) -> Error {
    Error::new(ErrorKind::Config, format!("invalid CA certificates: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_come_from_the_given_variables_and_errors_do_not_quote_them() {
        let read = |pairs: &[(&str, &str)]| proxies(&Env::from_pairs(pairs.iter().copied()));
        assert!(read(&[("NO_PROXY", "localhost")]).unwrap().is_empty());
        let two = read(&[("https_proxy", "http://a:1"), ("ALL_PROXY", "http://b:2")]).unwrap();
        assert_eq!(two.len(), 2);
        let error = read(&[("HTTP_PROXY", "http://user:hush@:x")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("HTTP_PROXY") && !format!("{error:?}").contains("hush"));
    }

    #[test]
    fn invalid_settings_are_reported_when_the_network_is_built() {
        let builder = || Network::builder().env(Env::empty());
        let malformed = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for (pem, reason) in [("", "no certificate in PEM format"), (malformed, "invalid")] {
            let error = builder().ca_certificates(pem).build().unwrap_err();
            let message = error.to_string();
            assert!(message.starts_with("invalid CA certificates: "), "{message}");
            assert_eq!((error.kind(), message.contains(reason)), (ErrorKind::Config, true));
        }
        let error = builder().proxy("http://user:hush@:x").build().unwrap_err();
        assert_eq!(error.to_string(), "the proxy is not a valid URL");
        let broken = Env::from_pairs([("HTTP_PROXY", "http://:x")]);
        assert!(Network::builder().env(broken.clone()).build().is_err());
        Network::builder().env(broken).without_proxy().build().unwrap();
    }
}
