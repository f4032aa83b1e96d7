//! Compresses the files of the web page, and writes the table of them that `dashboard/asset.rs`
//! includes. The result depends on the content of the files only.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;

/// Folder of the page.
const FOLDER: &str = "ui";

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={FOLDER}");
    #[expect(clippy::disallowed_methods, reason = "cargo passes the folder in the environment")]
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let out = PathBuf::from(out);
    let mut names = Vec::new();
    collect(Path::new(FOLDER), "", &mut names)?;
    names.sort();
    let mut table = String::from("&[\n");
    for (index, (name, content_type)) in names.iter().enumerate() {
        // A name of a folder is not a folder here: the number keeps names apart.
        let compressed = format!("{index}.gz");
        std::fs::write(
            out.join(&compressed),
            compress(&std::fs::read(Path::new(FOLDER).join(name))?)?,
        )?;
        let entry = format!(
            "    Asset {{ name: {name:?}, content_type: {content_type:?}, \
             plain: include_bytes!(concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/{FOLDER}/{name}\")), \
             gzip: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{compressed}\")) }},"
        );
        writeln!(table, "{entry}").map_err(io::Error::other)?;
    }
    table.push(']');
    std::fs::write(out.join("assets.rs"), table)
}

/// Adds the names and content types of the files of a folder that browsers load. `prefix` is the
/// path of the folder within the page.
fn collect(folder: &Path, prefix: &str, names: &mut Vec<(String, &'static str)>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            collect(&path, &format!("{prefix}{name}/"), names)?;
            continue;
        }
        let content_type = match path.extension().and_then(|extension| extension.to_str()) {
            Some("css") => "text/css; charset=utf-8",
            Some("html") => "text/html; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("svg") => "image/svg+xml",
            // Types for the type checker.
            _ => continue,
        };
        names.push((format!("{prefix}{name}"), content_type));
    }
    Ok(())
}

/// Compresses content. The header has no time.
fn compress(content: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(content)?;
    encoder.finish()
}
