//! [`StoredAdapter`]: an open PEFT adapter folder, whose matrices are read when they are used.

use std::collections::BTreeMap;
use std::path::Path;

use crate::adapter::{
    CONFIG, HEAD, PREFIX, SERVICE_HEAD, TENSORS, frozen_module, matrix_name, parse_name,
    unsupported_part,
};
use crate::config::EMBEDDING;
use crate::{DType, Error, LoraPair, PeftConfig, Result, StoredTensor, TensorFile};

/// An open adapter folder, whose matrices stay in the file until they are used.
///
/// ```no_run
/// let adapter = tinkex_weights::StoredAdapter::open("adapter")?;
/// for module in adapter.modules() {
///     println!("{module}: rank {}", adapter.config().rank);
/// }
/// # Ok::<_, tinkex_weights::Error>(())
/// ```
#[derive(Debug)]
pub struct StoredAdapter {
    config: PeftConfig,
    file: TensorFile,
    /// Names of the tensors A and B of each module.
    names: BTreeMap<String, [String; 2]>,
    /// Names of the tensors with frozen weights of the base model, by module.
    frozen: BTreeMap<String, String>,
}

/// The LoRA matrices of one module in a file.
#[derive(Clone, Copy, Debug)]
pub struct StoredLoraPair<'a> {
    /// A, `rank × inputs`.
    pub a: StoredTensor<'a>,
    /// B, `outputs × rank`, not scaled.
    pub b: StoredTensor<'a>,
}

impl StoredLoraPair<'_> {
    /// Returns the number of inputs of the module.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.a.shape()[1]
    }

    /// Returns the number of outputs of the module.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.b.shape()[0]
    }
}

impl StoredAdapter {
    /// Opens the adapter folder `path`. Accepts the name that the hosted service gives to the
    /// unembedding, `model.unembed_tokens`, besides `lm_head`.
    ///
    /// Checks the configuration, and that the tensors are complete pairs of the configured rank and
    /// of a type that can be converted to f32. Reads no values. Ignores frozen weights of the base
    /// model, which `peft` stores beside the LoRA matrices of `lm_head`;
    /// [`check_frozen`](Self::check_frozen) compares them with the base model.
    ///
    /// # Errors
    /// - [`Error::Io`] if a file cannot be read.
    /// - [`Error::BadFile`] if a file is damaged, or contains a tensor that is not a LoRA matrix,
    ///   does not have the configured rank or is not among the configured modules.
    /// - [`Error::MissingTensor`] if A or B of a module is missing.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let config = PeftConfig::read(path.join(CONFIG))?;
        let file = TensorFile::open(path.join(TENSORS))?;
        let mut found: BTreeMap<&str, [Option<&str>; 2]> = BTreeMap::new();
        let mut frozen = BTreeMap::new();
        for tensor in file.tensors() {
            if let Some(module) = frozen_module(tensor.name()) {
                frozen.insert(module.to_owned(), tensor.name().to_owned());
                continue;
            }
            let Some((module, matrix)) = parse_name(tensor.name()) else {
                let name = tensor.name();
                let part = unsupported_part(tensor.name());
                return Err(Error::bad_file(file.path(), format!("tensor {name} is {part}")));
            };
            // No configuration lists the name that the hosted service gives to the unembedding.
            let is_service_name = tensor.name()[PREFIX.len()..].starts_with(SERVICE_HEAD);
            if !is_service_name && !config.targets(module) {
                let name = tensor.name();
                let reason = format!("target_modules in {CONFIG} does not select tensor {name}");
                return Err(Error::bad_file(file.path(), reason));
            }
            if found.entry(module).or_default()[matrix].replace(tensor.name()).is_some() {
                let reason = format!("{module} has two tensors lora_{}", ["A", "B"][matrix]);
                return Err(Error::bad_file(file.path(), reason));
            }
        }
        if let Some((module, name)) =
            frozen.iter().find(|(module, _)| !found.contains_key(module.as_str()))
        {
            let reason =
                format!("tensor {name} is a base weight, but {module} has no LoRA matrices");
            return Err(Error::bad_file(file.path(), reason));
        }
        let mut names = BTreeMap::new();
        for (module, [a, b]) in found {
            let missing = |matrix| Error::MissingTensor {
                path: file.path().to_owned(),
                name: matrix_name(module, matrix),
            };
            let a = a.ok_or_else(|| missing(0))?;
            let b = b.ok_or_else(|| missing(1))?;
            let stored_a = file.tensor(a)?.as_float()?;
            let stored_b = file.tensor(b)?.as_float()?;
            let inputs = stored_a.shape().last().copied().unwrap_or(0);
            let outputs = stored_b.shape().first().copied().unwrap_or(0);
            stored_a.with_shape(&[config.rank, inputs])?;
            stored_b.with_shape(&[outputs, config.rank])?;
            names.insert(module.to_owned(), [a.to_owned(), b.to_owned()]);
        }
        Ok(Self { config, file, names, frozen })
    }

    /// Returns rank, scale and base model.
    #[must_use]
    pub fn config(&self) -> &PeftConfig {
        &self.config
    }

    /// Returns the file with the matrices.
    #[must_use]
    pub fn file(&self) -> &TensorFile {
        &self.file
    }

    /// Returns the names of the adapted modules, sorted, for example
    /// `model.layers.0.self_attn.q_proj`; the unembedding is `lm_head`.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// Returns the matrices of a module, or `None` if the module is not adapted.
    #[must_use]
    pub fn pair(&self, module: &str) -> Option<StoredLoraPair<'_>> {
        let [a, b] = self.names.get(module)?;
        Some(StoredLoraPair { a: self.file.get(a)?, b: self.file.get(b)? })
    }

    /// Returns the element type of all matrices, or `None` if they differ.
    #[must_use]
    pub fn only_dtype(&self) -> Option<DType> {
        let pairs = self.modules().filter_map(|module| self.pair(module));
        let mut all = pairs.flat_map(|pair| [pair.a.dtype(), pair.b.dtype()]);
        let first = all.next()?;
        all.all(|dtype| dtype == first).then_some(first)
    }

    /// Returns whether the file contains frozen weights of the base model.
    #[must_use]
    pub fn has_frozen(&self) -> bool {
        !self.frozen.is_empty()
    }

    /// Checks that the frozen weights of the base model in the file, if it has any, equal the base
    /// model. `base` returns the tensor of the base model with the given name.
    ///
    /// # Errors
    /// [`Error::BadFile`] if they differ: the adapter was trained on another base model.
    /// [`Error::Io`] if a file cannot be read.
    pub fn check_frozen<'a>(&self, base: impl Fn(&str) -> Result<StoredTensor<'a>>) -> Result<()> {
        for (module, name) in &self.frozen {
            let weights = match base(&format!("{module}.weight")) {
                // The unembedding of a tied model is its embedding.
                Err(Error::MissingTensor { .. }) if module == HEAD => base(EMBEDDING)?,
                other => other?,
            };
            if !self.file.tensor(name)?.has_values_of(&weights)? {
                let reason = format!(
                    "tensor {name} differs from {module} of the base model; save the adapter with \
                     save_embedding_layers=False if its base is a conversion of this one"
                );
                return Err(Error::bad_file(self.file.path(), reason));
            }
        }
        Ok(())
    }

    /// Reads the matrices of all modules, in the order of their names.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::BadFile`] if a value is not finite.
    pub fn read_pairs(&self) -> Result<Vec<LoraPair>> {
        let mut pairs = Vec::with_capacity(self.names.len());
        for module in self.modules() {
            let Some(pair) = self.pair(module) else { continue };
            let inputs = pair.inputs();
            let outputs = pair.outputs();
            let a = finite(pair.a)?;
            let b = finite(pair.b)?;
            pairs.push(LoraPair { module: module.to_owned(), inputs, outputs, a, b });
        }
        Ok(pairs)
    }

    /// Checks that every value is finite. Reads a part of one matrix at a time.
    ///
    /// # Errors
    /// As [`read_pairs`](Self::read_pairs).
    pub fn check_finite(&self) -> Result<()> {
        for pair in self.modules().filter_map(|module| self.pair(module)) {
            pair.a.check_all_finite()?;
            pair.b.check_all_finite()?;
        }
        Ok(())
    }
}

/// Returns the elements of a tensor, all of which must be finite.
fn finite(tensor: StoredTensor<'_>) -> Result<Vec<f32>> {
    let values = tensor.to_f32()?;
    tensor.check_finite(0, &values)?;
    Ok(values)
}
