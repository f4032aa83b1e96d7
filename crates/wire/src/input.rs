//! [`ModelInput`]: a prompt or training input, as a list of chunks.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::codec::json::positioned;
use crate::secret::RedactedUrl;
use crate::tokens::Tokens;

/// Input of a model: text, images and audio.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::ModelInput;
///
/// let prompt = ModelInput::from_tokens([1, 2, 3]);
/// assert_eq!(prompt.token_count(), Some(3));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ModelInput {
    /// Chunks in order.
    pub chunks: Vec<InputChunk>,
}

/// One chunk of a [`ModelInput`].
#[derive(Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum InputChunk {
    /// Tokenized text.
    #[non_exhaustive]
    EncodedText {
        /// Token ids.
        tokens: Tokens,
    },
    /// Image data.
    #[non_exhaustive]
    Image {
        /// Contents of the image file.
        #[serde(serialize_with = "to_base64")]
        data: Bytes,
        /// File format.
        format: ImageFormat,
        /// Expected number of tokens. The server rejects an image that yields another number.
        #[serde(skip_serializing_if = "Option::is_none")]
        expected_tokens: Option<u32>,
    },
    /// URL of an image that the server downloads. Valid for sampling only.
    #[non_exhaustive]
    ImageAssetPointer {
        /// File format.
        format: ImageFormat,
        /// URL of the image.
        location: String,
        /// Expected number of tokens.
        #[serde(skip_serializing_if = "Option::is_none")]
        expected_tokens: Option<u32>,
    },
    /// Audio, as a mel spectrogram.
    #[non_exhaustive]
    Dmel {
        /// Encoded spectrogram.
        #[serde(serialize_with = "to_base64")]
        dmel: Bytes,
    },
}

impl fmt::Debug for InputChunk {
    /// Omits image data, and the query of an image URL, which may contain a signature.
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

/// File format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ImageFormat {
    /// PNG.
    Png,
    /// JPEG.
    Jpeg,
}

impl ImageFormat {
    /// Returns the name in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Jpeg => "jpeg",
        }
    }

    /// Returns the format with the given name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Png, Self::Jpeg].into_iter().find(|format| format.as_str() == name)
    }
}

impl ModelInput {
    /// Creates an input of one text chunk.
    #[must_use]
    pub fn from_tokens(tokens: impl Into<Tokens>) -> Self {
        Self { chunks: vec![InputChunk::text(tokens)] }
    }

    /// Appends a text chunk.
    #[must_use]
    pub fn tokens(mut self, tokens: impl Into<Tokens>) -> Self {
        self.chunks.push(InputChunk::text(tokens));
        self
    }

    /// Appends an image.
    #[must_use]
    pub fn image(mut self, data: impl Into<Bytes>, format: ImageFormat) -> Self {
        self.chunks.push(InputChunk::image(data, format));
        self
    }

    /// Appends a chunk.
    #[must_use]
    pub fn chunk(mut self, chunk: InputChunk) -> Self {
        self.chunks.push(chunk);
        self
    }

    /// Returns the number of tokens, or `None` if a chunk does not determine its number.
    #[must_use]
    pub fn token_count(&self) -> Option<usize> {
        self.chunks.iter().try_fold(0_usize, |n, chunk| n.checked_add(chunk.token_count()?))
    }

    /// Returns `true` if the input has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.iter().all(|chunk| chunk.token_count() == Some(0))
    }

    /// Returns all token ids in order, or `None` if the input contains images or audio.
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

impl From<&Self> for ModelInput {
    fn from(input: &Self) -> Self {
        input.clone()
    }
}

impl InputChunk {
    /// Creates a chunk of tokenized text.
    #[must_use]
    pub fn text(tokens: impl Into<Tokens>) -> Self {
        Self::EncodedText { tokens: tokens.into() }
    }

    /// Creates an image from the contents of its file.
    #[must_use]
    pub fn image(data: impl Into<Bytes>, format: ImageFormat) -> Self {
        Self::Image { data: data.into(), format, expected_tokens: None }
    }

    /// Creates an image that the server downloads from a URL. Valid for sampling only.
    #[must_use]
    pub fn image_url(location: impl Into<String>, format: ImageFormat) -> Self {
        Self::ImageAssetPointer { format, location: location.into(), expected_tokens: None }
    }

    /// Creates audio from an encoded mel spectrogram.
    #[must_use]
    pub fn dmel(dmel: impl Into<Bytes>) -> Self {
        Self::Dmel { dmel: dmel.into() }
    }

    /// Sets the expected number of tokens of an image; other chunks are returned unchanged.
    #[must_use]
    pub fn expected_tokens(mut self, tokens: impl Into<Option<u32>>) -> Self {
        if let Self::Image { expected_tokens, .. }
        | Self::ImageAssetPointer { expected_tokens, .. } = &mut self
        {
            *expected_tokens = tokens.into();
        }
        self
    }

    /// Returns the number of tokens of the chunk, or `None` if it is unknown.
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

    /// Returns the `type` tag in JSON.
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

/// Returns the first dimension of an encoded spectrogram. Its header consists of an optional
/// marker, an element type from 0 to 7, and the rank and dimensions as variable-length integers.
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
    /// Decodes the fields of all variants at once. The tag may follow the tokens, in which case
    /// serde's derived implementation would buffer every token first.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct ChunkFields {
            #[serde(rename = "type")]
            kind: Option<String>,
            tokens: Option<Tokens>,
            data: Option<Base64>,
            format: Option<String>,
            location: Option<String>,
            dmel: Option<Base64>,
            expected_tokens: Option<u32>,
        }

        fn need<T>(value: Option<T>, name: &str) -> Result<T, String> {
            value.ok_or_else(|| format!("missing field `{name}`"))
        }

        fn format(name: Option<String>) -> Result<ImageFormat, String> {
            let name = need(name, "format")?;
            ImageFormat::from_name(&name)
                .ok_or_else(|| format!("unknown variant `{name}`, expected `png` or `jpeg`"))
        }

        positioned::object(deserializer, |form: ChunkFields| {
            let expected_tokens = form.expected_tokens;
            // The tag is optional; the fields identify a chunk without one.
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
                    return Err(format!(
                        "unknown variant `{other}`, expected one of `encoded_text`, `image`, \
                         `image_asset_pointer`, `dmel`"
                    ));
                }
            })
        })
    }
}

/// Bytes encoded as Base64, decoded without an intermediate string.
struct Base64(Bytes);

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Base64Visitor;

        impl de::Visitor<'_> for Base64Visitor {
            type Value = Base64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("base64 with padding")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Base64, E> {
                BASE64.decode(text).map(|bytes| Base64(bytes.into())).map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Base64Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_count_requires_every_chunk_to_have_one() {
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
    fn base64_requires_padding() {
        let json = r#"{"type":"image","format":"png","data":"AAA"}"#;
        assert!(serde_json::from_str::<InputChunk>(json).is_err());
    }

    #[test]
    fn untagged_chunks_are_identified_by_their_fields() {
        let read = |json: &str| serde_json::from_str::<InputChunk>(json).map(|chunk| chunk.kind());
        assert_eq!(read(r#"{"tokens":[1]}"#).unwrap(), "encoded_text");
        assert_eq!(read(r#"{"dmel":""}"#).unwrap(), "dmel");
        assert_eq!(read(r#"{"data":"","format":"png"}"#).unwrap(), "image");
        assert_eq!(read(r#"{"location":"x","format":"png"}"#).unwrap(), "image_asset_pointer");
        assert!(read(r#"{"type":"video"}"#).is_err());
    }
}
