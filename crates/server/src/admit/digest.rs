//! Digests of request bodies, which distinguish a retry from another request with the same sequence
//! number.

use sha2::{Digest as _, Sha256};
use tinkex_wire::{Datum, ForwardBackward, InputChunk, LossSetting, TensorData, TensorValues};

/// Returns the digest of a body.
pub(super) fn of_bytes(bytes: &[u8]) -> String {
    to_hex(Sha256::new_with_prefix(bytes))
}

/// Returns the digest of a training pass. Protobuf maps have no order, so equal requests may have
/// different bytes. The entries of maps are therefore sorted before they are hashed.
pub(super) fn of_pass(pass: &ForwardBackward) -> String {
    let mut hash = Sha256::new();
    let loss = pass.loss_fn.as_str();
    put(&mut hash, loss.as_bytes());
    put(&mut hash, format!("{:?}", pass.mode).as_bytes());
    let mut settings: Vec<_> = pass.loss_fn_config.iter().collect();
    settings.sort_by_key(|(name, _)| *name);
    for (name, setting) in settings {
        put(&mut hash, name.as_bytes());
        match setting {
            LossSetting::Number(number) => put(&mut hash, &number.to_bits().to_le_bytes()),
            LossSetting::Text(text) => put(&mut hash, text.as_bytes()),
        }
    }
    pass.data.iter().for_each(|datum| put_datum(&mut hash, datum));
    to_hex(hash)
}

fn put_datum(hash: &mut Sha256, datum: &Datum) {
    for chunk in &datum.model_input().chunks {
        match chunk {
            InputChunk::EncodedText { tokens, .. } => put(hash, bytemuck::cast_slice(tokens)),
            other => put(hash, format!("{other:?}").as_bytes()),
        }
    }
    let mut inputs: Vec<_> = datum.loss_inputs().collect();
    inputs.sort_by_key(|(name, _)| *name);
    for (name, tensor) in inputs {
        put(hash, name.as_bytes());
        put_tensor(hash, tensor);
    }
}

fn put_tensor(hash: &mut Sha256, tensor: &TensorData) {
    put(hash, format!("{:?}", tensor.shape()).as_bytes());
    match tensor.values() {
        TensorValues::Int64(values) => put(hash, bytemuck::cast_slice(values)),
        TensorValues::Float32(values) => put(hash, bytemuck::cast_slice(values)),
    }
    for indices in [tensor.row_starts(), tensor.columns()].into_iter().flatten() {
        put(hash, bytemuck::cast_slice(indices));
    }
}

/// Hashes the length of `bytes` and then `bytes`, so that `ab` + `c` and `a` + `bc` have different
/// digests.
fn put(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

/// Returns the first 16 bytes of the hash in hexadecimal.
fn to_hex(hash: Sha256) -> String {
    hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}
