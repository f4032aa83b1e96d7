//! Builder-style setters for structs that other crates cannot write as literals.

/// Defines one setter per listed field. A setter takes the field's type, or the given type and
/// conversion: `name: impl Into<String> => Some(name.into());`.
macro_rules! setters {
    ($type:ty { $($field:ident: $argument:ty $(=> $value:expr)?;)* }) => {
        impl $type {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](#structfield.", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, $field: $argument) -> Self {
                    self.$field = $crate::setters::value!($field $(=> $value)?);
                    self
                }
            )*
        }
    };
}

macro_rules! value {
    ($field:ident) => {
        $field
    };
    ($field:ident => $value:expr) => {
        $value
    };
}

pub(crate) use {setters, value};
