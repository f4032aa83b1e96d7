//! Copies weights from an upstream into a folder of this server, from which clients download them.
//!
//! The files are written to disk while they arrive. An upstream of the current protocol has a URL
//! for each file. A legacy upstream has only an archive of the weights of a model for sampling.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;

use flate2::read::GzDecoder;
use tinkex_backend::upstream::WeightsDownload;
use tinkex_store::record::FailureCategory;

use super::Upstream;
use super::fault::Fault;

/// Name of the archive file, which exists until it is unpacked. The name starts with a dot because
/// hidden files are not offered for download.
const ARCHIVE: &str = ".archive.tar.gz";

/// Maximum size of one file of an adapter, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 30;

impl Upstream {
    /// Copies weights into a new folder, and sends the outcome to the waiting request.
    pub(super) async fn download(&self, download: WeightsDownload) {
        let WeightsDownload { base_model, path, folder, done } = download;
        let copied = match self.require_reached() {
            Err(fault) => Err(fault),
            Ok(()) if self.is_legacy() => self.download_archive(base_model, path, &folder).await,
            Ok(()) => self.download_files(&path, &folder).await,
        };
        // The client may have disconnected.
        let _ = done.send(copied.map_err(|fault| fault.reason().to_owned()));
    }

    async fn download_files(&self, path: &str, folder: &Path) -> Result<(), Fault> {
        self.service.rest().download(path, folder).peft(true).await?;
        Ok(())
    }

    async fn download_archive(
        &self,
        base_model: String,
        path: String,
        folder: &Path,
    ) -> Result<(), Fault> {
        let key = (base_model, Some(path));
        let sampler = self.sampler(&key).await?;
        let sampled = sampler.get().and_then(|sampler| sampler.path.clone());
        let sampled = sampled.ok_or_else(|| failed("the weights are not loaded".to_owned()))?;
        let rest = sampled.strip_prefix("tinker://").unwrap_or(&sampled);
        let (Some((run, _)), Some((_, name))) = (rest.split_once('/'), rest.rsplit_once('/'))
        else {
            let message =
                format!("the upstream saved the weights under an unexpected path {sampled}");
            return Err(failed(message));
        };
        let url = format!(
            "{}/api/v1/training_runs/{run}/checkpoints/{name}/archive",
            self.service.base_url().as_str().trim_end_matches('/')
        );
        // Write the archive into the new folder: the expiry task removes the folder if the process
        // dies before the download ends.
        std::fs::create_dir(folder).map_err(|error| {
            failed(format!("cannot create the folder {}: {error}", folder.display()))
        })?;
        let archive = folder.join(ARCHIVE);
        let saved = self.service.rest().download_file(url, &archive).await;
        let unpacked = match saved {
            Ok(_) => {
                let source = archive.clone();
                let target = folder.to_owned();
                let unpack = move || unpack(&source, &target);
                let unpacked = self.context.executor.run_job(unpack).await;
                let error = |error: &dyn std::fmt::Display| {
                    failed(format!("cannot unpack the archive of the upstream: {error}"))
                };
                match unpacked {
                    Ok(unpacked) => unpacked.map_err(|cause| error(&cause)),
                    Err(cause) => Err(error(&cause)),
                }
            }
            Err(cause) => Err(cause.into()),
        };
        let _ = std::fs::remove_file(&archive);
        unpacked
    }
}

fn failed(message: String) -> Fault {
    Fault::Failed(FailureCategory::Server, message)
}

/// Unpacks the regular files of a gzipped archive into `folder`. Ignores the folders in the
/// archive's paths, so that no path leads out of `folder`.
fn unpack(archive: &Path, folder: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(GzDecoder::new(BufReader::new(File::open(archive)?)));
    let mut files = 0;
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let Some(name) = path.file_name().filter(|_| entry.header().entry_type().is_file()) else {
            continue;
        };
        if entry.size() > MAX_FILE_BYTES {
            return Err(io::Error::other(format!("{} is too large", path.display())));
        }
        let mut file = File::create_new(folder.join(name))?;
        io::copy(&mut entry, &mut file)?;
        file.sync_all()?;
        files += 1;
    }
    match files {
        0 => Err(io::Error::other("it contains no file")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn archive(folder: &Path, entries: &[(&str, &[u8])]) -> std::path::PathBuf {
        let path = folder.join("a.tar.gz");
        let gzip = GzEncoder::new(File::create(&path).unwrap(), Compression::fast());
        let mut builder = tar::Builder::new(gzip);
        for (name, content) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_size(u64::try_from(content.len()).unwrap());
            header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_mode(0o600);
            header.set_cksum();
            builder.append(&header, *content).unwrap();
        }
        builder.into_inner().unwrap().finish().unwrap().flush().unwrap();
        path
    }

    #[test]
    fn files_are_unpacked_into_the_folder_only() {
        let data = tempfile::tempdir().unwrap();
        let entries: [(&str, &[u8]); 2] =
            [("x/adapter_config.json", b"{}"), ("../../escape.safetensors", b"abc")];
        let path = archive(data.path(), &entries);
        let folder = data.path().join("out");
        std::fs::create_dir(&folder).unwrap();
        unpack(&path, &folder).unwrap();
        assert_eq!(std::fs::read(folder.join("adapter_config.json")).unwrap(), b"{}");
        assert_eq!(std::fs::read(folder.join("escape.safetensors")).unwrap(), b"abc");
        assert!(!data.path().join("escape.safetensors").exists());
    }

    #[test]
    fn a_damaged_archive_is_an_error() {
        let data = tempfile::tempdir().unwrap();
        let path = archive(data.path(), &[("a", b"abc")]);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let folder = data.path().join("out");
        std::fs::create_dir(&folder).unwrap();
        assert!(unpack(&path, &folder).is_err());
        let empty = archive(data.path(), &[]);
        assert_eq!(unpack(&empty, &folder).unwrap_err().to_string(), "it contains no file");
    }
}
