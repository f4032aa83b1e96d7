//! Finds the folder of a base model by its name.

use std::path::{Path, PathBuf};

use tinkex_files::{HubCache, is_model_folder};

use crate::config::Env;
use crate::download::resume::blocking;
use crate::error::{Error, ErrorKind, Result};
use crate::service::ServiceClient;

/// Places where base models are looked for.
pub(super) struct BaseFinder<'a> {
    pub(super) env: &'a Env,
    /// Server of the checkpoint.
    pub(super) service: Option<&'a ServiceClient>,
}

impl BaseFinder<'_> {
    /// Returns the folder of the base model `name`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if it is in none of the places. The message names the hub cache.
    /// [`ErrorKind::InvalidInput`] if the folder of the server has weights in two formats.
    pub(super) async fn find(&self, name: &str) -> Result<PathBuf> {
        // Servers append variants after a colon.
        let name = name.split(':').next().unwrap_or(name);
        if name.is_empty() {
            let message = "the checkpoint does not name its base model";
            return Err(Error::new(ErrorKind::NotFound, message).with_hint(HINT));
        }
        if let Some(folder) = self.served_folder(name).await {
            let model = name.to_owned();
            return blocking(move || refuse_ambiguous(&model, &folder).map(|()| folder)).await;
        }
        let variable = |name: &str| self.env.get(name).map(Into::into);
        let cache = HubCache::locate(variable);
        let (cached, model) = (cache.clone(), name.to_owned());
        let find = move || {
            let cached = cached.and_then(|cache| cache.model(&model).model_folder());
            let named = || Some(PathBuf::from(&model)).filter(|folder| is_model_folder(folder));
            Ok(cached.or_else(named))
        };
        if let Some(folder) = blocking(find).await? {
            return Ok(folder);
        }
        let cache = cache.map_or_else(String::new, |cache| {
            format!(": its weights are not in the hub cache ({})", cache.folder().display())
        });
        let message = format!("cannot find base model {name:?}{cache}");
        Err(Error::new(ErrorKind::NotFound, message).with_hint(HINT))
    }

    /// Returns the folder from which a server on this machine serves the model. A `tinkex` server
    /// returns this folder as the identifier of the tokenizer.
    async fn served_folder(&self, name: &str) -> Option<PathBuf> {
        let service = self.service.filter(|service| service.base_url().is_loopback())?;
        let sampler = service.create_sampling_client(name).await.ok()?;
        let folder = PathBuf::from(sampler.get_sampler().await.ok()?.tokenizer_id?);
        let is_served =
            move || Ok((folder.is_absolute() && is_model_folder(&folder)).then_some(folder));
        blocking(is_served).await.ok()?
    }
}

/// Refuses a folder that also has a GGUF file: the server does not tell which of the weights it
/// serves, and an adapter that was trained on quantized weights is not meant for the others.
fn refuse_ambiguous(name: &str, folder: &Path) -> Result<()> {
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|end| end == "gguf");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let Some(file) = entries.map(|entry| entry.path()).find(is_gguf) else { return Ok(()) };
    let message = format!(
        "cannot choose the weights of base model {name:?}: {} has safetensors and {}, and the server \
         serves one of them",
        folder.display(),
        file.file_name().unwrap_or_default().display()
    );
    let hint = "Pass this folder as the base model (--base FOLDER on the command line) to merge \
                into the safetensors. An export cannot merge into a GGUF file.";
    Err(Error::new(ErrorKind::InvalidInput, message).with_hint(hint))
}

const HINT: &str = "Pass the folder of the base model (--base FOLDER on the command line), or \
                    download it with `hf download NAME`.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_safetensors_and_a_gguf_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        refuse_ambiguous("org/x", folder.path()).unwrap();
        std::fs::write(folder.path().join("x-q8.gguf"), "").unwrap();
        let error = refuse_ambiguous("org/x", folder.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let message = error.to_string();
        assert!(message.contains("cannot choose the weights of base model \"org/x\""), "{message}");
        assert!(message.contains("has safetensors and x-q8.gguf"), "{message}");
        assert!(error.hint().unwrap().to_string().contains("--base FOLDER"));
    }
}
