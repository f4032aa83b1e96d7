//! Reads safetensors files, from memory or from a memory map.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::Mmap;

use super::DType;
use super::header::{Header, MAX_HEADER_BYTES, TensorEntry};
use crate::kernel::mmap::map_read_only;
use crate::{Error, Result};

/// A safetensors file.
///
/// The header is validated once, on construction: every tensor lies inside the file and has the
/// length that its shape requires.
///
/// ```
/// use tinkex_engine::file::{NamedTensor, TensorFile, TensorSlice, write_tensors};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("x.safetensors");
/// let values = TensorSlice::F32(&[1.0, -2.0]);
/// write_tensors(&path, &[NamedTensor { name: "x", shape: &[2, 1], values }], &[])?;
/// let file = TensorFile::read(&path)?;
/// assert_eq!(file.tensor("x")?.to_f32()?[..], [1.0, -2.0]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    bytes: FileBytes,
    header: Header,
    data_start: usize,
}

impl TensorFile {
    /// Reads the file `path` into memory and validates its header.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::BadFile`] if it is not a complete
    /// safetensors file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut file = open_regular(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(Error::io("read", path))?;
        Self::new(path, FileBytes::Read(bytes))
    }

    /// Maps the file `path` into memory and validates its header. Pages are read when they are
    /// used.
    ///
    /// Not public, because the file must not be truncated or modified while the value exists; see
    /// [`map_read_only`]. Callers in this crate copy the tensors out and drop the map before they
    /// return.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn map(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = open_regular(path)?;
        let map = map_read_only(&file).map_err(Error::io("map", path))?;
        Self::new(path, FileBytes::Mapped(map))
    }

    /// Validates the header of a file that is embedded in the program. `path` is used only in
    /// errors.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is not a complete safetensors file.
    pub fn from_static(bytes: &'static [u8], path: impl AsRef<Path>) -> Result<Self> {
        Self::new(path.as_ref(), FileBytes::Static(bytes))
    }

    fn new(path: &Path, bytes: FileBytes) -> Result<Self> {
        let (header, data_start) =
            read_header(bytes.get()).map_err(|reason| Error::bad_file(path, reason))?;
        Ok(Self { path: path.to_owned(), bytes, header, data_start })
    }

    /// Returns the path that errors name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of the tensors, in sorted order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// Returns the metadata of the header, a map of strings.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Returns the tensor `name`, or `None` if the file does not contain it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, entry) = self.header.tensors.get_key_value(name)?;
        Some(self.view(name, entry))
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if the file does not contain it.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        self.get(name)
            .ok_or_else(|| Error::MissingTensor { path: self.path.clone(), name: name.to_owned() })
    }

    /// Returns all tensors, in the order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        self.header.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a TensorEntry) -> StoredTensor<'a> {
        let data = &self.bytes.get()[self.data_start..];
        let bytes = &data[entry.start..entry.end];
        StoredTensor { path: &self.path, name, dtype: entry.dtype, shape: &entry.shape, bytes }
    }
}

/// Opens a regular file that is long enough to hold a header length.
fn open_regular(path: &Path) -> Result<File> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let metadata = file.metadata().map_err(Error::io("read", path))?;
    if !metadata.is_file() {
        return Err(Error::bad_file(path, "not a regular file"));
    }
    // An empty file cannot be mapped.
    if metadata.len() < 8 {
        return Err(Error::bad_file(
            path,
            format!("the file is truncated: {} bytes", metadata.len()),
        ));
    }
    Ok(file)
}

/// Contents of a file.
#[derive(Debug)]
enum FileBytes {
    Mapped(Mmap),
    Read(Vec<u8>),
    Static(&'static [u8]),
}

impl FileBytes {
    fn get(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Read(bytes) => bytes,
            Self::Static(bytes) => bytes,
        }
    }
}

/// Parses the header. Returns it with the offset of the data.
fn read_header(bytes: &[u8]) -> Result<(Header, usize), String> {
    let (length, rest) =
        bytes.split_first_chunk::<8>().ok_or("the file is truncated before its header")?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!("not a safetensors file: the header would have {length} bytes"));
    }
    let text = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let text = text.ok_or_else(|| {
        format!("the file is truncated: {} bytes with a header of {length} bytes", bytes.len())
    })?;
    // Parse a copy: the bytes of a mapped file could change between the validation of the text and
    // its use.
    let text = text.to_vec();
    let header = Header::parse(&text, rest.len() - text.len())?;
    Ok((header, 8 + text.len()))
}

/// A tensor of a [`TensorFile`], borrowed from it.
#[derive(Clone, Copy, Debug)]
pub struct StoredTensor<'a> {
    path: &'a Path,
    name: &'a str,
    dtype: DType,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl<'a> StoredTensor<'a> {
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
        self.bytes.len() / self.dtype.size()
    }

    /// Returns the stored little-endian bytes.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the tensor if it has this shape.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it has another shape.
    pub fn with_shape(self, shape: &[usize]) -> Result<Self> {
        if self.shape == shape {
            return Ok(self);
        }
        let (name, got) = (self.name, self.shape);
        let reason = format!("tensor {name} has shape {got:?}, expected {shape:?}");
        Err(Error::bad_file(self.path, reason))
    }

    /// Returns the tensor if [`to_f32`](Self::to_f32) can convert its elements.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the element type is not f32, f16 or bf16.
    pub fn as_float(self) -> Result<Self> {
        if matches!(self.dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return Ok(self);
        }
        let (name, dtype) = (self.name, self.dtype.name());
        let reason = format!("tensor {name} is stored as {dtype}, expected F32, F16 or BF16");
        Err(Error::bad_file(self.path, reason))
    }

    /// Borrows the elements if they are f32 and aligned, and the machine is little-endian.
    #[must_use]
    pub fn as_f32(&self) -> Option<&'a [f32]> {
        self.in_place(DType::F32)
    }

    /// Borrows the elements if they are bf16 and aligned, and the machine is little-endian.
    #[must_use]
    pub fn as_bf16(&self) -> Option<&'a [bf16]> {
        self.in_place(DType::Bf16)
    }

    /// Borrows the elements as `T` if they have the type `dtype` and can be read in place.
    fn in_place<T: bytemuck::AnyBitPattern>(&self, dtype: DType) -> Option<&'a [T]> {
        let castable = self.dtype == dtype && cfg!(target_endian = "little");
        castable.then(|| bytemuck::try_cast_slice(self.bytes).ok()).flatten()
    }

    /// Returns the elements as f32, borrowed if possible and converted otherwise.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the element type is not f32, f16 or bf16.
    pub fn to_f32(&self) -> Result<Cow<'a, [f32]>> {
        if let Some(values) = self.as_f32() {
            return Ok(Cow::Borrowed(values));
        }
        let mut values = vec![0.0; self.count()];
        self.copy_to(&mut values)?;
        Ok(Cow::Owned(values))
    }

    /// Copies the elements into `out`, as f32.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the element type is not f32, f16 or bf16; [`Error::Length`] if `out`
    /// does not have [`count`](Self::count) elements.
    pub fn copy_to(&self, out: &mut [f32]) -> Result<()> {
        if out.len() != self.count() {
            let field = self.name.to_owned();
            return Err(Error::Length { field, expected: out.len(), got: self.count() });
        }
        self.as_float()?;
        self.copy_range(0..out.len(), out);
        Ok(())
    }

    /// Copies a range of the elements, whose type must be f32, f16 or bf16, into `out`.
    pub(crate) fn copy_range(&self, range: Range<usize>, out: &mut [f32]) {
        let bytes = |size: usize| &self.bytes[range.start * size..range.end * size];
        match self.dtype {
            DType::F32 => widen(bytes(4), out, f32::from_le_bytes),
            DType::F16 => widen(bytes(2), out, |b| f16::from_le_bytes(b).to_f32()),
            DType::Bf16 => {
                widen(bytes(2), out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16));
            }
            // Excluded by `as_float`.
            _ => out.fill(f32::NAN),
        }
    }
}

/// Converts each `N`-byte element of `bytes` to f32.
fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = convert(bytes);
    }
}
