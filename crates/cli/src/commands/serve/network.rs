//! Options of `tinkex serve` for access over a network: TLS, the public URL and reverse proxies.

use std::path::PathBuf;

use clap::Args;
use tinkex_server::{IpNetwork, PublicUrl, ServerOptions, TlsFiles};

use crate::environment::Environment;

#[derive(Debug, Args)]
#[command(next_help_heading = "Network")]
pub(super) struct NetworkArgs {
    /// Serve HTTPS with the certificate in this PEM file, which is read again when it changes
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in a PEM file that only you can access
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// URL under which clients reach the server, such as https://tinkex.example.com; used in printed
    /// commands, download URLs and the URL of the dashboard
    #[arg(long, value_name = "URL", value_parser = str::parse::<PublicUrl>)]
    public_url: Option<PublicUrl>,
    /// Believe the X-Forwarded-For, X-Forwarded-Proto and Forwarded headers of a reverse proxy with
    /// this address, or in this range such as 10.0.0.0/8; repeatable
    #[arg(
        long = "trusted-proxy",
        value_name = "ADDRESS",
        value_parser = str::parse::<IpNetwork>
    )]
    trusted_proxies: Vec<IpNetwork>,
}

impl NetworkArgs {
    /// Sets the options of the server.
    pub(super) fn apply(self, environment: &Environment, options: &mut ServerOptions) {
        options.tls = self.tls_cert.zip(self.tls_key).map(|(certificate, key)| {
            TlsFiles::new(environment.path(&certificate), environment.path(&key))
        });
        options.public_url = self.public_url;
        options.trusted_proxies = self.trusted_proxies;
    }
}
