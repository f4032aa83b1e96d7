//! TLS of the server's connections: [`TlsIdentity`] reads certificate and key, and reads them again
//! when the files change.

mod validity;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest as _, Sha256};
use tinkex_files::read_private_file;
use tinkex_store::clock::Clock;
use tinkex_store::log;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use self::validity::Validity;
use crate::stream::WriteTimeoutStream;

/// Maximum size of a file in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Maximum number of bytes that are read from a client that speaks HTTP without TLS.
const MAX_PLAIN_REQUEST: u64 = 64 << 10;
/// First byte of a TLS connection: the type of a handshake record.
const HANDSHAKE_RECORD: u8 = 0x16;
/// Response to a client that speaks HTTP without TLS.
const PLAIN_HTTP_RESPONSE: &[u8] = b"HTTP/1.1 400 Bad Request\r\n\
    content-type: application/json\r\ncontent-length: 72\r\nconnection: close\r\n\r\n\
    {\"detail\":\"this port speaks HTTPS; use a URL that starts with https://\"}";

/// Files of the certificate and the private key of a server, in PEM format.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlsFiles {
    /// The certificate of the server, followed by the intermediate certificates.
    pub certificate: PathBuf,
    /// The private key, which only its owner may access.
    pub key: PathBuf,
}

impl TlsFiles {
    /// Names the files of the certificate and the key.
    #[must_use]
    pub fn new(certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self { certificate: certificate.into(), key: key.into() }
    }
}

/// Why a server cannot use its certificate or its private key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read, or other users can access the key.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file has no certificate or no private key in PEM format.
    #[error("{} contains no {expected} in PEM format", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What the file should contain.
        expected: &'static str,
    },
    /// The certificate and the key do not belong together, or are not supported.
    #[error("certificate {} and key {}: {reason}", certificate.display(), key.display())]
    Pair {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// The cause.
        reason: String,
    },
}

/// Certificate and key of a server.
pub(crate) struct TlsIdentity {
    files: TlsFiles,
    clock: Clock,
    current: Mutex<CurrentIdentity>,
}

struct CurrentIdentity {
    acceptor: TlsAcceptor,
    /// Result of the last attempt to read the files. Logged once.
    last: LastRead,
}

#[derive(PartialEq, Eq)]
enum LastRead {
    /// Digest of the contents of both files, whether they can be used or not.
    Contents([u8; 32]),
    /// Message of the error.
    Failed(String),
}

impl TlsIdentity {
    /// Reads the files.
    pub(crate) fn load(files: TlsFiles, clock: Clock) -> Result<Self, TlsError> {
        let contents = FileContents::read(&files)?;
        let (acceptor, validity) = contents.acceptor(&files)?;
        log_validity(&files, validity, clock.now());
        let last = LastRead::Contents(contents.digest());
        let current = Mutex::new(CurrentIdentity { acceptor, last });
        Ok(Self { files, clock, current })
    }

    /// Returns the acceptor for a new connection.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        self.current.lock().acceptor.clone()
    }

    /// Reads the files again, and uses them for new connections if they have changed. If they cannot
    /// be used, logs a warning and keeps the certificate. Blocks.
    pub(crate) fn reload(&self) {
        let read = FileContents::read(&self.files);
        let last = match &read {
            Ok(contents) => LastRead::Contents(contents.digest()),
            Err(error) => LastRead::Failed(error.to_string()),
        };
        if self.current.lock().last == last {
            return;
        }
        let loaded = read.and_then(|contents| contents.acceptor(&self.files));
        let mut current = self.current.lock();
        current.last = last;
        match loaded {
            Ok((acceptor, validity)) => {
                current.acceptor = acceptor;
                drop(current);
                let certificate = self.files.certificate.display();
                tracing::info!(target: log::REQUEST, %certificate, "the TLS certificate has changed");
                log_validity(&self.files, validity, self.clock.now());
            }
            Err(error) => tracing::warn!(
                target: log::REQUEST,
                %error,
                "cannot use the new TLS certificate; connections use the old one"
            ),
        }
    }
}

/// Performs the handshake of a connection. Returns `None` if the client does not speak TLS: a client
/// that speaks HTTP gets a response that says so.
pub(crate) async fn accept(
    mut stream: TcpStream,
    acceptor: &TlsAcceptor,
    write_timeout: Duration,
) -> Option<TlsStream<WriteTimeoutStream>> {
    let mut first = [0];
    if stream.peek(&mut first).await.ok()? == 0 {
        return None;
    }
    if first[0] != HANDSHAKE_RECORD {
        stream.write_all(PLAIN_HTTP_RESPONSE).await.ok()?;
        stream.shutdown().await.ok()?;
        // Read what the client has sent: closing a socket with unread data resets the connection,
        // and the client would not see the response.
        let mut rest = stream.take(MAX_PLAIN_REQUEST);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await.ok()?;
        return None;
    }
    let stream = WriteTimeoutStream::new(stream, write_timeout);
    let accepted = acceptor.accept(stream).await;
    let failed =
        |error: &io::Error| tracing::debug!(target: log::REQUEST, %error, "TLS handshake failed");
    accepted.inspect_err(failed).ok()
}

/// Contents of both files.
struct FileContents {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl FileContents {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| TlsError::Read { path, source }
        };
        let read_certificate = || {
            let metadata = std::fs::metadata(&files.certificate)?;
            if !metadata.is_file() || metadata.len() > MAX_FILE {
                let message = "not a regular file of at most 1 MiB";
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
            std::fs::read(&files.certificate)
        };
        // Programs that renew certificates name the newest key by a symbolic link. The owner and
        // the mode of the file that it names count.
        let read_key = || read_private_file(files.key.canonicalize()?, MAX_FILE);
        Ok(Self {
            certificate: read_certificate().map_err(failed(&files.certificate))?,
            key: read_key().map_err(failed(&files.key))?,
        })
    }

    fn digest(&self) -> [u8; 32] {
        let length = (self.certificate.len() as u64).to_le_bytes();
        let digest = Sha256::new().chain_update(length).chain_update(&self.certificate);
        digest.chain_update(&self.key).finalize().into()
    }

    /// Returns the acceptor of connections, and the validity of the server's certificate if it is
    /// known.
    fn acceptor(&self, files: &TlsFiles) -> Result<(TlsAcceptor, Option<Validity>), TlsError> {
        let missing = |path: &Path, expected| TlsError::Content { path: path.to_owned(), expected };
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.certificate).collect();
        let chain = chain.ok().filter(|chain| !chain.is_empty());
        let chain = chain.ok_or_else(|| missing(&files.certificate, "certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(&self.key);
        let key = key.map_err(|_| missing(&files.key, "private key"))?;
        let validity = chain.first().and_then(|certificate| Validity::of(certificate));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key));
        let mut config = config.map_err(|error| TlsError::Pair {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            reason: match error {
                rustls::Error::InconsistentKeys(_) => "they do not belong together".to_owned(),
                error => error.to_string(),
            },
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok((TlsAcceptor::from(Arc::new(config)), validity))
    }
}

/// Logs a warning about a certificate that clients reject. `now` is in microseconds since the Unix
/// epoch.
fn log_validity(files: &TlsFiles, validity: Option<Validity>, now: i64) {
    let certificate = files.certificate.display();
    let Some(validity) = validity else { return };
    let Validity { not_before, not_after } = validity;
    if now > not_after.unix_micros() {
        tracing::warn!(
            target: log::REQUEST, %certificate, expired = %not_after,
            "the TLS certificate has expired; clients reject it"
        );
    } else if now < not_before.unix_micros() {
        tracing::warn!(
            target: log::REQUEST, %certificate, valid_from = %not_before,
            "the TLS certificate is not valid yet; clients reject it"
        );
    } else {
        tracing::info!(
            target: log::REQUEST, %certificate, valid_until = %not_after, "connections use TLS"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Writes a new certificate and key for `localhost`.
    fn write_files(folder: &Path) -> TlsFiles {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let files = TlsFiles::new(folder.join("cert.pem"), folder.join("key.pem"));
        fs::write(&files.certificate, made.cert.pem()).unwrap();
        let key = tinkex_files::AtomicWrite::new(&files.key).owner_only();
        key.write(made.signing_key.serialize_pem()).unwrap();
        files
    }

    #[tokio::test]
    async fn a_broken_file_keeps_the_certificate() {
        let folder = tempfile::tempdir().unwrap();
        let files = write_files(folder.path());
        let clock = Clock::resume(Arc::new(tinkex_store::clock::OperatingSystem), None, None);
        let identity = TlsIdentity::load(files.clone(), clock).unwrap();
        let config = || Arc::as_ptr(identity.acceptor().config());
        let first = config();
        identity.reload();
        assert_eq!(config(), first, "the files have not changed");
        let valid = fs::read(&files.certificate).unwrap();
        for broken in [&b"no certificate"[..], &valid[..valid.len() / 2]] {
            fs::write(&files.certificate, broken).unwrap();
            identity.reload();
            assert_eq!(config(), first);
        }
        fs::remove_file(&files.certificate).unwrap();
        identity.reload();
        assert_eq!(config(), first);
        write_files(folder.path());
        identity.reload();
        assert_ne!(config(), first);
    }
}
