//! [`FolderDashboard`]: a web server for the dashboard of run folders.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use tinkex_dashboard::{DashboardAccess, Documents, KeyDigest};
use tinkex_store::executor::{Executor, spawn};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

use super::{Dashboard, DashboardRequest, add_security_headers};
use crate::routes::client::{ConnectionPeer, RequestClient};
use crate::routes::{IncomingBody, ResponseBody};
use crate::stream::WriteTimeoutStream;

/// Maximum time for which a browser may take to send headers or to read a response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Delay before the next `accept` after a failed one.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// A web server that shows the run folders of `tinkex train` and follows them while they grow.
///
/// ```no_run
/// use tinkex_server::FolderDashboard;
///
/// # async fn run() -> std::io::Result<()> {
/// let address = ([127, 0, 0, 1], 0).into();
/// let dashboard = FolderDashboard::start(vec!["runs".into()], address).await?;
/// println!("{}", dashboard.url());
/// # Ok(()) }
/// ```
///
/// Dropping the value stops the web server.
pub struct FolderDashboard {
    address: SocketAddr,
    shared: Arc<SharedFolders>,
    accept_task: tokio::task::JoinHandle<()>,
}

impl std::fmt::Debug for FolderDashboard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FolderDashboard").field("address", &self.address).finish_non_exhaustive()
    }
}

/// State of all connections.
struct SharedFolders {
    dashboard: Dashboard,
    documents: Documents,
    executor: Executor,
    started: Instant,
    /// Key to which the codes belong.
    key: KeyDigest,
}

impl FolderDashboard {
    /// Starts to listen on `address`. Each of `folders` is a run folder, or contains run folders.
    ///
    /// # Errors
    /// Fails if the address cannot be used.
    pub async fn start(folders: Vec<PathBuf>, address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        // The key is random and never shown: only the URL with a code gives access.
        let random = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].map(uuid::Uuid::simple);
        let key = format!("{}{}", random[0], random[1]);
        let digest = KeyDigest::of(key.as_bytes());
        let shared = Arc::new(SharedFolders {
            dashboard: Dashboard::new(DashboardAccess::new(Some(&key))),
            documents: Documents::of_folders(folders),
            executor: Executor::threads(),
            started: Instant::now(),
            key: digest,
        });
        let accept_task = spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { address, shared, accept_task })
    }

    /// Returns a URL with a code that gives one browser access.
    #[must_use]
    pub fn url(&self) -> String {
        let code = self.shared.dashboard.access.create_code(self.shared.key);
        format!("http://{}/?code={code}", self.address)
    }
}

impl Drop for FolderDashboard {
    fn drop(&mut self) {
        self.shared.dashboard.close();
        self.accept_task.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<SharedFolders>) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => drop(spawn(serve(stream, peer, Arc::clone(&shared)))),
            Err(_) => tokio::time::sleep(ACCEPT_RETRY).await,
        }
    }
}

async fn serve(stream: TcpStream, peer: SocketAddr, shared: Arc<SharedFolders>) {
    let io = hyper_util::rt::TokioIo::new(WriteTimeoutStream::new(stream, CLIENT_TIMEOUT));
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectionPeer { address: peer, tls: false });
        let shared = Arc::clone(&shared);
        async move { Ok::<_, std::convert::Infallible>(shared.handle(request).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(hyper_util::rt::TokioTimer::new())
        .header_read_timeout(CLIENT_TIMEOUT)
        .serve_connection(io, service);
    // Ignore errors of a connection: the browser disconnected.
    let _ = connection.await;
}

impl SharedFolders {
    async fn handle(&self, request: Request<impl IncomingBody>) -> http::Response<ResponseBody> {
        let (mut parts, mut body) = request.into_parts();
        RequestClient::identify(&mut parts, &[]);
        let request = DashboardRequest {
            dashboard: &self.dashboard,
            folders: Some(self.documents.clone()),
            executor: &self.executor,
            now: self.started.elapsed().as_secs(),
            body_timeout: CLIENT_TIMEOUT,
            state: None,
            parts: &parts,
        };
        let mut response = match timeout(CLIENT_TIMEOUT, request.handle(&mut body)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => error.into_response(),
            Err(_) => crate::routes::error::HttpError::body_timeout(CLIENT_TIMEOUT).into_response(),
        };
        add_security_headers(response.headers_mut());
        response
    }
}
