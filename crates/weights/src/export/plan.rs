//! [`MergePlan`]: the tensors of a merged model, checked against base model and adapter.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::ExportDType;
use super::merge::MergedTensor;
use crate::adapter::HEAD;
use crate::config::{EMBEDDING, UNEMBEDDING};
use crate::{DType, Error, ModelConfig, ModelFolder, Result, StoredAdapter};

/// The tensors of a merged model.
#[derive(Debug)]
pub(super) struct MergePlan {
    folder: PathBuf,
    base: ModelFolder,
    dtype: Option<ExportDType>,
    tensors: Vec<PlannedTensor>,
    unties: bool,
}

/// A tensor of a merged model.
#[derive(Debug)]
pub(super) struct PlannedTensor {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    /// Name in the base model. Differs from `name` only for the unembedding of a model that the
    /// export unties, which starts as a copy of the embedding.
    source: String,
    /// Module of the adapter that changes the tensor, if any does.
    module: Option<String>,
}

impl PlannedTensor {
    /// Returns the size of the tensor in a safetensors file, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.block_bytes() as u64
    }
}

impl MergePlan {
    /// Opens the base model and assigns the matrices of the adapter to its tensors.
    ///
    /// # Errors
    /// As [`ModelFolder::open`]; [`Error::BadFile`] if the adapter does not fit the base model.
    pub(super) fn new(
        folder: &Path,
        adapter: &StoredAdapter,
        dtype: Option<ExportDType>,
    ) -> Result<Self> {
        let base = ModelFolder::open(folder)?;
        let config = base.config();
        let mut modules: BTreeSet<String> = adapter.modules().map(str::to_owned).collect();
        if modules.is_empty() {
            return Err(Error::bad_file(adapter.file().path(), "the adapter has no LoRA matrices"));
        }
        let unties = config.tied && modules.contains(HEAD);
        let mut wanted: Vec<(String, String, Vec<usize>)> =
            config.tensors().map(|(name, shape)| (name.clone(), name, shape)).collect();
        if unties {
            let shape = vec![config.vocab_size, config.hidden_size];
            wanted.push((UNEMBEDDING.to_owned(), EMBEDDING.to_owned(), shape));
        }
        let mut tensors = Vec::with_capacity(wanted.len());
        for (name, source, shape) in wanted {
            let module = name.strip_suffix(".weight").filter(|_| name != EMBEDDING);
            let module = module.and_then(|module| modules.take(module));
            if let Some(module) = &module
                && let Some(pair) = adapter.pair(module)
            {
                let size = [pair.outputs(), pair.inputs()];
                if shape != size {
                    let reason = mismatch(folder, adapter, module, &shape, size);
                    return Err(Error::bad_file(adapter.file().path(), reason));
                }
            }
            let stored = base.tensor(&source)?.dtype();
            let dtype = dtype.and_then(ExportDType::stored).unwrap_or(stored);
            tensors.push(PlannedTensor { name, shape, dtype, source, module });
        }
        if let Some(module) = modules.first() {
            let reason = format!(
                "it adapts {module}, which is not a linear layer of the base model in {} \
                 ({} layers); {}",
                folder.display(),
                config.layers,
                trained_on(adapter)
            );
            return Err(Error::bad_file(adapter.file().path(), reason));
        }
        Ok(Self { folder: folder.to_owned(), base, dtype, tensors, unties })
    }

    /// Returns the folder of the base model.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the configuration of the base model.
    pub(super) fn config(&self) -> &ModelConfig {
        self.base.config()
    }

    /// Returns the element type that was requested, or `None` to keep that of the base model.
    pub(super) fn dtype(&self) -> Option<ExportDType> {
        self.dtype
    }

    /// Returns the element type of all tensors, or `None` if they differ.
    pub(super) fn only_dtype(&self) -> Option<DType> {
        let first = self.tensors.first()?.dtype;
        self.tensors.iter().all(|tensor| tensor.dtype == first).then_some(first)
    }

    /// Returns whether the merged model is untied although the base model is tied.
    pub(super) fn unties(&self) -> bool {
        self.unties
    }

    /// Returns the tensors in the order of the forward pass.
    pub(super) fn tensors(&self) -> &[PlannedTensor] {
        &self.tensors
    }

    /// Opens a tensor to read its merged rows.
    pub(super) fn open<'a>(
        &'a self,
        adapter: &'a StoredAdapter,
        tensor: &PlannedTensor,
    ) -> Result<MergedTensor<'a>> {
        let pair = tensor.module.as_ref().and_then(|module| adapter.pair(module));
        let scale = adapter.config().scale();
        MergedTensor::open(self.base.tensor(&tensor.source)?, pair.map(|pair| (pair, scale)))
    }
}

/// Returns the reason why the LoRA matrices of `module`, which are for a layer of shape `size`, do
/// not fit the base model, whose layer has the shape `shape`.
fn mismatch(
    folder: &Path,
    adapter: &StoredAdapter,
    module: &str,
    shape: &[usize],
    size: [usize; 2],
) -> String {
    format!(
        "its matrices of {module} are for a module of shape {size:?}, but the base model in {} has \
         {shape:?}; {}",
        folder.display(),
        trained_on(adapter)
    )
}

/// Names the base model that the adapter was trained on.
fn trained_on(adapter: &StoredAdapter) -> String {
    match adapter.config().base_model.as_str() {
        "" => "the adapter does not name the base model that it was trained on".to_owned(),
        name => format!("the adapter was trained on {name:?}"),
    }
}
