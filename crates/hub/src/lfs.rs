//! Uploads of large files to a hub's Git LFS storage, before a commit refers to them.

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use bytes::Bytes;
use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::checksum::sha256_hex;
use tinkex_transport::error::{Error, ErrorKind, Result};

use crate::api::{HubApi, decode};
use crate::repo::read_blocking;

/// Media type of the LFS API.
const LFS: &str = "application/vnd.git-lfs+json";
/// Header of an upload action that requests an upload in several parts. Its value is the size of a
/// part in bytes.
const PART_SIZE: &str = "chunk_size";

/// A file in the LFS storage.
pub(crate) struct LfsObject {
    /// SHA-256 of the content, in hex.
    pub(crate) oid: String,
    /// Size in bytes.
    pub(crate) size: u64,
}

/// Response of the batch endpoint.
#[derive(Deserialize)]
struct BatchResponse {
    #[serde(default)]
    objects: Vec<BatchObject>,
}

/// Plan of the storage for one object.
#[derive(Deserialize)]
struct BatchObject {
    #[serde(default)]
    actions: Option<TransferActions>,
    #[serde(default)]
    error: Option<ObjectError>,
}

/// Requests that the client must send to transfer an object.
#[derive(Deserialize)]
struct TransferActions {
    upload: Option<TransferAction>,
    verify: Option<TransferAction>,
}

/// URL and headers of one such request.
#[derive(Deserialize)]
struct TransferAction {
    href: String,
    #[serde(default)]
    header: BTreeMap<String, Value>,
}

/// Reason why the storage rejects an object.
#[derive(Deserialize)]
struct ObjectError {
    #[serde(default)]
    message: String,
}

/// Uploads a file, unless the storage already has its content.
pub(crate) async fn upload(
    api: &HubApi,
    repo: &str,
    revision: &str,
    name: &str,
    file: &Path,
) -> Result<LfsObject> {
    let stored = hash(file).await?;
    let object = json!({ "oid": stored.oid, "size": stored.size });
    let body = json!({
        "operation": "upload",
        "transfers": ["basic", "multipart"],
        "objects": [object],
        "hash_algo": "sha256",
        "ref": { "name": revision },
    });
    let path = format!("/{repo}.git/info/lfs/objects/batch");
    let response = api.send(Method::POST, &path, LFS, Bytes::from(body.to_string())).await?;
    let batch: BatchResponse = decode(&response)?;
    let missing = || {
        let message = format!("cannot upload {name}: the hub returned no upload action for it");
        Error::new(ErrorKind::Decode, message)
    };
    let plan = batch.objects.into_iter().next().ok_or_else(missing)?;
    if let Some(error) = plan.error {
        let message = format!("the hub rejected {name}: {}", error.message);
        return Err(Error::new(ErrorKind::Rejected, message));
    }
    // A response without an upload action means that the storage already has the content.
    let Some(TransferActions { upload: Some(upload), verify }) = plan.actions else {
        return Ok(stored);
    };
    match upload.header.get(PART_SIZE).and_then(part_size) {
        Some(size) => upload_parts(api, &upload, file, &stored, size).await?,
        None => {
            let content = read_range(file, 0, stored.size).await?;
            api.put(&upload.href, &upload.headers(), content).await?;
        }
    }
    if let Some(verify) = verify {
        let body = Bytes::from(object.to_string());
        let mut headers = verify.headers();
        headers.push(("content-type".to_owned(), LFS.to_owned()));
        api.send_to_storage(Method::POST, &verify.href, &headers, body).await?;
    }
    Ok(stored)
}

/// Uploads a file in parts, then sends the list of parts.
async fn upload_parts(
    api: &HubApi,
    upload: &TransferAction,
    file: &Path,
    stored: &LfsObject,
    size: u64,
) -> Result<()> {
    let urls = upload
        .header
        .iter()
        .filter_map(|(name, url)| Some((name.parse::<u64>().ok()?, url.as_str()?)));
    let urls: BTreeMap<u64, &str> = urls.collect();
    let expected = stored.size.div_ceil(size);
    if urls.len() as u64 != expected {
        let message = format!(
            "cannot upload {}: the hub returned {} URLs for {expected} parts",
            file.display(),
            urls.len()
        );
        return Err(Error::new(ErrorKind::Decode, message));
    }
    let mut parts = Vec::new();
    for ((number, url), index) in urls.into_iter().zip(0..) {
        let start = index * size;
        let part = read_range(file, start, size.min(stored.size - start)).await?;
        let etag = api.put(url, &[], part).await?.ok_or_else(|| {
            let message = format!(
                "cannot upload {}: the hub's storage returned no entity tag for part {number}",
                file.display()
            );
            Error::new(ErrorKind::Decode, message)
        })?;
        parts.push(json!({ "partNumber": number, "etag": etag }));
    }
    let body = Bytes::from(json!({ "oid": stored.oid, "parts": parts }).to_string());
    let headers = [("content-type".to_owned(), LFS.to_owned())];
    api.send_to_storage(Method::POST, &upload.href, &headers, body).await.map(drop)
}

impl TransferAction {
    /// Returns the headers that the action's request needs.
    fn headers(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        self.header.iter().filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect()
    }
}

/// Parses a part size in bytes. Hubs send the size as a number or as text.
fn part_size(value: &Value) -> Option<u64> {
    let size = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    size.filter(|size| *size > 0)
}

/// Computes the checksum and the size of a file.
async fn hash(file: &Path) -> Result<LfsObject> {
    let path = file.to_owned();
    let read = move || {
        let (oid, size) = sha256_hex(std::fs::File::open(path)?)?;
        Ok(LfsObject { oid, size })
    };
    read_blocking(file, read).await
}

/// Reads `length` bytes from offset `start` on.
async fn read_range(file: &Path, start: u64, length: u64) -> Result<Bytes> {
    let path = file.to_owned();
    let read = move || {
        let mut file = std::fs::File::open(path)?;
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(length).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != length {
            return Err(std::io::Error::other("the file became shorter during the upload"));
        }
        Ok(Bytes::from(bytes))
    };
    read_blocking(file, read).await
}
