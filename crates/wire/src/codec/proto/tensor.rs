//! The messages `Tensor` and `SparseCsr`.

use crate::tensor::{Csr, CsrError, DType, Shape, TensorData, TensorValues};
use crate::{DecodeError, DecodeErrorKind};

use super::read::{Fields, Names, bf16s_as_f32s, f32s, i32s_as_i64s, i64s};
use super::write::{
    bytes_size, dims_size, nonempty_array_size, nonempty_size, number_size, put_array, put_dims,
    put_header, put_nonempty_array, put_number,
};

const TENSOR: Names = &["dense", "sparse_csr", "dtype", "shape"];
const SPARSE_CSR: Names = &["values", "crow_indices", "col_indices"];

/// Element types of the protobuf messages. `Int32` and `Bfloat16` are decoded but never encoded.
#[derive(Clone, Copy)]
pub(super) enum WireType {
    Float32 = 1,
    Int64 = 2,
    Int32 = 3,
    Bfloat16 = 4,
}

impl WireType {
    pub(super) fn from_number(number: u64) -> Result<Self, DecodeError> {
        Ok(match number {
            1 => Self::Float32,
            2 => Self::Int64,
            3 => Self::Int32,
            4 => Self::Bfloat16,
            0 => {
                return Err(DecodeError::new(DecodeErrorKind::DType, "missing element type"));
            }
            _ => {
                let detail = format!("unknown element type {number}");
                return Err(DecodeError::new(DecodeErrorKind::DType, detail));
            }
        })
    }

    pub(super) const fn size(self) -> usize {
        match self {
            Self::Int64 => 8,
            Self::Float32 | Self::Int32 => 4,
            Self::Bfloat16 => 2,
        }
    }

    /// Decodes raw elements.
    pub(super) fn decode(self, bytes: &[u8]) -> Result<TensorValues, DecodeError> {
        Ok(match self {
            Self::Float32 => TensorValues::Float32(f32s(bytes)?),
            Self::Int64 => TensorValues::Int64(i64s(bytes)?),
            Self::Int32 => TensorValues::Int64(i32s_as_i64s(bytes)?),
            Self::Bfloat16 => TensorValues::Float32(bf16s_as_f32s(bytes)?),
        })
    }
}

/// Returns the protobuf number of an element type.
pub(super) fn wire_number(dtype: DType) -> u64 {
    match dtype {
        DType::Float32 => WireType::Float32 as u64,
        DType::Int64 => WireType::Int64 as u64,
    }
}

enum TensorEncoding<'a> {
    Dense(&'a [u8]),
    Sparse(&'a [u8]),
}

pub(super) fn decode(message: &[u8]) -> Result<TensorData, DecodeError> {
    let mut encoding = None;
    let mut wire_type = 0;
    let mut shape = Shape::UNSPECIFIED;
    let mut fields = Fields::new(message, TENSOR);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => encoding = Some(TensorEncoding::Dense(field.bytes()?)),
            2 => encoding = Some(TensorEncoding::Sparse(field.bytes()?)),
            3 => wire_type = field.varint()?,
            4 => field.dims(&mut shape)?,
            _ => {}
        }
    }
    let wire_type = WireType::from_number(wire_type).map_err(|error| error.within("dtype"))?;
    match encoding {
        Some(TensorEncoding::Dense(bytes)) => dense(wire_type, bytes, shape),
        Some(TensorEncoding::Sparse(message)) => {
            let (values, csr) =
                sparse(wire_type, message).map_err(|error| error.within("sparse_csr"))?;
            TensorData::from_csr(values, csr, shape).map_err(sparse_error)
        }
        None => Err(DecodeError::new(DecodeErrorKind::Missing, "missing values").within("dense")),
    }
}

fn dense(wire_type: WireType, bytes: &[u8], shape: Shape) -> Result<TensorData, DecodeError> {
    // Check the length before allocating.
    if let Some(elements) = shape.element_count()
        && shape != Shape::UNSPECIFIED
        && elements.checked_mul(wire_type.size()) != Some(bytes.len())
    {
        let detail = format!("{} bytes do not match the shape {shape:?}", bytes.len());
        return Err(DecodeError::new(DecodeErrorKind::Length, detail).within("dense"));
    }
    let values = wire_type.decode(bytes).map_err(|error| error.within("dense"))?;
    TensorData::new(values, shape)
        .map_err(|error| DecodeError::new(DecodeErrorKind::Shape, error.reason()).within("shape"))
}

fn sparse(wire_type: WireType, message: &[u8]) -> Result<(TensorValues, Csr), DecodeError> {
    let mut values = &[][..];
    let mut row_starts = &[][..];
    let mut columns = &[][..];
    let mut fields = Fields::new(message, SPARSE_CSR);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => values = field.bytes()?,
            2 => row_starts = field.bytes()?,
            3 => columns = field.bytes()?,
            _ => {}
        }
    }
    let values = wire_type.decode(values).map_err(|error| error.within("values"))?;
    let row_starts = i64s(row_starts).map_err(|error| error.within("crow_indices"))?;
    let columns = i64s(columns).map_err(|error| error.within("col_indices"))?;
    Ok((values, Csr { row_starts, columns }))
}

fn sparse_error(error: CsrError) -> DecodeError {
    let (kind, path) = match error {
        CsrError::Shape(_) => (DecodeErrorKind::Shape, "shape"),
        CsrError::RowStarts(_) => (DecodeErrorKind::Offsets, "sparse_csr.crow_indices"),
        CsrError::Columns(_) => (DecodeErrorKind::Index, "sparse_csr.col_indices"),
    };
    DecodeError::new(kind, error.reason()).within(path)
}

pub(super) fn size(tensor: &TensorData) -> usize {
    let payload = match tensor.csr() {
        None => values_len(tensor.values()),
        Some(csr) => sparse_size(tensor.values(), csr),
    };
    bytes_size(payload)
        + number_size(wire_number(tensor.dtype()))
        + dims_size(tensor.shape().dims())
}

pub(super) fn write(out: &mut Vec<u8>, tensor: &TensorData) {
    match tensor.csr() {
        None => put_values(out, 1, tensor.values()),
        Some(csr) => {
            put_header(out, 2, sparse_size(tensor.values(), csr));
            if !tensor.values().is_empty() {
                put_values(out, 1, tensor.values());
            }
            put_nonempty_array::<i64>(out, 2, &csr.row_starts);
            put_nonempty_array::<i64>(out, 3, &csr.columns);
        }
    }
    put_number(out, 3, wire_number(tensor.dtype()));
    put_dims(out, 4, tensor.shape().dims());
}

pub(super) fn values_len(values: &TensorValues) -> usize {
    values.len() * values.dtype().size()
}

pub(super) fn put_values(out: &mut Vec<u8>, field: u8, values: &TensorValues) {
    match values {
        TensorValues::Int64(numbers) => put_array(out, field, numbers),
        TensorValues::Float32(numbers) => put_array(out, field, numbers),
    }
}

fn sparse_size(values: &TensorValues, csr: &Csr) -> usize {
    nonempty_size(values_len(values))
        + nonempty_array_size::<i64>(&csr.row_starts)
        + nonempty_array_size::<i64>(&csr.columns)
}
