//! Files of a PEFT adapter folder.

use std::path::Path;

use super::card::CardDetails;
use super::output::OutputFile;
use crate::adapter::{CONFIG, TENSORS, matrix_name};
use crate::{AdapterConversion, Result, StoredAdapter};

/// Returns the files of the folder. The tensors keep their values and element types. The file of an
/// adapter whose tensors already have the names of `peft` is copied unchanged. Frozen weights of the
/// base model are left out.
pub(super) fn files(
    folder: &Path,
    adapter: &StoredAdapter,
    card: &CardDetails,
) -> Result<Vec<OutputFile>> {
    let mut tensors = Vec::new();
    for module in adapter.modules() {
        let Some(pair) = adapter.pair(module) else { continue };
        for (matrix, stored) in [pair.a, pair.b].into_iter().enumerate() {
            tensors.push((stored.name().to_owned(), matrix_name(module, matrix)));
        }
    }
    let is_unchanged = !adapter.has_frozen() && tensors.iter().all(|(source, name)| source == name);
    let conversion = AdapterConversion::open(folder)?;
    Ok(vec![
        OutputFile::text("README.md", card.adapter()),
        match conversion.and_then(|conversion| conversion.changed_config()) {
            Some(text) => OutputFile::text(CONFIG, text),
            None => OutputFile::copy(CONFIG, folder.join(CONFIG))?,
        },
        if is_unchanged {
            OutputFile::copy(TENSORS, folder.join(TENSORS))?
        } else {
            OutputFile::adapter(TENSORS, adapter, tensors)?
        },
    ])
}
