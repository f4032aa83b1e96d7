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
    /// Plans the tensor `name` with the values of the tensor `source` of the base model.
    fn new(
        base: &ModelFolder,
        name: String,
        source: String,
        shape: Vec<usize>,
        dtype: Option<ExportDType>,
    ) -> Result<Self> {
        let stored = base.tensor(&source)?.dtype();
        let dtype = dtype.and_then(ExportDType::stored).unwrap_or(stored);
        Ok(Self { name, shape, dtype, source, module: None })
    }

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
        let mut plan = Self::of_base(folder, dtype)?;
        plan.add_adapter(adapter)?;
        Ok(plan)
    }

    /// Opens the base model. The plan exports it unchanged.
    ///
    /// # Errors
    /// As [`ModelFolder::open`].
    pub(super) fn of_base(folder: &Path, dtype: Option<ExportDType>) -> Result<Self> {
        let base = ModelFolder::open(folder)?;
        let all = base.config().tensors();
        let tensors = all
            .map(|(name, shape)| PlannedTensor::new(&base, name.clone(), name, shape, dtype))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { folder: folder.to_owned(), base, dtype, tensors, unties: false })
    }

    /// Assigns the matrices of the adapter to the tensors. Adds an unembedding if the adapter adapts
    /// the unembedding of a tied model, because the embedding must stay unchanged.
    fn add_adapter(&mut self, adapter: &StoredAdapter) -> Result<()> {
        let failed = |reason: String| Error::bad_file(adapter.file().path(), reason);
        let mut modules: BTreeSet<&str> = adapter.modules().collect();
        if modules.is_empty() {
            return Err(failed("the adapter has no LoRA matrices".to_owned()));
        }
        if modules.contains(HEAD) {
            self.untie()?;
        }
        for tensor in self.tensors.iter_mut().filter(|tensor| tensor.name != EMBEDDING) {
            let Some(module) = tensor.name.strip_suffix(".weight") else { continue };
            if !modules.remove(module) {
                continue;
            }
            let Some(pair) = adapter.pair(module) else { continue };
            let size = [pair.outputs(), pair.inputs()];
            if tensor.shape != size {
                return Err(failed(mismatch(&self.folder, adapter, module, &tensor.shape, size)));
            }
            tensor.module = Some(module.to_owned());
        }
        match modules.first() {
            None => adapter.check_frozen(|name| self.base.tensor(name)),
            Some(module) => Err(failed(format!(
                "it adapts {module}, which is not a linear layer of the base model in {} ({} \
                 layers); {}",
                self.folder.display(),
                self.base.config().layers,
                trained_on(adapter)
            ))),
        }
    }

    /// Adds an unembedding of its own to a tied model.
    pub(super) fn untie(&mut self) -> Result<()> {
        let config = self.base.config();
        if config.tied && !self.unties {
            let shape = vec![config.vocab_size, config.hidden_size];
            let name = UNEMBEDDING.to_owned();
            let source = EMBEDDING.to_owned();
            self.tensors.push(PlannedTensor::new(&self.base, name, source, shape, self.dtype)?);
            self.unties = true;
        }
        Ok(())
    }

    /// Returns the size of all tensors in safetensors files, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.tensors.iter().map(PlannedTensor::bytes).sum()
    }

    /// Returns the folder of the base model.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the configuration of the base model.
    pub(super) fn config(&self) -> &ModelConfig {
        self.base.config()
    }

    /// Returns the element type that was requested, or `None` to keep the element types of the base
    /// model.
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
