//! [`ModelInput`]: what a model reads, as a list of chunks.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::secret::RedactedUrl;
use crate::tokens::Tokens;

/// What a model reads.
///
/// ```
/// use tinkex_wire::ModelInput;
///
/// let prompt = ModelInput::from_tokens([1, 2, 3]);
/// assert_eq!(prompt.token_count(), Some(3));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelInput {
    /// The pieces, in order.
    pub chunks: Vec<InputChunk>,
}

/// One piece of a [`ModelInput`].
#[derive(Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputChunk {
    /// Text, already encoded.
    EncodedText {
        /// The token ids.
        tokens: Tokens,
    },
    /// A picture, sent along.
    Image {
        /// The file, as it is on disk.
        #[serde(serialize_with = "to_base64")]
        data: Bytes,
        /// Its format.
        format: ImageFormat,
        /// How many tokens it should become; the server refuses a picture that becomes another
        /// number.
        #[serde(skip_serializing_if = "Option::is_none")]
        expected_tokens: Option<u32>,
    },
    /// A picture that the server fetches. Only for sampling: training takes pictures sent along.
    ImageAssetPointer {
        /// Its format.
        format: ImageFormat,
        /// Where it is.
        location: String,
        /// How many tokens it should become.
        #[serde(skip_serializing_if = "Option::is_none")]
        expected_tokens: Option<u32>,
    },
    /// Audio, as a mel spectrogram in its own container.
    Dmel {
        /// The container.
        #[serde(serialize_with = "to_base64")]
        dmel: Bytes,
    },
}

impl fmt::Debug for InputChunk {
    /// The address of a picture is shown without its query, which may be what lets one in.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EncodedText { tokens } => {
                f.debug_struct("EncodedText").field("tokens", tokens).finish()
            }
            Self::Image { data, format, expected_tokens } => f
                .debug_struct("Image")
                .field("data", &format_args!("{} bytes", data.len()))
                .field("format", format)
                .field("expected_tokens", expected_tokens)
                .finish(),
            Self::ImageAssetPointer { format, location, expected_tokens } => f
                .debug_struct("ImageAssetPointer")
                .field("format", format)
                .field("location", &RedactedUrl::Path(location))
                .field("expected_tokens", expected_tokens)
                .finish(),
            Self::Dmel { dmel } => {
                f.debug_struct("Dmel").field("dmel", &format_args!("{} bytes", dmel.len())).finish()
            }
        }
    }
}

/// The file format of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// PNG.
    Png,
    /// JPEG.
    Jpeg,
}

impl ImageFormat {
    /// The name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Jpeg => "jpeg",
        }
    }

    /// The format with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Png, Self::Jpeg].into_iter().find(|format| format.as_str() == name)
    }
}

impl ModelInput {
    /// Text only, as one chunk.
    #[must_use]
    pub fn from_tokens(tokens: impl Into<Tokens>) -> Self {
        Self { chunks: vec![InputChunk::EncodedText { tokens: tokens.into() }] }
    }

    /// The same with more text behind it.
    #[must_use]
    pub fn tokens(mut self, tokens: impl Into<Tokens>) -> Self {
        self.chunks.push(InputChunk::EncodedText { tokens: tokens.into() });
        self
    }

    /// The same with a picture behind it.
    #[must_use]
    pub fn image(mut self, data: impl Into<Bytes>, format: ImageFormat) -> Self {
        self.chunks.push(InputChunk::Image { data: data.into(), format, expected_tokens: None });
        self
    }

    /// The same with another chunk behind it.
    #[must_use]
    pub fn chunk(mut self, chunk: InputChunk) -> Self {
        self.chunks.push(chunk);
        self
    }

    /// How many tokens the model will see, if every chunk tells.
    #[must_use]
    pub fn token_count(&self) -> Option<usize> {
        self.chunks.iter().try_fold(0_usize, |n, chunk| n.checked_add(chunk.token_count()?))
    }

    /// Whether there is nothing to read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.iter().all(|chunk| chunk.token_count() == Some(0))
    }

    /// All token ids in order, if the input is text only.
    #[must_use]
    pub fn to_tokens(&self) -> Option<Tokens> {
        match &self.chunks[..] {
            [] => Some(Tokens::default()),
            [InputChunk::EncodedText { tokens }] => Some(tokens.clone()),
            chunks => {
                let mut all = Vec::new();
                for chunk in chunks {
                    let InputChunk::EncodedText { tokens } = chunk else {
                        return None;
                    };
                    all.extend_from_slice(tokens);
                }
                Some(all.into())
            }
        }
    }
}

impl<T: Into<Tokens>> From<T> for ModelInput {
    fn from(tokens: T) -> Self {
        Self::from_tokens(tokens)
    }
}

impl InputChunk {
    /// How many tokens the chunk becomes, if it tells.
    #[must_use]
    pub fn token_count(&self) -> Option<usize> {
        match self {
            Self::EncodedText { tokens } => Some(tokens.len()),
            Self::Image { expected_tokens, .. }
            | Self::ImageAssetPointer { expected_tokens, .. } => {
                expected_tokens.and_then(|n| usize::try_from(n).ok())
            }
            Self::Dmel { dmel } => dmel_len(dmel),
        }
    }

    /// The `type` tag in JSON.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::EncodedText { .. } => "encoded_text",
            Self::Image { .. } => "image",
            Self::ImageAssetPointer { .. } => "image_asset_pointer",
            Self::Dmel { .. } => "dmel",
        }
    }
}

/// The first dimension in a mel container's header: an optional mark, an element type from 0 to 7,
/// the rank and the dimensions as variable-length integers.
fn dmel_len(container: &[u8]) -> Option<usize> {
    const CONSTANT: u8 = 0xFE;
    let header = container.strip_prefix(&[CONSTANT]).unwrap_or(container);
    let (dtype, mut rest) = header.split_first()?;
    if *dtype > 7 {
        return None;
    }
    let rank = crate::codec::proto::take_varint(&mut rest).ok()?;
    let first = crate::codec::proto::take_varint(&mut rest).ok()?;
    if rank == 0 { None } else { usize::try_from(first).ok() }
}

fn to_base64<S: Serializer>(data: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&base64::display::Base64Display::new(data, &BASE64))
}

impl<'de> Deserialize<'de> for InputChunk {
    /// Reads the fields of all kinds at once. The tag may stand behind the tokens, and serde's
    /// own reader for tagged types would first hold every token in a buffer of its own.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Form {
            #[serde(rename = "type")]
            kind: Option<String>,
            tokens: Option<Tokens>,
            data: Option<Base64>,
            format: Option<String>,
            location: Option<String>,
            dmel: Option<Base64>,
            expected_tokens: Option<u32>,
        }

        fn need<T, E: de::Error>(value: Option<T>, name: &'static str) -> Result<T, E> {
            value.ok_or_else(|| E::missing_field(name))
        }

        fn format<E: de::Error>(name: Option<String>) -> Result<ImageFormat, E> {
            let name: String = need(name, "format")?;
            ImageFormat::from_name(&name).ok_or_else(|| E::unknown_variant(&name, &["png", "jpeg"]))
        }

        let form = Form::deserialize(deserializer)?;
        let expected_tokens = form.expected_tokens;
        // Every kind has a default tag, so a chunk without one is known by its fields.
        let kind = match form.kind.as_deref() {
            Some(kind) => kind,
            None if form.dmel.is_some() => "dmel",
            None if form.location.is_some() => "image_asset_pointer",
            None if form.data.is_some() => "image",
            None => "encoded_text",
        };
        Ok(match kind {
            "encoded_text" => Self::EncodedText { tokens: need(form.tokens, "tokens")? },
            "image" => Self::Image {
                data: need(form.data, "data")?.0,
                format: format(form.format)?,
                expected_tokens,
            },
            "image_asset_pointer" => Self::ImageAssetPointer {
                format: format(form.format)?,
                location: need(form.location, "location")?,
                expected_tokens,
            },
            "dmel" => Self::Dmel { dmel: need(form.dmel, "dmel")?.0 },
            other => {
                const KINDS: &[&str] = &["encoded_text", "image", "image_asset_pointer", "dmel"];
                return Err(de::Error::unknown_variant(other, KINDS));
            }
        })
    }
}

/// Bytes in JSON, decoded straight from the text.
struct Base64(Bytes);

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl de::Visitor<'_> for Text {
            type Value = Base64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("base64 with padding")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Base64, E> {
                BASE64.decode(text).map(|bytes| Base64(bytes.into())).map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_needs_every_chunk_to_tell() {
        let text = ModelInput::from_tokens([1, 2]);
        assert_eq!(text.token_count(), Some(2));
        let image = text.clone().image(&b"x"[..], ImageFormat::Png);
        assert_eq!(image.token_count(), None);
        assert!(!image.is_empty());
        assert_eq!(image.to_tokens(), None);

        let dmel = Bytes::from_static(&[0, 2, 3, 1, 9, 9, 9]);
        assert_eq!(text.clone().chunk(InputChunk::Dmel { dmel }).token_count(), Some(5));
        let constant = Bytes::from_static(&[0xFE, 1, 1, 0x80, 1]);
        assert_eq!(InputChunk::Dmel { dmel: constant }.token_count(), Some(128));
        for bad in [&[][..], &[8, 1, 1], &[0], &[0, 0], &[0, 1], &[0, 1, 0xFF]] {
            assert_eq!(InputChunk::Dmel { dmel: Bytes::from(bad) }.token_count(), None, "{bad:?}");
        }
    }

    #[test]
    fn base64_must_be_whole() {
        let json = r#"{"type":"image","format":"png","data":"AAA"}"#;
        assert!(serde_json::from_str::<InputChunk>(json).is_err());
    }

    #[test]
    fn a_chunk_without_a_tag_is_known_by_its_fields() {
        let read = |json: &str| serde_json::from_str::<InputChunk>(json).map(|chunk| chunk.kind());
        assert_eq!(read(r#"{"tokens":[1]}"#).unwrap(), "encoded_text");
        assert_eq!(read(r#"{"dmel":""}"#).unwrap(), "dmel");
        assert_eq!(read(r#"{"data":"","format":"png"}"#).unwrap(), "image");
        assert_eq!(read(r#"{"location":"x","format":"png"}"#).unwrap(), "image_asset_pointer");
        assert!(read(r#"{"type":"video"}"#).is_err());
    }
}
