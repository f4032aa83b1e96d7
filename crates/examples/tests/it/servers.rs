//! Embedded servers for the programs.

use std::time::Duration;

use tempfile::TempDir;
use tinkex::{Env, SamplingParams, ServiceClient};
use tinkex_server::{Server, ServerOptions};

/// Name of the built-in model.
const MODEL: &str = tinkex_server::BUILT_IN;

/// Server in the process of the test, and its data folder.
pub(crate) struct TestServer {
    server: Server,
    _data: TempDir,
}

impl TestServer {
    /// Starts a server that accepts any key.
    pub(crate) async fn start() -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut options = ServerOptions::new(data.path());
        options.threads = 1;
        options.timeouts.poll_hold = Duration::from_secs(5);
        let server = Server::start(options).await.unwrap();
        Self { server, _data: data }
    }

    pub(crate) fn url(&self) -> String {
        self.server.base_url()
    }

    /// Returns the text of a completion, sampled as a whole.
    pub(crate) async fn complete(&self, prompt: &str, max_tokens: u32, seed: u64) -> String {
        let service = ServiceClient::builder().env(Env::empty()).api_key("tml-test");
        let service = service.base_url(self.url()).build().unwrap();
        let sampler = service.create_sampling_client(MODEL).await.unwrap();
        let tokenizer = sampler.tokenizer().await.unwrap();
        let prompt = tokenizer.input(prompt).unwrap();
        let params = SamplingParams::new().max_tokens(max_tokens).seed(seed);
        let response = sampler.sample(prompt, &params).await.unwrap();
        tokenizer.decode_text(&response.sequences[0].tokens).unwrap()
    }
}
