//! `ForwardBackwardOutput`, encoded by servers and decoded by clients.

use bytes::Bytes;

use crate::output::{LossOutputs, LossRecord, OutputColumn};
use crate::slice::SharedSlice;
use crate::tensor::Shape;
use crate::training::{DEFAULT_OUTPUT_TYPE, ForwardBackwardOutput, Metrics};
use crate::{DecodeError, DecodeErrorKind};

use super::read::{Field, Fields, Names, count, i64s};
use super::tensor::{WireType, put_values, values_len, wire_number};
use super::write::{
    DOUBLE_SIZE, bytes_size, dims_size, nonempty_size, number_size, put_bytes, put_dims,
    put_double, put_header, put_number, put_text, text_size,
};
use super::{MAX_ENTRIES, entry};

const OUTPUT: Names = &["loss_fn_output_type", "loss_fn_outputs", "metrics"];
const RECORD: Names = &["type_tag", "fields", "num_datums"];
const BATCHED: Names = &["data", "offsets", "dtype", "trailing_shape"];

/// Maximum number of datums of a result. Without the limit, a record without fields could declare
/// any number.
const MAX_DATUMS: u64 = 1 << 20;

pub(crate) fn encode(output: &ForwardBackwardOutput) -> Bytes {
    let records = output.loss_fn_outputs.records();
    let size = text_size(&output.loss_fn_output_type)
        + records.iter().map(|record| bytes_size(record_size(record))).sum::<usize>()
        + output.metrics.keys().map(|name| bytes_size(metric_len(name))).sum::<usize>();
    let mut out = Vec::with_capacity(size);
    put_text(&mut out, 1, &output.loss_fn_output_type);
    for record in records {
        put_header(&mut out, 2, record_size(record));
        write_record(&mut out, record);
    }
    for (name, number) in &output.metrics {
        put_header(&mut out, 3, metric_len(name));
        put_bytes(&mut out, 1, name.as_bytes());
        put_double(&mut out, 2, *number);
    }
    debug_assert_eq!(out.len(), size, "the computed size differs from the encoded size");
    out.into()
}

fn metric_len(name: &str) -> usize {
    bytes_size(name.len()) + DOUBLE_SIZE
}

fn record_size(record: &LossRecord) -> usize {
    text_size(&record.type_tag)
        + record.fields.iter().map(|column| bytes_size(field_len(column))).sum::<usize>()
        + number_size(record.datums as u64)
}

fn write_record(out: &mut Vec<u8>, record: &LossRecord) {
    put_text(out, 1, &record.type_tag);
    for column in &record.fields {
        put_header(out, 2, field_len(column));
        put_bytes(out, 1, column.name.as_bytes());
        put_header(out, 2, batched_size(column));
        write_batched(out, column);
    }
    put_number(out, 3, record.datums as u64);
}

/// Returns the length of the map entry of a column.
fn field_len(column: &OutputColumn) -> usize {
    bytes_size(column.name.len()) + bytes_size(batched_size(column))
}

fn batched_size(column: &OutputColumn) -> usize {
    nonempty_size(values_len(&column.values))
        + bytes_size(column.starts.len() * size_of::<i64>())
        + number_size(wire_number(column.values.dtype()))
        + dims_size(column.trailing.dims())
}

fn write_batched(out: &mut Vec<u8>, column: &OutputColumn) {
    if !column.values.is_empty() {
        put_values(out, 1, &column.values);
    }
    put_header(out, 2, column.starts.len() * size_of::<i64>());
    for start in &column.starts {
        let offset = (start * column.values.dtype().size()) as u64;
        out.extend_from_slice(&offset.to_le_bytes());
    }
    put_number(out, 3, wire_number(column.values.dtype()));
    put_dims(out, 4, column.trailing.dims());
}

pub(crate) fn decode(body: &[u8]) -> Result<ForwardBackwardOutput, DecodeError> {
    let mut output_type = "";
    let [records] = count(body, OUTPUT, [2])?;
    let mut records = Vec::with_capacity(records);
    let mut metrics = Metrics::new();
    let mut fields = Fields::new(body, OUTPUT);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => output_type = field.text()?,
            2 => {
                let at = records.len();
                records.push(field.message(|m| decode_record(m).map_err(|e| e.at(at)))?);
            }
            3 => {
                let (name, number) = field.message(|bytes| {
                    let (name, value) = entry(bytes)?;
                    let number = value.as_ref().map_or(Ok(0.0), Field::double);
                    Ok((name, number.map_err(|error| error.at_key(name))?))
                })?;
                metrics.insert(name.to_owned(), number);
            }
            _ => {}
        }
    }
    let records = assign_datums(records).map_err(|error| error.within(OUTPUT[1]))?;
    Ok(ForwardBackwardOutput {
        loss_fn_output_type: short_type(output_type).to_owned(),
        loss_fn_outputs: records,
        metrics,
    })
}

/// Removes the module path from a qualified type name.
pub(crate) fn short_type(qualified: &str) -> &str {
    match qualified.rsplit(':').next() {
        None | Some("") => DEFAULT_OUTPUT_TYPE,
        Some(name) => name,
    }
}

/// Decoded record whose number of datums is not determined yet; see [`assign_datums`].
struct RawRecord {
    type_tag: String,
    fields: Vec<OutputColumn>,
    num_datums: u64,
}

/// Determines the number of datums of each record: the declared numbers, or the lengths of the
/// fields if no record declares a number.
fn assign_datums(raw: Vec<RawRecord>) -> Result<LossOutputs, DecodeError> {
    let declared = raw.iter().any(|record| record.num_datums > 0);
    let mut total = 0_u64;
    let mut records = Vec::with_capacity(raw.len());
    for (at, mut record) in raw.into_iter().enumerate() {
        let in_fields = record.fields.first().map_or(0, |column| column.starts.len() - 1);
        let datums = if declared { record.num_datums } else { in_fields as u64 };
        if datums == 0 {
            record.fields.clear();
        }
        total = total.saturating_add(datums);
        if total > MAX_DATUMS {
            let detail = format!("result has more than {MAX_DATUMS} datums");
            return Err(DecodeError::new(DecodeErrorKind::TooLarge, detail).at(at));
        }
        for column in &record.fields {
            if (column.starts.len() - 1) as u64 != datums {
                let detail = format!(
                    "offsets of {} datums in a record of {datums}",
                    column.starts.len() - 1
                );
                let error = DecodeError::new(DecodeErrorKind::Offsets, detail).within(BATCHED[1]);
                return Err(error.at_key(&column.name).within(RECORD[1]).at(at));
            }
        }
        let datums = usize::try_from(datums).expect("the total is at most MAX_DATUMS");
        records.push(LossRecord { type_tag: record.type_tag, datums, fields: record.fields });
    }
    Ok(LossOutputs::from_records(records).expect("the total is at most MAX_DATUMS"))
}

fn decode_record(message: &[u8]) -> Result<RawRecord, DecodeError> {
    let mut record = RawRecord { type_tag: String::new(), fields: Vec::new(), num_datums: 0 };
    let mut fields = Fields::new(message, RECORD);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => record.type_tag = field.text()?.to_owned(),
            2 => {
                let column = field.message(|bytes| {
                    let (name, value) = entry(bytes)?;
                    let message = value.as_ref().map_or(Ok(&[][..]), Field::bytes);
                    let column = message.and_then(|message| decode_column(name, message));
                    column.map_err(|error| error.at_key(name))
                })?;
                let full = record.fields.len() == MAX_ENTRIES;
                match record.fields.iter_mut().find(|old| old.name == column.name) {
                    Some(old) => *old = column,
                    None if full => {
                        let detail = format!("record has more than {MAX_ENTRIES} fields");
                        return Err(field.fail(DecodeErrorKind::TooLarge, detail));
                    }
                    None => record.fields.push(column),
                }
            }
            3 => record.num_datums = field.count()?,
            _ => {}
        }
    }
    Ok(record)
}

fn decode_column(name: &str, message: &[u8]) -> Result<OutputColumn, DecodeError> {
    let mut data = &[][..];
    let mut offsets = SharedSlice::default();
    let mut wire_type = 0;
    let mut trailing = Shape::SCALAR;
    let mut fields = Fields::new(message, BATCHED);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => data = field.bytes()?,
            2 => offsets = field.message(i64s)?,
            3 => wire_type = field.varint()?,
            4 => field.dims(&mut trailing)?,
            _ => {}
        }
    }
    let wire_type = WireType::from_number(wire_type).map_err(|error| error.within(BATCHED[2]))?;
    let starts = element_starts(&offsets, data.len(), wire_type.size())
        .map_err(|detail| DecodeError::new(DecodeErrorKind::Offsets, detail).within(BATCHED[1]))?;
    if trailing.element_count().is_none() {
        let detail = format!("{trailing:?} has too many elements");
        return Err(DecodeError::new(DecodeErrorKind::Shape, detail).within(BATCHED[3]));
    }
    let values = wire_type.decode(data).map_err(|error| error.within(BATCHED[0]))?;
    let column = OutputColumn { name: name.to_owned(), values, starts, trailing };
    column.check_rows().map_err(|datum| {
        let detail = format!(
            "datum {datum} does not consist of complete rows of shape {:?}",
            column.trailing
        );
        DecodeError::new(DecodeErrorKind::Shape, detail).within(BATCHED[3])
    })?;
    Ok(column)
}

/// Converts byte offsets to element indices. The offsets must start at 0, not decrease, not exceed
/// the data, and be multiples of the element size.
fn element_starts(offsets: &[i64], len: usize, element: usize) -> Result<Vec<usize>, &'static str> {
    // A column without offsets has no datums.
    let Some(first) = offsets.first() else {
        return Ok(vec![0]);
    };
    if *first != 0 {
        return Err("must start with 0");
    }
    let mut starts = Vec::with_capacity(offsets.len());
    let mut previous = 0;
    for offset in offsets {
        let offset = usize::try_from(*offset).map_err(|_| "must not be negative")?;
        if offset < previous {
            return Err("must not decrease");
        }
        if offset > len {
            return Err("must not exceed the data");
        }
        if !offset.is_multiple_of(element) {
            return Err("must be multiples of the element size");
        }
        previous = offset;
        starts.push(offset / element);
    }
    Ok(starts)
}
