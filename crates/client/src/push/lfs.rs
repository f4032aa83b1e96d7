//! Large files go to the hub's store first; the repository then refers to them.

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use bytes::Bytes;
use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::{Error, ErrorKind, Result};

use super::blocking;
use super::door::{Door, decode};

const LFS: &str = "application/vnd.git-lfs+json";
/// The header that says that a file goes in parts, and how large they are.
const PART: &str = "chunk_size";

/// A file in the store.
pub(super) struct Stored {
    pub(super) oid: String,
    pub(super) size: u64,
}

#[derive(Deserialize)]
struct Batch {
    #[serde(default)]
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    #[serde(default)]
    actions: Option<Actions>,
    #[serde(default)]
    error: Option<Refused>,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct Refused {
    #[serde(default)]
    message: String,
}

/// Uploads a file, unless the store has it.
pub(super) async fn upload(
    door: &Door,
    repo: &str,
    revision: &str,
    name: &str,
    file: &Path,
) -> Result<Stored> {
    let stored = sum(file).await?;
    let object = json!({ "oid": stored.oid, "size": stored.size });
    let body = json!({
        "operation": "upload",
        "transfers": ["basic", "multipart"],
        "objects": [object],
        "hash_algo": "sha256",
        "ref": { "name": revision },
    });
    let path = format!("/{repo}.git/info/lfs/objects/batch");
    let reply = door.send(Method::POST, &path, LFS, Bytes::from(body.to_string())).await?;
    let batch: Batch = decode(&reply)?;
    let missing = || Error::new(ErrorKind::Decode, "the hub did not say where to upload to");
    let plan = batch.objects.into_iter().next().ok_or_else(missing)?;
    if let Some(refused) = plan.error {
        let why = format!("the hub does not take {name}: {}", refused.message);
        return Err(Error::new(ErrorKind::Rejected, why));
    }
    // Without anything to do, the store has it.
    let Some(Actions { upload: Some(upload), verify }) = plan.actions else { return Ok(stored) };
    match upload.header.get(PART).and_then(part_size) {
        Some(size) => in_parts(door, &upload, file, &stored, size).await?,
        None => {
            let whole = piece(file, 0, stored.size).await?;
            door.put(&upload.href, &upload.headers(), whole).await?;
        }
    }
    if let Some(verify) = verify {
        let body = Bytes::from(object.to_string());
        let mut headers = verify.headers();
        headers.push(("content-type".to_owned(), LFS.to_owned()));
        door.elsewhere(Method::POST, &verify.href, &headers, body).await?;
    }
    Ok(stored)
}

/// One part after the other, and at the end how they fit together.
async fn in_parts(
    door: &Door,
    upload: &Action,
    file: &Path,
    stored: &Stored,
    size: u64,
) -> Result<()> {
    let urls = upload
        .header
        .iter()
        .filter_map(|(name, url)| Some((name.parse::<u64>().ok()?, url.as_str()?)));
    let urls: BTreeMap<u64, &str> = urls.collect();
    let wrong = || Error::new(ErrorKind::Decode, "the hub named too few places for the parts");
    if urls.len() as u64 != stored.size.div_ceil(size) {
        return Err(wrong());
    }
    let mut parts = Vec::new();
    for ((number, url), at) in urls.into_iter().zip(0..) {
        let start = at * size;
        let part = piece(file, start, size.min(stored.size - start)).await?;
        let tag = door.put(url, &[], part).await?.ok_or_else(|| {
            Error::new(ErrorKind::Decode, "the hub's store did not confirm a part")
        })?;
        parts.push(json!({ "partNumber": number, "etag": tag }));
    }
    let body = Bytes::from(json!({ "oid": stored.oid, "parts": parts }).to_string());
    let headers = [("content-type".to_owned(), LFS.to_owned())];
    door.elsewhere(Method::POST, &upload.href, &headers, body).await.map(drop)
}

impl Action {
    /// What has to be sent along.
    fn headers(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        self.header.iter().filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect()
    }
}

/// Hubs write the size as a number or as text.
fn part_size(value: &Value) -> Option<u64> {
    let size = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    size.filter(|size| *size > 0)
}

/// A file's checksum, by which the store knows it.
async fn sum(file: &Path) -> Result<Stored> {
    let path = file.to_owned();
    let read = move || {
        let mut file = std::fs::File::open(path)?;
        let (mut sum, mut buffer, mut size) = (Sha256::new(), vec![0; 1 << 16], 0);
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                n => {
                    sum.update(&buffer[..n]);
                    size += n as u64;
                }
            }
        }
        let oid = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Stored { oid, size })
    };
    blocking(file, read).await
}

async fn piece(file: &Path, start: u64, length: u64) -> Result<Bytes> {
    let path = file.to_owned();
    let read = move || {
        let mut file = std::fs::File::open(path)?;
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(length).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != length {
            return Err(std::io::Error::other("it has changed meanwhile"));
        }
        Ok(Bytes::from(bytes))
    };
    blocking(file, read).await
}
