//! [`Asset`]: the files of the web page, compiled into the server.
//!
//! The build script compresses the files of `ui`.

/// A file of the web page.
#[derive(Clone, Copy, Debug)]
pub struct Asset {
    /// Path below `ui`, with `/` between folders.
    pub name: &'static str,
    /// Value of the header `content-type`.
    pub content_type: &'static str,
    /// Content for readers that do not accept gzip.
    pub plain: &'static [u8],
    /// Content compressed with gzip.
    pub gzip: &'static [u8],
}

/// All files of `ui`, sorted by name.
const ASSETS: &[Asset] = include!(concat!(env!("OUT_DIR"), "/assets.rs"));

impl Asset {
    /// Returns the page.
    #[must_use]
    pub fn page() -> Self {
        Self::find("index.html").expect("the folder `ui` has the page")
    }

    /// Finds a file by its path below `ui`.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        ASSETS.iter().find(|asset| asset.name == name).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// Maximum size of all compressed files in bytes.
    const BUDGET: usize = 200_000;

    #[test]
    fn compressed_files_have_the_same_content_and_no_time() {
        for asset in ASSETS {
            let mut content = Vec::new();
            flate2::read::GzDecoder::new(asset.gzip).read_to_end(&mut content).unwrap();
            assert!(content == asset.plain, "{}", asset.name);
            assert_eq!(asset.gzip[4..8], [0; 4], "{}", asset.name);
        }
    }

    /// A module that the browser finds only through the imports of another module delays the first
    /// view.
    #[test]
    fn the_page_loads_all_scripts_at_once() {
        let page = str::from_utf8(Asset::page().plain).unwrap();
        let scripts = ASSETS.iter().filter(|asset| asset.name.ends_with(".js"));
        for asset in scripts.filter(|asset| asset.name != "app.js") {
            let link = format!("<link rel=\"modulepreload\" href=\"/ui/{}\">", asset.name);
            assert!(page.contains(&link), "index.html has no {link}");
        }
    }

    #[test]
    fn the_page_is_small_and_has_no_inline_code() {
        let size: usize = ASSETS.iter().map(|asset| asset.gzip.len()).sum();
        assert!(size <= BUDGET, "{size} bytes");
        let page = str::from_utf8(Asset::page().plain).unwrap();
        assert!(!page.contains("<style") && !page.contains(" on") && !page.contains(" style="));
        for script in page.split("<script").skip(1) {
            assert!(script.contains("src=\"/ui/") && script.contains("></script>"), "{script}");
        }
    }

    /// Data of programs and models must never be parsed as HTML.
    #[test]
    fn no_script_parses_html_or_refers_to_another_host() {
        let scripts = ASSETS.iter().filter(|asset| asset.name.ends_with(".js"));
        for asset in scripts {
            let text = str::from_utf8(asset.plain).unwrap();
            for name in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
            {
                assert!(!text.contains(name), "{} contains {name}", asset.name);
            }
            let foreign = text.lines().find(|line| {
                line.contains("https://")
                    || line.contains("fetch(\"http")
                    || line.contains("import(")
            });
            assert_eq!(foreign, None, "{}", asset.name);
        }
    }
}
