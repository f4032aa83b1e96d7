//! Encodes a training request: computes its exact size, then writes it in one pass.

use bytes::Bytes;

use crate::InvalidInput;
use crate::codec::proto::tensor;
use crate::codec::proto::write::{
    DOUBLE_SIZE, bytes_size, nonempty_array_size, nonempty_size, number_size, put_bytes,
    put_double, put_header, put_nonempty, put_nonempty_array, put_number, put_present_number,
    put_text, text_size, varint_size,
};
use crate::datum::{Datum, ProvenanceSpan, SpanSource};
use crate::ids::Seq;
use crate::input::InputChunk;
use crate::loss::LossSetting;
use crate::training::{ForwardBackward, PassMode};

/// Encodes a request that [`validate`] accepts.
pub(crate) fn encode(request: &ForwardBackward) -> Bytes {
    let size = request_size(request);
    let mut out = Vec::with_capacity(size);
    write_request(&mut out, request);
    debug_assert_eq!(out.len(), size, "the computed size differs from the encoded size");
    out.into()
}

/// Rejects values that the protobuf message cannot represent.
pub(crate) fn validate(request: &ForwardBackward) -> Result<(), InvalidInput> {
    if seq(request) > i32::MAX.unsigned_abs().into() {
        return Err(InvalidInput::new(
            "seq_id",
            format!("{} does not fit into 31 bits", seq(request)),
        ));
    }
    for (i, datum) in request.data.iter().enumerate() {
        for (j, chunk) in datum.model_input().chunks.iter().enumerate() {
            validate_chunk(chunk).map_err(|reason| {
                InvalidInput::new(format!("data[{i}].model_input[{j}]"), reason)
            })?;
        }
        let fits = |span: &ProvenanceSpan| i64::try_from(span.offset.max(span.length)).is_ok();
        if !datum.provenance().is_none_or(|provenance| {
            provenance.model_input.iter().chain(&provenance.loss_inputs).all(fits)
        }) {
            return Err(InvalidInput::new(
                format!("data[{i}].provenance"),
                "offset or length does not fit into 63 bits",
            ));
        }
    }
    Ok(())
}

fn validate_chunk(chunk: &InputChunk) -> Result<(), &'static str> {
    match chunk {
        InputChunk::ImageAssetPointer { .. } => {
            Err("an image asset pointer cannot be used for training; send the image data")
        }
        InputChunk::Image { expected_tokens: Some(n), .. } if *n > i32::MAX.unsigned_abs() => {
            Err("expected_tokens does not fit into 31 bits")
        }
        _ => Ok(()),
    }
}

fn seq(request: &ForwardBackward) -> u64 {
    request.seq_id.map_or(0, Seq::get)
}

fn request_size(request: &ForwardBackward) -> usize {
    let settings: usize = request
        .loss_fn_config
        .iter()
        .map(|(name, value)| {
            let setting = entry_size(name, bytes_size(setting_len(value)));
            match value {
                LossSetting::Number(_) => setting + entry_size(name, DOUBLE_SIZE),
                LossSetting::Text(_) => setting,
            }
        })
        .sum();
    text_size(request.model_id.as_str())
        + number_size(seq(request))
        + request.data.iter().map(|datum| bytes_size(datum_size(datum))).sum::<usize>()
        + text_size(request.loss_fn.as_str())
        + number_size(forward_only(request))
        + settings
}

fn write_request(out: &mut Vec<u8>, request: &ForwardBackward) {
    put_text(out, 1, request.model_id.as_str());
    put_number(out, 2, seq(request));
    for datum in &request.data {
        put_header(out, 3, datum_size(datum));
        write_datum(out, datum);
    }
    put_text(out, 4, request.loss_fn.as_str());
    // Write numbers into both maps: older servers read only the first one.
    for (name, value) in request.loss_fn_config.iter() {
        if let LossSetting::Number(number) = value {
            put_entry(out, 5, name, DOUBLE_SIZE);
            put_double(out, 2, *number);
        }
    }
    put_number(out, 6, forward_only(request));
    for (name, value) in request.loss_fn_config.iter() {
        let len = setting_len(value);
        put_entry(out, 7, name, bytes_size(len));
        put_header(out, 2, len);
        match value {
            LossSetting::Number(number) => put_double(out, 1, *number),
            LossSetting::Text(text) => put_bytes(out, 2, text.as_bytes()),
        }
    }
}

fn forward_only(request: &ForwardBackward) -> u64 {
    u64::from(request.mode == PassMode::Forward)
}

fn setting_len(value: &LossSetting) -> usize {
    match value {
        LossSetting::Number(_) => DOUBLE_SIZE,
        LossSetting::Text(text) => bytes_size(text.len()),
    }
}

/// Returns the size of a map entry whose value field has `value` bytes.
fn entry_size(key: &str, value: usize) -> usize {
    bytes_size(bytes_size(key.len()) + value)
}

/// Writes the header and key of a map entry; the caller writes the value field.
fn put_entry(out: &mut Vec<u8>, field: u8, key: &str, value: usize) {
    put_header(out, field, bytes_size(key.len()) + value);
    put_bytes(out, 1, key.as_bytes());
}

fn datum_size(datum: &Datum) -> usize {
    let chunks = &datum.model_input().chunks;
    let chunks: usize = chunks.iter().map(|chunk| bytes_size(bytes_size(chunk_len(chunk)))).sum();
    let inputs: usize = datum
        .loss_inputs()
        .map(|(name, tensor)| entry_size(name, bytes_size(tensor::size(tensor))))
        .sum();
    let spans: usize = datum
        .provenance()
        .into_iter()
        .flat_map(|provenance| provenance.model_input.iter().chain(&provenance.loss_inputs))
        .map(|span| bytes_size(bytes_size(span_len(span))))
        .sum();
    chunks + inputs + spans
}

fn write_datum(out: &mut Vec<u8>, datum: &Datum) {
    for chunk in &datum.model_input().chunks {
        write_chunk(out, chunk);
    }
    for (name, data) in datum.loss_inputs() {
        let len = tensor::size(data);
        put_entry(out, 2, name, bytes_size(len));
        put_header(out, 2, len);
        tensor::write(out, data);
    }
    if let Some(provenance) = datum.provenance() {
        for span in &provenance.model_input {
            write_span(out, 3, span);
        }
        for span in &provenance.loss_inputs {
            write_span(out, 4, span);
        }
    }
}

/// Returns the length of the message inside a `Chunk`.
fn chunk_len(chunk: &InputChunk) -> usize {
    match chunk {
        InputChunk::EncodedText { tokens } => nonempty_array_size::<u32>(tokens),
        InputChunk::Image { data, format, expected_tokens } => {
            nonempty_size(data.len())
                + text_size(format.as_str())
                + expected_tokens.map_or(0, |n| 1 + varint_size(n.into()))
        }
        // `validate` rejects this chunk, so it is never encoded.
        InputChunk::ImageAssetPointer { .. } => 0,
        InputChunk::Dmel { dmel } => nonempty_size(dmel.len()),
    }
}

fn write_chunk(out: &mut Vec<u8>, chunk: &InputChunk) {
    let len = chunk_len(chunk);
    put_header(out, 1, bytes_size(len));
    match chunk {
        InputChunk::EncodedText { tokens } => {
            put_header(out, 1, len);
            put_nonempty_array::<u32>(out, 1, tokens);
        }
        InputChunk::Image { data, format, expected_tokens } => {
            put_header(out, 2, len);
            put_nonempty(out, 1, data);
            put_text(out, 2, format.as_str());
            if let Some(n) = expected_tokens {
                put_present_number(out, 3, (*n).into());
            }
        }
        InputChunk::ImageAssetPointer { .. } => {}
        InputChunk::Dmel { dmel } => {
            put_header(out, 3, len);
            put_nonempty(out, 1, dmel);
        }
    }
}

/// Returns the length of the message inside a `ProvenanceSpan`.
fn span_len(span: &ProvenanceSpan) -> usize {
    text_size(span.sequence_id.as_str()) + number_size(span.offset) + number_size(span.length)
}

fn write_span(out: &mut Vec<u8>, field: u8, span: &ProvenanceSpan) {
    let len = span_len(span);
    put_header(out, field, bytes_size(len));
    let source = match span.source {
        SpanSource::Prompt => 1,
        SpanSource::Sampled => 2,
    };
    put_header(out, source, len);
    put_text(out, 1, span.sequence_id.as_str());
    put_number(out, 2, span.offset);
    put_number(out, 3, span.length);
}
