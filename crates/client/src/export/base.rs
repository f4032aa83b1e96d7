//! Finds the folder of a base model by its name.

use std::path::PathBuf;

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
    pub(super) async fn find(&self, name: &str) -> Result<PathBuf> {
        // Servers append variants after a colon.
        let name = name.split(':').next().unwrap_or(name);
        if name.is_empty() {
            let message = "the checkpoint does not name its base model";
            return Err(Error::new(ErrorKind::NotFound, message).with_hint(HINT));
        }
        if let Some(folder) = self.served_folder(name).await {
            return Ok(folder);
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

const HINT: &str = "Pass the folder of the base model (--base FOLDER on the command line), or \
                    download it with `hf download NAME`.";
