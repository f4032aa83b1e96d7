//! Conversions of Rust numbers to tensor elements.

use crate::slice::SharedSlice;
use crate::tokens::Tokens;

use super::{Shape, TensorData, TensorValues};

/// A number type that converts to a tensor element.
///
/// `i64` and integers of up to 32 bits convert to `int64`, `f32` and `f64` to `float32`. Convert
/// wider unsigned integers with `i64::try_from` first.
pub trait TensorElement: Copy + sealed::Sealed {
    /// Converts a vector. Does not copy `f32` and `i64`.
    fn values(numbers: Vec<Self>) -> TensorValues;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! element {
    ($($type:ty => $wire:ident, $convert:expr;)*) => {$(
        impl sealed::Sealed for $type {}

        impl TensorElement for $type {
            fn values(numbers: Vec<Self>) -> TensorValues {
                TensorValues::$wire($convert(numbers))
            }
        }
    )*};
}

fn widened<T: Copy + Into<i64>>(numbers: Vec<T>) -> SharedSlice<i64> {
    numbers.into_iter().map(Into::into).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "the protocol narrows to float32")]
fn narrowed(numbers: Vec<f64>) -> SharedSlice<f32> {
    numbers.into_iter().map(|x| x as f32).collect()
}

element! {
    f32 => Float32, SharedSlice::from;
    f64 => Float32, narrowed;
    i64 => Int64, SharedSlice::from;
    i8 => Int64, widened;
    i16 => Int64, widened;
    i32 => Int64, widened;
    u8 => Int64, widened;
    u16 => Int64, widened;
    u32 => Int64, widened;
}

impl<T: TensorElement> From<Vec<T>> for TensorData {
    fn from(numbers: Vec<T>) -> Self {
        let values = T::values(numbers);
        Self { shape: Shape::from([values.len()]), values, sparse: None }
    }
}

impl<T: TensorElement> From<&[T]> for TensorData {
    fn from(numbers: &[T]) -> Self {
        numbers.to_vec().into()
    }
}

impl<T: TensorElement> From<&Vec<T>> for TensorData {
    fn from(numbers: &Vec<T>) -> Self {
        numbers.clone().into()
    }
}

impl<T: TensorElement, const N: usize> From<&[T; N]> for TensorData {
    fn from(numbers: &[T; N]) -> Self {
        numbers.to_vec().into()
    }
}

impl<T: TensorElement, const N: usize> From<[T; N]> for TensorData {
    fn from(numbers: [T; N]) -> Self {
        Vec::from(numbers).into()
    }
}

impl<T: TensorElement> FromIterator<T> for TensorData {
    fn from_iter<I: IntoIterator<Item = T>>(numbers: I) -> Self {
        Vec::from_iter(numbers).into()
    }
}

impl From<SharedSlice<f32>> for TensorData {
    fn from(numbers: SharedSlice<f32>) -> Self {
        Self {
            shape: Shape::from([numbers.len()]),
            values: TensorValues::Float32(numbers),
            sparse: None,
        }
    }
}

impl From<SharedSlice<i64>> for TensorData {
    fn from(numbers: SharedSlice<i64>) -> Self {
        Self {
            shape: Shape::from([numbers.len()]),
            values: TensorValues::Int64(numbers),
            sparse: None,
        }
    }
}

impl<T: TensorElement> From<Vec<T>> for TensorValues {
    fn from(numbers: Vec<T>) -> Self {
        T::values(numbers)
    }
}

impl From<Tokens> for TensorData {
    /// Converts token ids to `int64`.
    fn from(tokens: Tokens) -> Self {
        Self::from(&tokens)
    }
}

impl From<&Tokens> for TensorData {
    /// Converts token ids to `int64`.
    fn from(tokens: &Tokens) -> Self {
        tokens.iter().copied().collect()
    }
}
