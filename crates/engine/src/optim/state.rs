//! An optimizer's memory on disk: named tensors beside an adapter.

use std::path::Path;

use super::adam::AdamState;
use super::dimuon::DimuonState;
use super::{Optimizer, OptimizerKind, OptimizerState};
use crate::file::{NamedTensor, TensorFile, TensorSlice, write_tensors};
use crate::{Error, Result};

/// What the numbers in a file mean; a change of a formula's state changes it.
const VERSION: &str = "1";

impl Optimizer {
    /// Writes what it remembers to the safetensors file `path`: `m.NAME`, for Adam also `v.NAME`,
    /// and the number of steps.
    ///
    /// Names and shapes are those of the tensors, in their order.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::Shape`] if they do not fit, [`Error::Io`].
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
        write_tensors(path, &out, &[("optimizer", kind), ("version", VERSION), ("steps", &steps)])
    }

    /// Reads what [`save`](Self::save) wrote, for the same tensors.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] if it is of another family or damaged;
    /// [`Error::MissingTensor`] or [`Error::Shape`] if it is of other tensors.
    pub fn load(
        path: impl AsRef<Path>,
        kind: OptimizerKind,
        tensors: &[(&str, &[usize])],
    ) -> Result<Self> {
        let file = TensorFile::map(path)?;
        let bad = |why: String| Error::bad_file(file.path(), why);
        let said = |key: &str| file.metadata().get(key).map_or("", String::as_str);
        if (said("optimizer"), said("version")) != (kind.name(), VERSION) {
            return Err(bad(format!(
                "holds the state of {:?} version {:?}, expected {:?} version {VERSION:?}",
                said("optimizer"),
                said("version"),
                kind.name()
            )));
        }
        let steps = said("steps");
        let steps =
            steps.parse().map_err(|_| bad(format!("{steps:?} is not a number of steps")))?;
        let read = |prefix: &str| {
            let read = |(name, shape): &(&str, &[usize])| {
                let name = format!("{prefix}.{name}");
                let values = file.tensor(&name)?.with_shape(shape)?.to_f32()?.into_owned();
                let wrong = |value: &f32| !value.is_finite() || (prefix == "v" && *value < 0.0);
                match values.iter().position(wrong) {
                    None => Ok(values),
                    Some(at) => Err(bad(format!("tensor {name} holds {} at {at}", values[at]))),
                }
            };
            tensors.iter().map(read).collect::<Result<Vec<_>>>()
        };
        let state = match kind {
            OptimizerKind::Adam => {
                OptimizerState::Adam(AdamState { means: read("m")?, squares: read("v")? })
            }
            OptimizerKind::Dimuon { rank } => {
                let mut dimuon = DimuonState::new(rank, &[]);
                dimuon.momenta = read("m")?;
                OptimizerState::Dimuon(dimuon)
            }
        };
        Ok(Self { state, steps })
    }

    fn groups(&self) -> Vec<(&'static str, &[Vec<f32>])> {
        match &self.state {
            OptimizerState::Adam(adam) => vec![("m", &adam.means), ("v", &adam.squares)],
            OptimizerState::Dimuon(dimuon) => vec![("m", &dimuon.momenta)],
        }
    }
}
