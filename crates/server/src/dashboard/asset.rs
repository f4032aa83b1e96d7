//! [`Asset`]: the files of the web page, compiled into the server.
//!
//! `cargo xtask ui` compresses the files of `crates/server/ui`; a test checks that they are current.

/// A file of the web page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asset {
    pub(crate) name: &'static str,
    pub(crate) content_type: &'static str,
    /// Content for readers that do not accept gzip.
    pub(crate) plain: &'static [u8],
    pub(crate) gzip: &'static [u8],
}

macro_rules! asset {
    ($name:literal, $content_type:literal) => {
        Asset {
            name: $name,
            content_type: $content_type,
            plain: include_bytes!(concat!("../../ui/", $name)),
            gzip: include_bytes!(concat!("../../ui/gzip/", $name, ".gz")),
        }
    };
}

/// All files; the first is the page itself.
const ASSETS: &[Asset] = &[
    asset!("index.html", "text/html; charset=utf-8"),
    asset!("style.css", "text/css; charset=utf-8"),
    asset!("icon.svg", "image/svg+xml"),
    asset!("app.js", "text/javascript; charset=utf-8"),
    asset!("api.js", "text/javascript; charset=utf-8"),
    asset!("chart.js", "text/javascript; charset=utf-8"),
    asset!("dom.js", "text/javascript; charset=utf-8"),
    asset!("format.js", "text/javascript; charset=utf-8"),
    asset!("playground.js", "text/javascript; charset=utf-8"),
    asset!("run.js", "text/javascript; charset=utf-8"),
    asset!("runs.js", "text/javascript; charset=utf-8"),
    asset!("samples.js", "text/javascript; charset=utf-8"),
    asset!("server.js", "text/javascript; charset=utf-8"),
    asset!("timeline.js", "text/javascript; charset=utf-8"),
    asset!("tokens.js", "text/javascript; charset=utf-8"),
];

impl Asset {
    /// Returns the page.
    pub(crate) fn page() -> Self {
        ASSETS[0]
    }

    /// Finds a file by its name.
    pub(crate) fn find(name: &str) -> Option<Self> {
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
    fn the_compressed_files_are_current() {
        for asset in ASSETS {
            let mut content = Vec::new();
            flate2::read::GzDecoder::new(asset.gzip).read_to_end(&mut content).unwrap();
            assert!(content == asset.plain, "{}: run `cargo xtask ui`", asset.name);
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
