//! Compressed bodies: one zstd frame.

use std::io::Read;

use bytes::Bytes;

use crate::{DecodeError, DecodeErrorKind, InvalidInput};

/// The name of this encoding in a `Content-Encoding` header.
pub const ZSTD: &str = "zstd";

/// The largest window that is accepted: 8 MiB, what every decoder must support. A frame may claim
/// more, and would make us allocate it.
const WINDOW_LOG: u32 = 23;

/// Compresses a body, at the default level.
///
/// # Errors
/// If there is not enough memory.
pub fn compress(body: &[u8]) -> Result<Bytes, InvalidInput> {
    zstd::bulk::compress(body, zstd::DEFAULT_COMPRESSION_LEVEL)
        .map(Bytes::from)
        .map_err(|why| InvalidInput::new("body", format!("cannot be compressed: {why}")))
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
/// If the bytes are not zstd, or become more than `limit`. Nothing beyond the limit is produced,
/// and what the frame claims of its size is not believed.
pub fn decompress(body: &[u8], limit: usize) -> Result<Bytes, DecodeError> {
    let broken = |why: std::io::Error| {
        DecodeError::new(DecodeErrorKind::Compression, format!("not a zstd body: {why}"))
    };
    let mut reader = zstd::stream::read::Decoder::with_buffer(body).map_err(broken)?;
    reader.window_log_max(WINDOW_LOG).map_err(broken)?;
    let mut out = Vec::with_capacity(first_guess(body, limit));
    // One more than allowed, so that reaching the limit and passing it can be told apart.
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    reader.take(most).read_to_end(&mut out).map_err(broken)?;
    if out.len() > limit {
        let why = format!("more than {limit} bytes when decompressed");
        return Err(DecodeError::new(DecodeErrorKind::TooLarge, why));
    }
    Ok(out.into())
}

/// What a body claims to be when decompressed, if it does.
#[must_use]
pub fn declared_size(body: &[u8]) -> Option<u64> {
    zstd::zstd_safe::get_frame_content_size(body).ok().flatten()
}

/// What the frame claims, as far as its own size makes that likely.
fn first_guess(body: &[u8], limit: usize) -> usize {
    const USUAL_RATIO: usize = 16;
    let claimed =
        declared_size(body).and_then(|size| usize::try_from(size).ok()).unwrap_or(body.len());
    claimed.min(limit).min(body.len().saturating_mul(USUAL_RATIO)).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bomb_stops_at_the_limit() {
        let bomb = compress(&vec![0; 64 << 20]).unwrap();
        let peak = allocation_counter::measure(|| {
            let error = decompress(&bomb, 1 << 20).unwrap_err();
            assert_eq!(error.kind(), DecodeErrorKind::TooLarge);
        });
        assert!(peak.bytes_max < 4 << 20, "{peak:?}");
    }

    #[test]
    fn garbage_and_truncation_are_typed() {
        let good = compress(b"hello hello hello hello").unwrap();
        for bad in [&b""[..], b"not zstd", &good[..good.len() - 1], &good[..4]] {
            let kind = decompress(bad, 1000).map_err(|e| e.kind());
            assert_eq!(kind, Err(DecodeErrorKind::Compression), "{bad:?}");
        }
    }

    #[test]
    fn a_claimed_window_beyond_the_limit_is_refused() {
        // An empty frame whose header claims a window of 2^24 bytes, which zstd by itself would
        // allocate; and the same with 2^23, the most that is let through.
        let frame = |log: u8| [0x28, 0xB5, 0x2F, 0xFD, 0x00, (log - 10) << 3, 0x01, 0x00, 0x00];
        let error = decompress(&frame(24), 1 << 30).unwrap_err();
        assert_eq!(error.kind(), DecodeErrorKind::Compression);
        assert_eq!(decompress(&frame(23), 1 << 30).unwrap(), "");
    }
}
