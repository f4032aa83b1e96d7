//! HTTPS: the real client over TLS with the authority of the test, new certificates, and clients
//! that do not speak TLS.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rcgen::{CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tinkex::{Env, Network, SamplingParams, ServiceClient};
use tinkex_server::{Server, ServerOptions, StartError, TlsError, TlsFiles};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::options;

/// A certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    /// Issues a certificate for `localhost`, and returns certificate and key in PEM format.
    fn issue(&self, year: i32) -> (String, String) {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

/// Writes a file that only its owner can access.
fn write_private(path: &Path, text: &str) {
    tinkex_files::AtomicWrite::new(path).owner_only().write(text).unwrap();
}

/// Writes certificate and key into a folder.
fn write_files(folder: &Path, (certificate, key): &(String, String)) -> TlsFiles {
    let files = TlsFiles::new(folder.join("cert.pem"), folder.join("key.pem"));
    write_private(&files.key, key);
    fs::write(&files.certificate, certificate).unwrap();
    files
}

fn tls_options(data: &Path, files: TlsFiles) -> ServerOptions {
    let mut options = options(data);
    options.tls = Some(files);
    options.timeouts.tls_reload = Duration::from_millis(5);
    options
}

/// Returns the URL by the name in the certificate.
fn url(server: &Server) -> String {
    format!("https://localhost:{}", server.address().port())
}

fn client(url: &str, authority: &Authority) -> ServiceClient {
    let network = Network::builder().ca_certificates(authority.pem()).build().unwrap();
    let builder = ServiceClient::builder().env(Env::empty()).network(network).base_url(url);
    builder.api_key("tml-test").build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_trains_and_streams_over_tls_and_a_new_certificate_needs_no_restart() {
    let folder = tempfile::tempdir().unwrap();
    let first = Authority::new();
    let files = write_files(folder.path(), &first.issue(2100));
    let server = Server::start(tls_options(&folder.path().join("data"), files.clone())).await;
    let server = server.unwrap();
    assert!(server.base_url().starts_with("https://127.0.0.1:"), "{}", server.base_url());
    let url = url(&server);
    let trained = client(&url, &first);
    let model = crate::harness::training_client(&trained).await;
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    let params = SamplingParams::new().max_tokens(4);
    sampler.sample([5_u32, 6, 7], params).await.unwrap();

    // A broken file does not replace the certificate: the old one is still used after the files
    // were read.
    fs::write(&files.certificate, "no certificate").unwrap();
    for _ in 0..50 {
        client(&url, &first).server_capabilities().await.unwrap();
    }
    // A certificate of another authority, without its key, and then with it.
    let second = Authority::new();
    let (certificate, key) = second.issue(2100);
    fs::write(&files.certificate, certificate).unwrap();
    client(&url, &first).server_capabilities().await.unwrap();
    write_private(&files.key, &key);
    let untrusted = loop {
        // New connections use the new certificate as soon as the server has read it.
        if let Err(error) = connect(&url, &first).await {
            break error;
        }
    };
    assert!(untrusted.contains("InvalidCertificate"), "{untrusted}");
    client(&url, &second).server_capabilities().await.unwrap();
    // The connection that was open continues.
    model.optim_step(tinkex::AdamParams::default()).await.unwrap();
    server.stop().await;
}

/// Sends one request over a new connection. The error has the messages of its causes.
async fn connect(url: &str, authority: &Authority) -> Result<(), String> {
    let root = reqwest::Certificate::from_pem(authority.pem().as_bytes()).unwrap();
    drop(crate::harness::http_client());
    let client = reqwest::Client::builder().no_proxy().tls_certs_only([root]).build().unwrap();
    let response = client.get(format!("{url}/api/v1/healthz")).send().await;
    match response {
        Ok(response) => {
            assert_eq!(response.status(), 200);
            Ok(())
        }
        Err(error) => Err(format!("{error:?}")),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_tls_is_told_so_and_one_that_sends_nothing_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let files = write_files(folder.path(), &Authority::new().issue(2100));
    let mut options = tls_options(&folder.path().join("data"), files);
    options.timeouts.client_io = Duration::from_millis(50);
    let server = Server::start(options).await.unwrap();
    let read_all = async |sent: &[u8]| {
        let mut stream = TcpStream::connect(server.address()).await.unwrap();
        stream.write_all(sent).await.unwrap();
        let mut response = Vec::new();
        // A reset after the response is as good as the end of the stream.
        let _ = stream.read_to_end(&mut response).await;
        String::from_utf8_lossy(&response).into_owned()
    };
    let plain = read_all(b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(plain.starts_with("HTTP/1.1 400 "), "{plain}");
    let (head, body) = plain.split_once("\r\n\r\n").unwrap();
    assert!(body.contains("https://"), "{plain}");
    assert!(head.contains(&format!("content-length: {}", body.len())), "{plain}");
    // Handshakes have a deadline.
    assert_eq!(read_all(b"").await, "");
    assert_eq!(read_all(b"\x16\x03\x01").await, "");
}

/// A connection counts as unauthenticated during its handshake, and is closed for others.
#[tokio::test(flavor = "multi_thread")]
async fn handshakes_that_do_not_continue_keep_nobody_out() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let files = write_files(folder.path(), &authority.issue(2100));
    let mut options = tls_options(&folder.path().join("data"), files).api_key("tml-test");
    options.limits.connections = 16;
    options.timeouts.authentication = Duration::ZERO;
    // No timeout closes a connection during the test.
    options.timeouts.client_io = Duration::from_secs(3_600);
    let server = Server::start(options).await.unwrap();
    let url = url(&server);
    let mut attackers = Vec::new();
    for _ in 0..10 {
        for bytes in [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00"] {
            let mut attacker = TcpStream::connect(server.address()).await.unwrap();
            attacker.write_all(bytes).await.unwrap();
            attackers.push(attacker);
        }
        client(&url, &authority).server_capabilities().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_cannot_be_used_prevent_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let issued = authority.issue(2100);
    let data = folder.path().join("data");
    let start = async |files: TlsFiles| {
        let started = Server::start(tls_options(&data, files)).await;
        match started {
            Err(StartError::Tls(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    let files = write_files(folder.path(), &issued);
    let missing = TlsFiles::new(folder.path().join("none.pem"), &files.key);
    let error = start(missing).await;
    assert!(matches!(&error, TlsError::Read { .. }), "{error}");
    assert!(error.to_string().contains("none.pem: No such file"), "{error}");
    let swapped = TlsFiles::new(&files.certificate, &files.certificate);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let error = start(swapped.clone()).await;
        assert!(error.to_string().contains("other users can access the file"), "{error}");
        fs::set_permissions(&files.certificate, fs::Permissions::from_mode(0o600)).unwrap();
        let link = folder.path().join("link.pem");
        std::os::unix::fs::symlink(&files.key, &link).unwrap();
        let linked = TlsFiles::new(&files.certificate, link);
        Server::start(tls_options(&data, linked)).await.unwrap().stop().await;
    }
    let error = start(swapped).await;
    assert!(error.to_string().contains("no private key"), "{error}");
    let other = (issued.0, authority.issue(2100).1);
    let error = start(write_files(folder.path(), &other)).await;
    assert!(error.to_string().contains("do not belong together"), "{error}");
    let error = start(write_files(folder.path(), &("x".to_owned(), other.1))).await;
    assert!(error.to_string().contains("no certificate"), "{error}");
    // An expired certificate is only a warning: a new one may be on its way.
    let expired = write_files(folder.path(), &authority.issue(2001));
    Server::start(tls_options(&data, expired)).await.unwrap().stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_public_url_is_the_url_of_downloads_and_of_the_dashboard() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let files = write_files(folder.path(), &authority.issue(2100));
    let mut options = tls_options(&folder.path().join("data"), files).api_key("tml-test");
    options.public_url = Some("https://tinkex.example.com".parse().unwrap());
    let server = Server::start(options).await.unwrap();
    assert_eq!(server.base_url(), "https://tinkex.example.com");
    assert_eq!(server.public_url(), "https://tinkex.example.com");
    let dashboard = server.dashboard_url();
    assert!(dashboard.starts_with("https://tinkex.example.com/?code="), "{dashboard}");
    let client = client(&url(&server), &authority);
    let model = crate::harness::training_client(&client).await;
    let saved = model.save_weights_for_sampler("final").await.unwrap();
    let urls = client.rest().get_external_weights_urls(&saved).await.unwrap();
    for url in urls.urls.values() {
        assert!(url.starts_with("https://tinkex.example.com/files/"), "{url}");
    }
    assert!(!urls.urls.is_empty());
}
