//! [`AdapterUpload`]: writes an adapter to disk while it arrives.

use std::io;
use std::path::Path;

use bytes::Bytes;
use tinkex_store::error::ServerError;
use tinkex_weights::AdapterConversion;
use tinkex_wire::rest::AdapterFiles;
use tokio::fs::File;
use tokio::io::AsyncWriteExt as _;

use super::IncomingBody;
use super::body::too_large;
use super::body_reader::BodyReader;
use super::error::HttpError;
use crate::state::ServerState;

/// Maximum size of `adapter_config.json` in bytes.
const MAX_CONFIG_BYTES: usize = 1 << 20;

/// Body of a request with the files of an adapter.
pub(super) struct AdapterUpload<'a, B> {
    reader: BodyReader<'a, B>,
    /// Maximum size of the upload in bytes.
    limit: u64,
    /// Number of bytes that may still arrive.
    allowance: u64,
    /// Bytes that have arrived and are not written yet.
    buffer: Bytes,
}

impl<'a, B: IncomingBody> AdapterUpload<'a, B> {
    pub(super) fn new(state: &'a ServerState, body: &'a mut B) -> Self {
        let limit = state.options.limits.import_bytes;
        let reader = BodyReader::new(body, state.options.timeouts.client_io);
        Self { reader, limit, allowance: limit, buffer: Bytes::new() }
    }

    /// Reads further bytes into the empty buffer. Returns false at the end of the body.
    pub(super) async fn fill(&mut self) -> Result<bool, HttpError> {
        let Some(data) = self.reader.next().await? else { return Ok(false) };
        let allowance = self.allowance.checked_sub(data.len() as u64);
        self.allowance = allowance.ok_or_else(|| too_large(self.limit))?;
        self.buffer = data;
        Ok(true)
    }

    /// Reads exactly `length` bytes.
    async fn take(&mut self, length: usize) -> Result<Vec<u8>, HttpError> {
        let mut taken = Vec::new();
        while taken.len() < length {
            if self.buffer.is_empty() && !self.fill().await? {
                let message = "the body ends before the tensors of the adapter";
                return Err(ServerError::invalid(message).into());
            }
            let count = self.buffer.len().min(length - taken.len());
            taken.extend_from_slice(&self.buffer.split_to(count));
        }
        Ok(taken)
    }

    /// Writes the two files of the adapter to `folder` and calls fsync on them.
    pub(super) async fn write_files(&mut self, folder: &Path) -> Result<(), HttpError> {
        let failed = |error: io::Error| ServerError::write_failed(&error);
        let prefix = self.take(AdapterFiles::PREFIX).await?;
        let length = prefix.first_chunk().map_or(0, AdapterFiles::config_length);
        let length = usize::try_from(length).ok().filter(|length| *length <= MAX_CONFIG_BYTES);
        let length = length.ok_or_else(|| {
            let limit = MAX_CONFIG_BYTES;
            ServerError::invalid(format!("adapter_config.json exceeds the limit of {limit} bytes"))
        })?;
        let config = self.take(length).await?;
        let [config_file, tensor_file] = AdapterConversion::FILES.map(|name| folder.join(name));
        let mut file = File::create(config_file).await.map_err(failed)?;
        file.write_all(&config).await.map_err(failed)?;
        file.sync_all().await.map_err(failed)?;
        let mut file = File::create(tensor_file).await.map_err(failed)?;
        loop {
            let data = std::mem::take(&mut self.buffer);
            self.reader.pause(file.write_all(&data)).await.map_err(failed)?;
            if !self.fill().await? {
                break;
            }
        }
        file.flush().await.map_err(failed)?;
        Ok(file.sync_all().await.map_err(failed)?)
    }
}
