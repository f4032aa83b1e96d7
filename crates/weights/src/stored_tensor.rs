//! [`StoredTensor`]: a tensor of a file, read when its elements are used.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use half::f16;

use crate::{BlockFormat, DType, Error, Result};

/// A tensor of a file, borrowed from the open file.
#[derive(Clone, Copy, Debug)]
pub struct StoredTensor<'a> {
    path: &'a Path,
    name: &'a str,
    dtype: DType,
    shape: &'a [usize],
    data: StoredBytes<'a>,
    order: RowOrder,
}

/// Order in which a file stores the rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The order of Hugging Face files.
    Plain,
    /// Each head of `head_dim` rows alternates between the rows of its first and of its second
    /// half. GGUF files of the llama architecture store query and key projections in this order.
    Interleaved { head_dim: usize },
}

impl RowOrder {
    /// Returns the index in the file of the tensor's row `row`.
    fn stored_row(self, row: usize) -> usize {
        match self {
            Self::Plain => row,
            Self::Interleaved { head_dim } => {
                let head = row / head_dim;
                let at = row % head_dim;
                let half = head_dim / 2;
                head * head_dim + 2 * (at % half) + at / half
            }
        }
    }
}

/// Location of a tensor's bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StoredBytes<'a> {
    Memory(&'a [u8]),
    /// `len` bytes from `offset` of an open file.
    File {
        file: &'a File,
        offset: u64,
        len: usize,
    },
}

impl StoredBytes<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::File { len, .. } => *len,
        }
    }
}

impl<'a> StoredTensor<'a> {
    pub(crate) fn new(
        path: &'a Path,
        name: &'a str,
        dtype: DType,
        shape: &'a [usize],
        data: StoredBytes<'a>,
    ) -> Self {
        Self { path, name, dtype, shape, data, order: RowOrder::Plain }
    }

    /// Sets the order of the rows in the file.
    pub(crate) fn with_row_order(self, order: RowOrder) -> Self {
        Self { order, ..self }
    }

    /// Returns the tensor's name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.data.len() / self.dtype.block_bytes() * self.dtype.block_len()
    }

    /// Returns the little-endian bytes in the order of the file.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut out = vec![0; self.data.len()];
        self.read_bytes(0, &mut out)?;
        Ok(out)
    }

    /// Reads stored bytes into `out`, from byte `start` of the tensor.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, or if the tensor ends before `out` is filled.
    pub fn read_bytes(&self, start: usize, out: &mut [u8]) -> Result<()> {
        let fits = start.checked_add(out.len()).is_some_and(|end| end <= self.data.len());
        let read = match self.data {
            _ if !fits => Err(io::ErrorKind::UnexpectedEof.into()),
            StoredBytes::Memory(bytes) => {
                out.copy_from_slice(&bytes[start..start + out.len()]);
                Ok(())
            }
            StoredBytes::File { file, offset, .. } => {
                read_exact_at(file, offset + start as u64, out)
            }
        };
        read.map_err(Error::io("read", self.path))
    }

    /// Reads whole rows into `out`, from row `first` on, as stored bytes.
    ///
    /// # Errors
    /// [`Error::BadFile`] if a row in bf16 or in a block format is not finite; [`Error::Io`] if the
    /// file cannot be read, or if the tensor ends before `out` is filled.
    ///
    /// # Panics
    /// If `out` does not have the size of whole rows.
    pub fn read_rows(&self, first: usize, out: &mut [u8]) -> Result<()> {
        let row_bytes = self.dtype.byte_len(self.row_len()).unwrap_or(0);
        assert!(
            row_bytes > 0 && out.len().is_multiple_of(row_bytes),
            "the buffer has {} bytes, expected whole rows of {row_bytes} bytes",
            out.len()
        );
        match self.order {
            RowOrder::Plain => self.read_bytes(first * row_bytes, out)?,
            order @ RowOrder::Interleaved { .. } => {
                for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
                    self.read_bytes(order.stored_row(row) * row_bytes, out)?;
                }
            }
        }
        match self.dtype {
            DType::Block(format) if !format.is_finite(out) => {
                let name = self.name;
                let reason = format!(
                    "tensor {name} has a scale that is NaN or infinite in row {first} or a later \
                     one, expected finite weights"
                );
                Err(Error::bad_file(self.path, reason))
            }
            DType::Bf16 if !is_finite_bf16(out) => {
                let mut values = vec![0.0; out.len() / size_of::<u16>()];
                self.decode(out, &mut values);
                self.check_finite(first * self.row_len(), &values)
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of bytes of the tensor, from its first one on, that contain the first
    /// `rows` rows.
    #[must_use]
    pub fn end_of_rows(&self, rows: usize) -> usize {
        let rows = match self.order {
            RowOrder::Plain => rows,
            RowOrder::Interleaved { head_dim } => rows.next_multiple_of(head_dim),
        };
        let row_bytes = self.dtype.byte_len(self.row_len()).unwrap_or(0);
        rows.saturating_mul(row_bytes).min(self.data.len())
    }

    /// Returns where the tensor is: its file, and the offset of its first byte. The offset is 0 for a
    /// tensor in memory.
    #[must_use]
    pub fn position(&self) -> (&'a Path, u64) {
        match self.data {
            StoredBytes::Memory(_) => (self.path, 0),
            StoredBytes::File { offset, .. } => (self.path, offset),
        }
    }

    /// Returns whether byte `start` can be read without waiting for the disk. Returns `false` if the
    /// system cannot tell.
    #[must_use]
    pub fn is_cached(&self, start: usize) -> bool {
        match self.data {
            StoredBytes::Memory(_) => true,
            #[cfg(target_os = "linux")]
            StoredBytes::File { file, offset, .. } => {
                use rustix::io::{ReadWriteFlags, preadv2};

                let mut byte = [0];
                let mut buffers = [io::IoSliceMut::new(&mut byte)];
                let flags = ReadWriteFlags::NOWAIT;
                preadv2(file, &mut buffers, offset + start as u64, flags).is_ok_and(|read| read > 0)
            }
            #[cfg(not(target_os = "linux"))]
            StoredBytes::File { .. } => false,
        }
    }

    /// Returns the size in bytes that the tensor has in its file.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.data.len()
    }

    /// Reads whole rows into `out`, from row `first` on, and encodes them in `format` with `encode`,
    /// which must have the results of [`BlockFormat::encode`].
    ///
    /// # Errors
    /// [`Error::BadFile`] if a row is not finite, or if its elements are too large for the scales of
    /// the format; otherwise as [`read_f32`](Self::read_f32).
    ///
    /// # Panics
    /// If rows do not consist of whole blocks of the format, or `out` does not have the size of
    /// whole rows.
    pub fn read_rows_as(
        &self,
        format: BlockFormat,
        first: usize,
        out: &mut [u8],
        encode: impl FnOnce(BlockFormat, &[f32], &mut [u8]),
    ) -> Result<()> {
        let len = self.row_len();
        let row_bytes = format.byte_len(len).unwrap_or(0);
        assert!(
            row_bytes > 0 && out.len().is_multiple_of(row_bytes),
            "the buffer has {} bytes, expected whole rows of {row_bytes} bytes",
            out.len()
        );
        let mut values = vec![0.0; out.len() / row_bytes * len];
        let start = first * len;
        self.read_f32(start..start + values.len(), &mut values)?;
        self.check_finite(start, &values)?;
        encode(format, &values, out);
        if format.is_finite(out) {
            return Ok(());
        }
        let name = self.name;
        let format = format.name();
        let reason = format!(
            "tensor {name} has elements that are too large for {format} in row {first} or a later \
             one"
        );
        Err(Error::bad_file(self.path, reason))
    }

    /// Returns the number of elements of a row: the product of all dimensions but the first.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Returns the tensor if it has this shape.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it has another shape.
    pub fn with_shape(self, shape: &[usize]) -> Result<Self> {
        if self.shape == shape {
            return Ok(self);
        }
        let name = self.name;
        let got = self.shape;
        let reason = format!("tensor {name} has shape {got:?}, expected {shape:?}");
        Err(Error::bad_file(self.path, reason))
    }

    /// Returns the tensor if [`to_f32`](Self::to_f32) can convert its elements.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the element type is not f32, f16, bf16 or a block format.
    pub fn as_float(self) -> Result<Self> {
        if self.dtype.is_float() {
            return Ok(self);
        }
        let name = self.name;
        let dtype = self.dtype.name();
        let reason = format!("tensor {name} is stored as {dtype}, expected floats");
        Err(Error::bad_file(self.path, reason))
    }

    /// Returns whether the two tensors have the same elements after conversion to f32. NaN differs
    /// from every number, including NaN.
    ///
    /// # Errors
    /// As [`read_f32`](Self::read_f32).
    pub fn has_values_of(&self, other: &StoredTensor<'_>) -> Result<bool> {
        /// Number of elements that are compared at a time.
        const COUNT: usize = 1 << 18;
        let count = self.count();
        if count != other.count() {
            return Ok(false);
        }
        let mut own = vec![0.0; COUNT.min(count)];
        let mut others = vec![0.0; COUNT.min(count)];
        for start in (0..count).step_by(COUNT) {
            let range = start..count.min(start + COUNT);
            let own = &mut own[..range.len()];
            let others = &mut others[..range.len()];
            self.read_f32(range.clone(), own)?;
            other.read_f32(range, others)?;
            if own != others {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks that `values`, the elements of this tensor from index `start` on, are finite.
    ///
    /// # Errors
    /// [`Error::BadFile`] that names the tensor and the index if an element is NaN or infinite.
    pub fn check_finite(&self, start: usize, values: &[f32]) -> Result<()> {
        // Positive floats have the order of their bits, and NaN has larger bits than infinity. The
        // loop has no branch per element, so that the compiler vectorizes it.
        let largest = values.iter().fold(0, |max, value| value.abs().to_bits().max(max));
        if largest < f32::INFINITY.to_bits() {
            return Ok(());
        }
        let at = values.iter().position(|value| !value.is_finite()).unwrap_or(0);
        let name = self.name;
        let value = values[at];
        let at = start + at;
        let reason = format!("tensor {name} is {value} at index {at}, expected finite weights");
        Err(Error::bad_file(self.path, reason))
    }

    /// Checks that all elements are finite. Reads a part of the tensor at a time.
    ///
    /// # Errors
    /// As [`check_finite`](Self::check_finite) and [`read_f32`](Self::read_f32).
    pub fn check_all_finite(&self) -> Result<()> {
        /// Number of elements that are checked at a time; whole blocks of every format.
        const COUNT: usize = 1 << 18;
        let count = self.count();
        let mut values = vec![0.0; COUNT.min(count)];
        for start in (0..count).step_by(COUNT) {
            let range = start..count.min(start + COUNT);
            let values = &mut values[..range.len()];
            self.read_f32(range, values)?;
            self.check_finite(start, values)?;
        }
        Ok(())
    }

    /// Returns all elements as f32.
    ///
    /// # Errors
    /// As [`read_f32`](Self::read_f32).
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.count()];
        self.read_f32(0..values.len(), &mut values)?;
        Ok(values)
    }

    /// Reads a range of the elements into `out`, as f32.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the element type is not f32, f16, bf16 or a block format;
    /// [`Error::Io`] if the file cannot be read or the range is outside the tensor.
    ///
    /// # Panics
    /// If `out` does not have the length of the range, or the range of a tensor in a block format
    /// does not consist of whole blocks, as rows do.
    pub fn read_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        assert_eq!(range.len(), out.len(), "length of the buffer for the range {range:?}");
        self.as_float()?;
        let RowOrder::Interleaved { .. } = self.order else {
            return self.read_stored(range, out);
        };
        let len = self.row_len();
        let mut at = range.start;
        let mut out = out;
        while !out.is_empty() {
            let row = self.order.stored_row(at / len);
            let col = at % len;
            let (own, rest) = out.split_at_mut(out.len().min(len - col));
            self.read_stored(row * len + col..row * len + col + own.len(), own)?;
            at += own.len();
            out = rest;
        }
        Ok(())
    }

    /// Reads a range of the elements as f32, in the order of the file.
    fn read_stored(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        /// Maximum number of bytes that are read at a time.
        const BUFFER: usize = 1 << 16;
        let block_len = self.dtype.block_len();
        let block_bytes = self.dtype.block_bytes();
        let whole = range.start.is_multiple_of(block_len) && range.end.is_multiple_of(block_len);
        assert!(whole, "range {range:?}, expected whole blocks of {block_len} elements");
        let start = range.start / block_len * block_bytes;
        let end = range.end / block_len * block_bytes;
        if let StoredBytes::Memory(bytes) = self.data
            && let Some(bytes) = bytes.get(start..end)
        {
            self.decode(bytes, out);
            return Ok(());
        }
        let mut buffer = vec![0; (BUFFER / block_bytes * block_bytes).min(end - start)];
        let mut start = start;
        for out in out.chunks_mut(BUFFER / block_bytes * block_len) {
            let bytes = &mut buffer[..out.len() / block_len * block_bytes];
            self.read_bytes(start, bytes)?;
            self.decode(bytes, out);
            start += bytes.len();
        }
        Ok(())
    }

    /// Converts stored elements, whose type must be f32, f16, bf16 or a block format.
    fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        match self.dtype {
            DType::F32 => widen(bytes, out, f32::from_le_bytes),
            DType::F16 => widen(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            DType::Bf16 => {
                widen(bytes, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16));
            }
            DType::Block(format) => format.decode(bytes, out),
            // `read_f32` rejects all other types.
            _ => out.fill(f32::NAN),
        }
    }
}

/// Returns whether all little-endian bf16 numbers are finite.
fn is_finite_bf16(bytes: &[u8]) -> bool {
    // A number that is not finite has all bits of its exponent set, and the largest bits. The loop
    // has no branch per element, so that the compiler vectorizes it.
    let bits = bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes) & 0x7fff);
    bits.fold(0, u16::max) < 0x7f80
}

/// Converts each `N`-byte element of `bytes` to f32.
fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = convert(bytes);
    }
}

/// Fills `out` from `offset` of the file. Several threads may read one file at the same time.
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

/// Fills `out` from `offset` of the file. Several threads may read one file at the same time.
#[cfg(windows)]
pub(crate) fn read_exact_at(file: &File, mut offset: u64, mut out: &mut [u8]) -> io::Result<()> {
    while !out.is_empty() {
        let read = std::os::windows::fs::FileExt::seek_read(file, out, offset)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out = &mut out[read..];
        offset += read as u64;
    }
    Ok(())
}
