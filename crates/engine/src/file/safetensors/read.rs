//! Reading, by a map into memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::Mmap;

use super::DType;
use super::header::{Header, MOST_HEADER_BYTES, TensorEntry};
use crate::{Error, Result};

/// A safetensors file, mapped into memory; its pages are read when they are used.
///
/// The header is checked once, here: whatever [`tensor`](Self::tensor) returns lies inside the
/// file and has the length that its shape says. The file must not be cut off or rewritten while it
/// is open; replace it by renaming another over it, as [`write_tensors`](crate::file::write_tensors) does.
///
/// ```
/// use tinkex_engine::file::{TensorFile, NamedTensor, TensorSlice, write_tensors};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("x.safetensors");
/// let out = [NamedTensor { name: "x", shape: &[2, 1], values: TensorSlice::F32(&[1.0, -2.0]) }];
/// write_tensors(&path, &out, &[])?;
/// let file = TensorFile::open(&path)?;
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
    /// Opens `path` and checks its header.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, [`Error::BadFile`] if it is not a whole safetensors
    /// file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io("open", path))?;
        let about = file.metadata().map_err(Error::io("read", path))?;
        if !about.is_file() {
            return Err(Error::bad_file(path, "is not a file"));
        }
        if about.len() < 8 {
            return Err(Error::bad_file(path, format!("is cut off: {} bytes", about.len())));
        }
        let map = map(&file).map_err(Error::io("map", path))?;
        Self::new(path, FileBytes::Mapped(map))
    }

    /// Reads a file that is part of the program; `path` is what errors call it.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is not a whole safetensors file.
    pub fn from_static(bytes: &'static [u8], path: impl AsRef<Path>) -> Result<Self> {
        Self::new(path.as_ref(), FileBytes::Static(bytes))
    }

    fn new(path: &Path, bytes: FileBytes) -> Result<Self> {
        let (header, data_start) =
            read_header(bytes.get()).map_err(|why| Error::bad_file(path, why))?;
        Ok(Self { path: path.to_owned(), bytes, header, data_start })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of its tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// Texts that its writer left.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// The tensor `name`, if it is there.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, entry) = self.header.tensors.get_key_value(name)?;
        Some(self.view(name, entry))
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        self.get(name)
            .ok_or_else(|| Error::MissingTensor { path: self.path.clone(), name: name.to_owned() })
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.header.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a TensorEntry) -> TensorView<'a> {
        let data = &self.bytes.get()[self.data_start..];
        let bytes = &data[entry.start..entry.end];
        TensorView { path: &self.path, name, dtype: entry.dtype, shape: &entry.shape, bytes }
    }
}

/// Where a file's bytes are.
#[derive(Debug)]
enum FileBytes {
    Mapped(Mmap),
    Static(&'static [u8]),
}

impl FileBytes {
    fn get(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
        }
    }
}

fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is only ever read, and through bounds taken from the length it has here.
    // What remains is another process changing the file under us, which the type's documentation
    // rules out: our writers never touch a file in place (ADR 15).
    #[expect(unsafe_code, reason = "mapping is the point: weights are read once, when used")]
    unsafe {
        Mmap::map(file)
    }
}

fn read_header(bytes: &[u8]) -> Result<(Header, usize), String> {
    let (length, rest) = bytes.split_first_chunk::<8>().ok_or("is cut off before its header")?;
    let length = u64::from_le_bytes(*length);
    if length > MOST_HEADER_BYTES {
        return Err(format!("is not a safetensors file: a header of {length} bytes"));
    }
    let text = usize::try_from(length)
        .ok()
        .and_then(|length| rest.get(..length))
        .ok_or_else(|| format!("is cut off: {} bytes, with a header of {length}", bytes.len()))?;
    let header = Header::parse(text, rest.len() - text.len())?;
    Ok((header, 8 + text.len()))
}

/// A tensor inside a [`TensorFile`].
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    path: &'a Path,
    name: &'a str,
    dtype: DType,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// How its numbers are stored.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its sides, outermost first.
    #[must_use]
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// How many numbers it has.
    #[must_use]
    pub fn count(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Its raw little-endian bytes.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Itself, if it has this shape.
    ///
    /// # Errors
    /// [`Error::Shape`] otherwise.
    pub fn with_shape(self, shape: &[usize]) -> Result<Self> {
        if self.shape == shape {
            return Ok(self);
        }
        Err(Error::Shape {
            what: format!("{} in {}", self.name, self.path.display()),
            expected: shape.to_vec(),
            got: self.shape.to_vec(),
        })
    }

    /// Itself, if [`to_f32`](Self::to_f32) can read its numbers.
    ///
    /// # Errors
    /// [`Error::BadFile`] if they are not f32, f16 or bf16.
    pub fn as_float(self) -> Result<Self> {
        if matches!(self.dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return Ok(self);
        }
        let (name, dtype) = (self.name, self.dtype.name());
        let why = format!("tensor {name} is stored as {dtype}; F32, F16 and BF16 can be read");
        Err(Error::bad_file(self.path, why))
    }

    /// Its numbers in place, if they are f32 and aligned for it.
    #[must_use]
    pub fn as_f32(&self) -> Option<&'a [f32]> {
        self.in_place(DType::F32)
    }

    /// Its numbers in place, if they are bf16 and aligned for it.
    #[must_use]
    pub fn as_bf16(&self) -> Option<&'a [bf16]> {
        self.in_place(DType::Bf16)
    }

    /// Its numbers in place, if they are f16 and aligned for it.
    #[must_use]
    pub fn as_f16(&self) -> Option<&'a [f16]> {
        self.in_place(DType::F16)
    }

    fn in_place<T: bytemuck::AnyBitPattern>(&self, dtype: DType) -> Option<&'a [T]> {
        // Files are little-endian.
        let ours = self.dtype == dtype && cfg!(target_endian = "little");
        ours.then(|| bytemuck::try_cast_slice(self.bytes).ok()).flatten()
    }

    /// Its numbers as f32: in place where possible, else widened into a new vector.
    ///
    /// # Errors
    /// [`Error::BadFile`] if they are not f32, f16 or bf16.
    pub fn to_f32(&self) -> Result<Cow<'a, [f32]>> {
        if let Some(values) = self.as_f32() {
            return Ok(Cow::Borrowed(values));
        }
        let mut values = vec![0.0; self.count()];
        self.copy_to(&mut values)?;
        Ok(Cow::Owned(values))
    }

    /// Copies its numbers into `out`, as f32.
    ///
    /// # Errors
    /// [`Error::BadFile`] if they are not f32, f16 or bf16; [`Error::Length`] if `out` has another
    /// length.
    pub fn copy_to(&self, out: &mut [f32]) -> Result<()> {
        if out.len() != self.count() {
            let field = self.name.to_owned();
            return Err(Error::Length { field, expected: out.len(), got: self.count() });
        }
        self.as_float()?;
        self.copy_range(0..out.len(), out);
        Ok(())
    }

    /// Copies a part of its numbers, which must be floats, into `out`.
    pub(crate) fn copy_range(&self, range: Range<usize>, out: &mut [f32]) {
        let bytes = |size: usize| &self.bytes[range.start * size..range.end * size];
        match self.dtype {
            DType::F32 => widen(bytes(4), out, f32::from_le_bytes),
            DType::F16 => widen(bytes(2), out, |b| f16::from_le_bytes(b).to_f32()),
            // The upper half of an f32.
            DType::Bf16 => {
                widen(bytes(2), out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16));
            }
            _ => out.fill(f32::NAN),
        }
    }
}

fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn([u8; N]) -> f32) {
    for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = number(bytes);
    }
}
