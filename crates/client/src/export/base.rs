//! Finds the folder of a base model by its name.

use std::path::PathBuf;

use tinkex_files::{HubCache, is_model_folder};

use crate::config::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::service::ServiceClient;
use crate::transport::download::resume::blocking;

/// Places where base models are looked for.
pub(super) struct BaseFinder<'a> {
    pub(super) env: &'a Env,
    /// Server of the checkpoint.
    pub(super) service: Option<&'a ServiceClient>,
}

impl BaseFinder<'_> {
    /// Returns the folder of the base model `name`.
    ///
    /// Logs a warning if the server serves the model from a GGUF file, because the folder then has
    /// other weights than those that the adapter was trained on.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if it is in none of the places. The message names the hub cache, or
    /// the GGUF file that the server serves.
    pub(super) async fn find(&self, name: &str) -> Result<PathBuf> {
        // Servers append variants after a colon.
        let name = name.split(':').next().unwrap_or(name);
        if name.is_empty() {
            let message = "the checkpoint does not name its base model";
            return Err(Error::new(ErrorKind::NotFound, message).with_hint(HINT));
        }
        let served = self.served_weights(name).await;
        let variable = |name: &str| self.env.get(name).map(Into::into);
        let cache = HubCache::locate(variable);
        let cached = cache.clone();
        let model = name.to_owned();
        let find = move || {
            let (folder, file) = match served {
                Some(path) if is_model_folder(&path) => (Some(path), None),
                Some(path) => (None, Some(path).filter(|path| path.is_file())),
                None => (None, None),
            };
            let cached = || cached.and_then(|cache| cache.model(&model).model_folder());
            let named = || Some(PathBuf::from(&model)).filter(|folder| is_model_folder(folder));
            Ok((folder.or_else(cached).or_else(named), file))
        };
        let (folder, served_file) = blocking(find).await?;
        match (folder, served_file) {
            (Some(folder), None) => Ok(folder),
            (Some(folder), Some(file)) => {
                let file = file.display();
                let shown = folder.display();
                tracing::warn!(
                    "the server serves {name:?} from the GGUF file {file}; the export uses the \
                     weights in {shown}"
                );
                Ok(folder)
            }
            (None, Some(file)) => {
                let file = file.display();
                let message = format!(
                    "cannot merge into base model {name:?}: the server serves the GGUF file {file}"
                );
                Err(Error::new(ErrorKind::NotFound, message).with_hint(GGUF_HINT))
            }
            (None, None) => {
                let cache = cache.map_or_else(String::new, |cache| {
                    let folder = cache.folder().display();
                    format!(": its weights are not in the hub cache ({folder})")
                });
                let message = format!("cannot find base model {name:?}{cache}");
                Err(Error::new(ErrorKind::NotFound, message).with_hint(HINT))
            }
        }
    }

    /// Returns the folder or GGUF file from which a `tinkex` server on this machine serves the
    /// model.
    async fn served_weights(&self, name: &str) -> Option<PathBuf> {
        let service = self.service.filter(|service| service.base_url().is_loopback())?;
        let sampler = service.create_sampling_client(name).await.ok()?;
        let path = PathBuf::from(sampler.get_sampler().await.ok()?.base_model_path?);
        path.is_absolute().then_some(path)
    }
}

const HINT: &str = "Pass the folder of the base model (--base FOLDER on the command line), or \
                    download it with `hf download NAME`.";
const GGUF_HINT: &str = "An export cannot merge into a GGUF file. Pass the Hugging Face folder of \
                         the model (--base FOLDER on the command line) to merge into its weights.";
