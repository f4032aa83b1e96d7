//! SHA-256 checksums of files.

use std::io::{self, Read};

use sha2::{Digest as _, Sha256};

/// Reads `reader` to its end. Returns the SHA-256 in lower-case hex and the number of bytes read.
pub(crate) fn sha256_hex(mut reader: impl Read) -> io::Result<(String, u64)> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let mut size = 0;
    loop {
        match reader.read(&mut buffer)? {
            0 => break,
            n => {
                hash.update(&buffer[..n]);
                size += n as u64;
            }
        }
    }
    Ok((hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect(), size))
}
