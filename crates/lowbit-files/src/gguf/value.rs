use super::GgufError;

/// The types of metadata values, by their numbers in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(u32)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type that the file calls `number`.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// The lower-case name, as in `u32`.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// The fewest bytes that a value takes in a file.
    pub(super) fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of metadata values, all of one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Runs `$body` with `$values` bound to the vector of an [`Array`].
macro_rules! with_array {
    ($array:expr, $values:ident => $body:expr) => {
        match $array {
            $crate::gguf::Array::U8($values) => $body,
            $crate::gguf::Array::I8($values) => $body,
            $crate::gguf::Array::U16($values) => $body,
            $crate::gguf::Array::I16($values) => $body,
            $crate::gguf::Array::U32($values) => $body,
            $crate::gguf::Array::I32($values) => $body,
            $crate::gguf::Array::F32($values) => $body,
            $crate::gguf::Array::Bool($values) => $body,
            $crate::gguf::Array::String($values) => $body,
            $crate::gguf::Array::U64($values) => $body,
            $crate::gguf::Array::I64($values) => $body,
            $crate::gguf::Array::F64($values) => $body,
        }
    };
}

pub(super) use with_array;

impl Array {
    /// The elements' type.
    pub fn element_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        with_array!(self, values => values.len())
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as another integer type, converted without a larger intermediate copy.
    fn integers<T: TryFrom<i128>>(&self) -> Option<Vec<T>> {
        fn convert<S: Copy + Into<i128>, T: TryFrom<i128>>(values: &[S]) -> Option<Vec<T>> {
            let mut converted = Vec::with_capacity(values.len());
            for &value in values {
                converted.push(value.into().try_into().ok()?);
            }
            Some(converted)
        }
        match self {
            Self::U8(values) => convert(values),
            Self::I8(values) => convert(values),
            Self::U16(values) => convert(values),
            Self::I16(values) => convert(values),
            Self::U32(values) => convert(values),
            Self::I32(values) => convert(values),
            Self::U64(values) => convert(values),
            Self::I64(values) => convert(values),
            _ => None,
        }
    }
}

impl Value {
    /// The value's type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The type and, if it is short, the value: `u32 7`, `array of 3 strings`.
    pub fn describe(&self) -> String {
        match self {
            Self::Array(array) => format!("array of {} {}", array.len(), array.element_type().name()),
            Self::String(text) if text.len() > 40 => "string".into(),
            Self::String(text) => format!("string {text:?}"),
            Self::U8(v) => format!("u8 {v}"),
            Self::I8(v) => format!("i8 {v}"),
            Self::U16(v) => format!("u16 {v}"),
            Self::I16(v) => format!("i16 {v}"),
            Self::U32(v) => format!("u32 {v}"),
            Self::I32(v) => format!("i32 {v}"),
            Self::F32(v) => format!("f32 {v}"),
            Self::Bool(v) => format!("bool {v}"),
            Self::U64(v) => format!("u64 {v}"),
            Self::I64(v) => format!("i64 {v}"),
            Self::F64(v) => format!("f64 {v}"),
        }
    }

    pub(crate) fn integer(&self) -> Option<i128> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::I8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::I16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::I32(v) => Some(v.into()),
            Self::U64(v) => Some(v.into()),
            Self::I64(v) => Some(v.into()),
            _ => None,
        }
    }
}

/// A type that [`super::Metadata::get`] can return. Integers come from any integer type whose value
/// is in range (writers disagree on widths), floats from `f32` and `f64`.
pub trait FromValue<'a>: Sized {
    /// The type's name in errors.
    const NAME: &'static str;

    /// `None` when the value is of another type or out of range.
    fn from_value(value: &'a Value) -> Option<Self>;

    /// # Errors
    /// [`GgufError::Type`].
    fn convert(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        Self::from_value(value).ok_or_else(|| GgufError::Type {
            key: key.into(),
            want: Self::NAME,
            got: value.describe(),
        })
    }
}

macro_rules! from_integer {
    ($($type:ident, $name:literal, $array:literal;)*) => {$(
        impl FromValue<'_> for $type {
            const NAME: &'static str = $name;

            fn from_value(value: &Value) -> Option<Self> {
                value.integer()?.try_into().ok()
            }
        }

        impl FromValue<'_> for Vec<$type> {
            const NAME: &'static str = $array;

            fn from_value(value: &Value) -> Option<Self> {
                let Value::Array(array) = value else { return None };
                array.integers()
            }
        }
    )*};
}
from_integer! {
    u32, "a u32", "an array of u32";
    i32, "an i32", "an array of i32";
    u64, "a u64", "an array of u64";
    usize, "an unsigned integer", "an array of unsigned integers";
}

impl FromValue<'_> for f32 {
    const NAME: &'static str = "a float";

    fn from_value(value: &Value) -> Option<Self> {
        match *value {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

impl FromValue<'_> for f64 {
    const NAME: &'static str = "a float";

    fn from_value(value: &Value) -> Option<Self> {
        match *value {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }
}

impl FromValue<'_> for bool {
    const NAME: &'static str = "a bool";

    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Bool(v) = *value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [bool] {
    const NAME: &'static str = "an array of bools";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::Bool(v)) = value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const NAME: &'static str = "a string";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::String(v) = value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [String] {
    const NAME: &'static str = "an array of strings";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::String(v)) = value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [f32] {
    const NAME: &'static str = "an array of f32";

    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::F32(v)) = value { Some(v) } else { None }
    }
}
