//! [`Document`]: the JSON output of rustdoc for a crate.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;

use serde_json::Value;

use crate::step::XtaskError;

/// Version of the format that this module reads; Rust 1.95 writes it.
pub(super) const FORMAT_VERSION: u64 = 57;

/// Items of a crate and, by path, items of other crates that they mention.
pub(super) struct Document {
    root: Value,
    /// Ids of the crate's own items by path, including private modules.
    ids: HashMap<String, String>,
}

/// Item that a `pub use` names.
pub(super) enum Target {
    /// Id in the same document.
    Local(String),
    /// Path in another crate, whose name is the first part.
    External(Vec<String>),
}

impl Document {
    fn parse(text: &str) -> Option<Self> {
        let root: Value = serde_json::from_str(text).ok()?;
        let paths = root["paths"].as_object()?;
        let own = paths.iter().filter(|(_, summary)| summary["crate_id"] == 0);
        let ids = own.map(|(id, summary)| (path(summary).join("::"), id.clone())).collect();
        Some(Self { root, ids })
    }

    pub(super) fn format_version(&self) -> u64 {
        self.root["format_version"].as_u64().unwrap_or_default()
    }

    /// Returns the id of the crate's root module.
    pub(super) fn root_id(&self) -> String {
        id(&self.root["root"])
    }

    /// Returns an item of the crate.
    pub(super) fn item(&self, id: &str) -> Option<&Value> {
        self.root["index"].get(id)
    }

    /// Returns the item that a `use` with the id `id` names.
    pub(super) fn target(&self, id: &str) -> Option<Target> {
        if self.item(id).is_some() {
            return Some(Target::Local(id.to_owned()));
        }
        Some(Target::External(path(self.root["paths"].get(id)?)))
    }

    /// Returns the id of the crate's item at `path`.
    pub(super) fn id_of(&self, path: &[String]) -> Option<&str> {
        self.ids.get(&path.join("::")).map(String::as_str)
    }
}

/// Converts an id, which the format writes as a number, to the key of an object.
pub(super) fn id(value: &Value) -> String {
    value.to_string()
}

/// Returns the ids in the array `ids`.
pub(super) fn ids(ids: &Value) -> impl Iterator<Item = String> {
    ids.as_array().into_iter().flatten().map(id)
}

fn path(summary: &Value) -> Vec<String> {
    let parts = summary["path"].as_array().into_iter().flatten();
    parts.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Documents of the workspace, read when they are needed.
pub(super) struct Documents {
    folder: PathBuf,
    read: RefCell<HashMap<String, Rc<Document>>>,
}

impl Documents {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, read: RefCell::default() }
    }

    /// Returns the document of a crate.
    pub(super) fn get(&self, name: &str) -> Result<Rc<Document>, XtaskError> {
        if let Some(document) = self.read.borrow().get(name) {
            return Ok(Rc::clone(document));
        }
        let path = self.folder.join(format!("{name}.json"));
        let text = std::fs::read_to_string(&path)
            .map_err(|error| XtaskError::new(format!("cannot read {}: {error}", path.display())))?;
        let document = Document::parse(&text).map(Rc::new);
        let document = document.ok_or_else(|| {
            XtaskError::new(format!("{} is not the JSON output of rustdoc", path.display()))
        })?;
        self.read.borrow_mut().insert(name.to_owned(), Rc::clone(&document));
        Ok(document)
    }
}
