//! `cargo xtask ui`: compresses the files of the dashboard, which the server contains.

use std::io::Write as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::step::{XtaskError, root};

const FOLDER: &str = "crates/server/ui";

pub(crate) fn run() -> Result<(), XtaskError> {
    let folder = root().join(FOLDER);
    let failed =
        |error: std::io::Error| XtaskError::new(format!("cannot compress {FOLDER}: {error}"));
    let mut total = 0;
    for entry in std::fs::read_dir(&folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_file() {
            total += compress(&path, &folder.join("gzip")).map_err(failed)?;
        }
    }
    println!("    {FOLDER}/gzip: {total} bytes");
    Ok(())
}

/// Compresses a file into a folder and returns the compressed size. The result depends on the
/// content only: the header has no time.
fn compress(path: &Path, folder: &Path) -> std::io::Result<usize> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&std::fs::read(path)?)?;
    let compressed = encoder.finish()?;
    std::fs::create_dir_all(folder)?;
    let name = format!("{}.gz", path.file_name().unwrap_or_default().to_string_lossy());
    std::fs::write(folder.join(name), &compressed)?;
    Ok(compressed.len())
}
