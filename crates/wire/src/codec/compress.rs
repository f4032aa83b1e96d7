//! Compression of bodies with zstd.

use std::io::Read;

use bytes::Bytes;

use crate::{DecodeError, DecodeErrorKind, InvalidInput};

/// Name of the encoding in the `Content-Encoding` header.
pub const ZSTD: &str = "zstd";

/// Base-2 logarithm of the maximum window size: 8 MiB, which every decoder must support. The
/// decoder allocates the window that a frame declares, so larger ones are rejected.
const WINDOW_LOG: u32 = 23;

/// Compression ratio up to which the output buffer is not reallocated.
const USUAL_RATIO: usize = 16;

/// Compresses a body at the default level.
///
/// # Errors
/// Returns an error if zstd cannot allocate memory.
pub fn compress(body: &[u8]) -> Result<Bytes, InvalidInput> {
    zstd::bulk::compress(body, zstd::DEFAULT_COMPRESSION_LEVEL)
        .map(Bytes::from)
        .map_err(|error| InvalidInput::new("body", format!("compression failed: {error}")))
}

/// Decompresses a body of at most `limit` bytes.
///
/// ```
/// use tinkex_wire::codec::compress::{compress, decompress};
///
/// let small = compress(&[0; 1_000_000])?;
/// assert!(small.len() < 100);
/// assert_eq!(decompress(&small, 1_000_000).unwrap().len(), 1_000_000);
/// assert!(decompress(&small, 999_999).is_err());
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
///
/// # Errors
/// Returns an error if the bytes are not a zstd frame or decompress to more than `limit` bytes.
/// Memory use is limited independently of the size that the frame declares.
pub fn decompress(body: &[u8], limit: usize) -> Result<Bytes, DecodeError> {
    let malformed = |error: std::io::Error| {
        DecodeError::new(DecodeErrorKind::Compression, format!("decompression failed: {error}"))
    };
    let mut reader = zstd::stream::read::Decoder::with_buffer(body).map_err(malformed)?;
    reader.window_log_max(WINDOW_LOG).map_err(malformed)?;
    let mut out = Vec::with_capacity(initial_capacity(body, limit));
    // Read one byte more than allowed to detect that the limit is exceeded.
    let max_read = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    reader.take(max_read).read_to_end(&mut out).map_err(malformed)?;
    if out.len() > limit {
        let detail = format!("body decompresses to more than {limit} bytes");
        return Err(DecodeError::new(DecodeErrorKind::TooLarge, detail));
    }
    Ok(out.into())
}

/// Returns the decompressed size that a frame declares, if it declares one.
#[must_use]
pub fn declared_size(body: &[u8]) -> Option<u64> {
    zstd::zstd_safe::get_frame_content_size(body).ok().flatten()
}

/// Returns the initial capacity of the output buffer: the declared size, but at most `limit` and at
/// most [`USUAL_RATIO`] times the compressed size, because a frame can declare any size.
fn initial_capacity(body: &[u8], limit: usize) -> usize {
    let declared =
        declared_size(body).and_then(|size| usize::try_from(size).ok()).unwrap_or(body.len());
    declared.min(limit).min(body.len().saturating_mul(USUAL_RATIO)).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decompression_stops_at_the_limit() {
        let bomb = compress(&vec![0; 64 << 20]).unwrap();
        let peak = allocation_counter::measure(|| {
            let error = decompress(&bomb, 1 << 20).unwrap_err();
            assert_eq!(error.kind(), DecodeErrorKind::TooLarge);
        });
        assert!(peak.bytes_max < 4 << 20, "{peak:?}");
    }

    #[test]
    fn malformed_and_truncated_frames_are_rejected() {
        let good = compress(b"hello hello hello hello").unwrap();
        for bad in [&b""[..], b"not zstd", &good[..good.len() - 1], &good[..4]] {
            let kind = decompress(bad, 1000).map_err(|e| e.kind());
            assert_eq!(kind, Err(DecodeErrorKind::Compression), "{bad:?}");
        }
    }

    #[test]
    fn oversized_windows_are_rejected() {
        // An empty frame with a window of 2^log bytes.
        let frame = |log: u8| [0x28, 0xB5, 0x2F, 0xFD, 0x00, (log - 10) << 3, 0x01, 0x00, 0x00];
        let error = decompress(&frame(24), 1 << 30).unwrap_err();
        assert_eq!(error.kind(), DecodeErrorKind::Compression);
        assert_eq!(decompress(&frame(23), 1 << 30).unwrap(), "");
    }
}
