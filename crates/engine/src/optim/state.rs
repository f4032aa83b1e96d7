//! Saves and loads the state of an optimizer.

use std::path::Path;

use super::adam::AdamState;
use super::dimuon::DimuonState;
use super::{Optimizer, OptimizerKind, OptimizerState};
use crate::{Error, Result};
use tinkex_weights::{NamedTensor, TensorFile, TensorSlice, write_tensors};

/// Version of the file format. Changes when the meaning of the stored tensors changes.
const VERSION: &str = "1";

impl Optimizer {
    /// Writes the state to the safetensors file `path`: first moments (of Dimuon: momenta) as
    /// `m.NAME`, second moments of Adam as `v.NAME`, and the number of steps as metadata.
    ///
    /// `tensors` gives the names and shapes of the tensors, in the order of [`new`](Self::new).
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::File`] if `tensors` does not match the state; [`Error::File`]
    /// if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>, tensors: &[(&str, &[usize])]) -> Result<()> {
        let groups = self.groups();
        let mut names = Vec::new();
        for (prefix, values) in &groups {
            if values.len() != tensors.len() {
                let field = "the list of tensors".to_owned();
                return Err(Error::Length { field, expected: values.len(), got: tensors.len() });
            }
            names.extend(tensors.iter().map(|(name, _)| format!("{prefix}.{name}")));
        }
        let values = groups.iter().flat_map(|(_, values)| values.iter());
        let shapes = groups.iter().flat_map(|_| tensors.iter().map(|(_, shape)| *shape));
        let out: Vec<NamedTensor<'_>> = names
            .iter()
            .zip(shapes.zip(values))
            .map(|(name, (shape, values))| NamedTensor {
                name,
                shape,
                values: TensorSlice::F32(values),
            })
            .collect();
        let steps = self.steps.to_string();
        let kind = self.kind().name();
        let metadata = [("optimizer", kind), ("version", VERSION), ("steps", &steps)];
        Ok(write_tensors(path, &out, &metadata)?)
    }

    /// Reads a state that [`save`](Self::save) wrote for the same tensors.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, is damaged, or belongs to another kind of
    /// optimizer or to other tensors.
    pub fn load(
        path: impl AsRef<Path>,
        kind: OptimizerKind,
        tensors: &[(&str, &[usize])],
    ) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let bad = |reason: String| Error::bad_file(file.path(), reason);
        let metadata = |key: &str| file.metadata().get(key).map_or("", String::as_str);
        if (metadata("optimizer"), metadata("version")) != (kind.name(), VERSION) {
            return Err(bad(format!(
                "it contains the state of {:?} version {:?}, expected {:?} version {VERSION:?}",
                metadata("optimizer"),
                metadata("version"),
                kind.name()
            )));
        }
        let steps = metadata("steps");
        let steps = steps.parse().map_err(|_| bad(format!("the number of steps is {steps:?}")))?;
        let read = |prefix: &str| {
            let read = |(name, shape): &(&str, &[usize])| {
                let name = format!("{prefix}.{name}");
                let values = file.tensor(&name)?.with_shape(shape)?.to_f32()?;
                let invalid = |value: &f32| !value.is_finite() || (prefix == "v" && *value < 0.0);
                match values.iter().position(invalid) {
                    None => Ok(values),
                    Some(at) => Err(bad(format!("tensor {name} is {} at index {at}", values[at]))),
                }
            };
            tensors.iter().map(read).collect::<Result<Vec<_>>>()
        };
        let state = match kind {
            OptimizerKind::Adam => OptimizerState::Adam(AdamState {
                first_moments: read("m")?,
                second_moments: read("v")?,
            }),
            OptimizerKind::Dimuon { rank } => {
                let mut dimuon = DimuonState::new(rank, &[]);
                dimuon.momenta = read("m")?;
                OptimizerState::Dimuon(dimuon)
            }
        };
        Ok(Self { state, steps })
    }

    /// Returns the tensors of the state by the prefix of their names.
    fn groups(&self) -> Vec<(&'static str, &[Vec<f32>])> {
        match &self.state {
            OptimizerState::Adam(adam) => {
                vec![("m", &adam.first_moments), ("v", &adam.second_moments)]
            }
            OptimizerState::Dimuon(dimuon) => vec![("m", &dimuon.momenta)],
        }
    }
}
