//! Decodes a training request.

use std::borrow::Cow;

use bytes::Bytes;

use crate::codec::proto::read::{Field, Fields, Names, count, u32s};
use crate::codec::proto::{MAX_ENTRIES, entry, tensor};
use crate::datum::{Datum, Provenance, ProvenanceSpan, SpanSource, loss_input};
use crate::ids::{ModelId, Seq};
use crate::input::{ImageFormat, InputChunk, ModelInput};
use crate::loss::{LossConfig, LossFn, LossSetting};
use crate::tensor::TensorData;
use crate::tokens::Tokens;
use crate::training::{ForwardBackward, PassMode};
use crate::{DecodeError, DecodeErrorKind};

const REQUEST: Names = &[
    "model_id",
    "seq_id",
    "data",
    "loss_fn",
    "loss_fn_config",
    "forward_only",
    "loss_fn_config_v2",
];
const DATUM: Names = &["model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans"];
const CHUNK: Names = &["encoded_text", "image", "dmel"];
const ENCODED_TEXT: Names = &["tokens"];
const IMAGE: Names = &["data", "format", "expected_tokens", "override_dimensions"];
const DMEL: Names = &["dmel"];
const SPAN: Names = &["prompt_tokens", "sampled_tokens"];
const SPAN_RANGE: Names = &["sequence_id", "offset", "length"];
const SETTING: Names = &["number", "text"];

pub(crate) fn decode(body: &Bytes) -> Result<ForwardBackward, DecodeError> {
    let [datums] = count(body, REQUEST, [3])?;
    let mut model_id = "";
    let mut seq_id = None;
    let mut loss_fn = "";
    let mut data = Vec::with_capacity(datums);
    let mut mode = PassMode::ForwardBackward;
    let mut numbers = LossConfig::new();
    let mut settings = LossConfig::new();
    let mut fields = Fields::new(body, REQUEST);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => model_id = field.text()?,
            2 => {
                let seq = field.count32()?;
                seq_id = (seq != 0).then(|| Seq::new(seq.into()));
            }
            3 => {
                let at = data.len();
                let datum =
                    field.message(|bytes| decode_datum(body, bytes).map_err(|e| e.at(at)))?;
                data.push(datum);
            }
            4 => loss_fn = field.text()?,
            5 => field.message(|bytes| {
                let (name, value) = entry(bytes)?;
                let number = value.as_ref().map_or(Ok(0.0), Field::double);
                let number = number.map_err(|error| error.at_key(name))?;
                add_setting(&mut numbers, name, LossSetting::Number(number))
            })?,
            6 if field.varint()? != 0 => mode = PassMode::Forward,
            7 => field.message(|bytes| {
                let (name, value) = entry(bytes)?;
                let message = value.as_ref().map_or(Ok(&[][..]), Field::bytes);
                let setting = message.and_then(decode_setting).map_err(|e| e.at_key(name))?;
                add_setting(&mut settings, name, setting)
            })?,
            _ => {}
        }
    }
    Ok(ForwardBackward {
        model_id: ModelId::from(model_id),
        seq_id,
        data,
        loss_fn: LossFn::from(loss_fn),
        loss_fn_config: if settings.is_empty() { numbers } else { settings },
        mode,
    })
}

fn add_setting(config: &mut LossConfig, name: &str, value: LossSetting) -> Result<(), DecodeError> {
    config.insert(name.to_owned().into(), value);
    if config.iter().len() > MAX_ENTRIES {
        let detail = format!("more than {MAX_ENTRIES} settings");
        return Err(DecodeError::new(DecodeErrorKind::TooLarge, detail));
    }
    Ok(())
}

fn decode_setting(message: &[u8]) -> Result<LossSetting, DecodeError> {
    let mut setting = None;
    let mut fields = Fields::new(message, SETTING);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => setting = Some(LossSetting::Number(field.double()?)),
            2 => setting = Some(LossSetting::Text(field.text()?.to_owned())),
            _ => {}
        }
    }
    setting.ok_or_else(|| {
        DecodeError::new(DecodeErrorKind::Missing, "setting has neither a number nor a string")
    })
}

fn decode_datum(body: &Bytes, message: &[u8]) -> Result<Datum, DecodeError> {
    // Reserve the exact capacity: a request has many datums with several lists each.
    let [chunks, inputs, input_spans, loss_spans] = count(message, DATUM, [1, 2, 3, 4])?;
    let mut chunks = Vec::with_capacity(chunks);
    let mut inputs: Vec<(Cow<'static, str>, TensorData)> =
        Vec::with_capacity(inputs.min(MAX_ENTRIES));
    let mut input_spans = Vec::with_capacity(input_spans);
    let mut loss_spans = Vec::with_capacity(loss_spans);
    let mut fields = Fields::new(message, DATUM);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => {
                let at = chunks.len();
                chunks.push(field.message(|m| decode_chunk(body, m).map_err(|e| e.at(at)))?);
            }
            2 => {
                let (name, tensor) = field.message(|bytes| {
                    let (name, value) = entry(bytes)?;
                    let message = value.as_ref().map_or(Ok(&[][..]), Field::bytes);
                    let tensor = message.and_then(tensor::decode);
                    Ok((name, tensor.map_err(|error| error.at_key(name))?))
                })?;
                let full = inputs.len() == MAX_ENTRIES;
                match inputs.iter_mut().find(|(key, _)| key == name) {
                    Some((_, old)) => *old = tensor,
                    None if full => {
                        let detail = format!("datum has more than {MAX_ENTRIES} loss inputs");
                        return Err(field.fail(DecodeErrorKind::TooLarge, detail));
                    }
                    None => inputs.push((input_name(name), tensor)),
                }
            }
            3 => {
                let at = input_spans.len();
                input_spans.push(field.message(|m| decode_span(m).map_err(|e| e.at(at)))?);
            }
            4 => {
                let at = loss_spans.len();
                loss_spans.push(field.message(|m| decode_span(m).map_err(|e| e.at(at)))?);
            }
            _ => {}
        }
    }
    let provenance = match (input_spans.is_empty(), loss_spans.is_empty()) {
        (true, true) => None,
        (false, false) => {
            Some(Box::new(Provenance { model_input: input_spans, loss_inputs: loss_spans }))
        }
        (input_missing, _) => {
            let name = if input_missing { DATUM[2] } else { DATUM[3] };
            let detail = "required if the other list of spans is present";
            return Err(DecodeError::new(DecodeErrorKind::Missing, detail).within(name));
        }
    };
    Ok(Datum::from_parts(ModelInput { chunks }, inputs, provenance))
}

/// Returns a static string for built-in names, to avoid an allocation per datum.
fn input_name(name: &str) -> Cow<'static, str> {
    let known = loss_input::ALL.into_iter().find(|known| *known == name);
    known.map_or_else(|| Cow::Owned(name.to_owned()), Cow::Borrowed)
}

fn decode_chunk(body: &Bytes, message: &[u8]) -> Result<InputChunk, DecodeError> {
    let mut chunk = None;
    let mut fields = Fields::new(message, CHUNK);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => chunk = Some(field.message(decode_text)?),
            2 => chunk = Some(field.message(|m| decode_image(body, m))?),
            3 => chunk = Some(field.message(|m| decode_dmel(body, m))?),
            _ => {}
        }
    }
    chunk.ok_or_else(|| {
        DecodeError::new(DecodeErrorKind::Missing, "chunk is empty or of an unknown kind")
    })
}

fn decode_text(message: &[u8]) -> Result<InputChunk, DecodeError> {
    let mut tokens = Tokens::default();
    let mut fields = Fields::new(message, ENCODED_TEXT);
    while let Some(field) = fields.next()? {
        if field.number == 1 {
            tokens = field.message(u32s)?.into();
        }
    }
    Ok(InputChunk::EncodedText { tokens })
}

fn decode_image(body: &Bytes, message: &[u8]) -> Result<InputChunk, DecodeError> {
    let mut data = Bytes::new();
    let mut format = None;
    let mut expected_tokens = None;
    let mut fields = Fields::new(message, IMAGE);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => data = body.slice_ref(field.bytes()?),
            2 => {
                let name = field.text()?;
                let known = ImageFormat::from_name(name);
                let detail = || format!("expected png or jpeg, found {name:?}");
                format = Some(known.ok_or_else(|| field.fail(DecodeErrorKind::Value, detail()))?);
            }
            3 => expected_tokens = Some(field.count32()?),
            _ => {}
        }
    }
    let missing = || DecodeError::new(DecodeErrorKind::Missing, "missing, expected png or jpeg");
    let format = format.ok_or_else(|| missing().within("format"))?;
    Ok(InputChunk::Image { data, format, expected_tokens })
}

fn decode_dmel(body: &Bytes, message: &[u8]) -> Result<InputChunk, DecodeError> {
    let mut dmel = Bytes::new();
    let mut fields = Fields::new(message, DMEL);
    while let Some(field) = fields.next()? {
        if field.number == 1 {
            dmel = body.slice_ref(field.bytes()?);
        }
    }
    Ok(InputChunk::Dmel { dmel })
}

fn decode_span(message: &[u8]) -> Result<ProvenanceSpan, DecodeError> {
    let mut span = None;
    let mut fields = Fields::new(message, SPAN);
    while let Some(field) = fields.next()? {
        let source = match field.number {
            1 => SpanSource::Prompt,
            2 => SpanSource::Sampled,
            _ => continue,
        };
        span = Some(field.message(|m| decode_range(source, m))?);
    }
    span.ok_or_else(|| {
        DecodeError::new(DecodeErrorKind::Missing, "span has no prompt or sampled tokens")
    })
}

fn decode_range(source: SpanSource, message: &[u8]) -> Result<ProvenanceSpan, DecodeError> {
    let mut sequence_id = "";
    let mut offset = 0;
    let mut length = 0;
    let mut fields = Fields::new(message, SPAN_RANGE);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => sequence_id = field.text()?,
            2 => offset = field.count()?,
            3 => length = field.count()?,
            _ => {}
        }
    }
    Ok(ProvenanceSpan { source, sequence_id: sequence_id.into(), offset, length })
}
