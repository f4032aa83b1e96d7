//! Lists the items that a user of a crate can name, with their fields, methods and traits.
//!
//! Modules are visited breadth first, so that an item is described at its shortest path; at its other
//! paths the list has a reference to the first.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

use serde_json::Value;

use crate::step::XtaskError;

use super::document::{Document, Documents, Target, id, ids};
use super::types::{function, parameters, path, type_name, where_clause};

/// Item of a document of the workspace.
#[derive(Clone)]
struct Item {
    document: Rc<Document>,
    /// Name of the document's crate.
    crate_name: String,
    id: String,
}

/// Public API of a crate while it is collected.
struct Listing<'a> {
    documents: &'a Documents,
    /// Description of every path.
    lines: BTreeMap<String, Vec<String>>,
    /// First path of every item, by crate and id.
    first_paths: HashMap<(String, String), String>,
    /// Modules to visit, with their paths.
    modules: VecDeque<(Item, String)>,
}

/// Returns the list of the public API of the crate `name`.
pub(super) fn public_items(documents: &Documents, name: &str) -> Result<String, XtaskError> {
    let document = documents.get(name)?;
    let root = Item { id: document.root_id(), crate_name: name.to_owned(), document };
    let mut listing = Listing {
        documents,
        lines: BTreeMap::new(),
        first_paths: HashMap::new(),
        modules: VecDeque::from([(root, name.to_owned())]),
    };
    while let Some((module, path)) = listing.modules.pop_front() {
        listing.add_members(&module, &path)?;
    }
    let lines: Vec<String> = listing.lines.into_values().flatten().collect();
    Ok(lines.join("\n") + "\n")
}

impl Listing<'_> {
    /// Adds the members of the module or enum `module`, whose path is `path`.
    fn add_members(&mut self, module: &Item, path: &str) -> Result<(), XtaskError> {
        let Some(item) = module.document.item(&module.id) else { return Ok(()) };
        let members = match &item["inner"]["module"] {
            Value::Null => &item["inner"]["enum"]["variants"],
            inner => &inner["items"],
        };
        for id in ids(members) {
            self.add(&Item { id, ..module.clone() }, path, None)?;
        }
        Ok(())
    }

    /// Adds an item to the module at `parent`, under the name `renamed` if a `pub use` gives it one.
    fn add(&mut self, item: &Item, parent: &str, renamed: Option<&str>) -> Result<(), XtaskError> {
        let Some(value) = item.document.item(&item.id) else { return Ok(()) };
        if let Some(import) = value["inner"].get("use") {
            return self.add_import(item, import, parent);
        }
        let Some(name) = renamed.or_else(|| value["name"].as_str()) else { return Ok(()) };
        let path = format!("{parent}::{name}");
        let key = (item.crate_name.clone(), item.id.clone());
        if let Some(first) = self.first_paths.get(&key) {
            if *first != path {
                let line = format!("use {path} = {first}");
                self.lines.insert(path, vec![line]);
            }
            return Ok(());
        }
        self.first_paths.insert(key, path.clone());
        if value["inner"].get("module").is_some() {
            self.lines.insert(path.clone(), vec![format!("mod {path}")]);
            self.modules.push_back((item.clone(), path));
            return Ok(());
        }
        let lines = describe(&item.document, value, &path);
        self.lines.insert(path, lines);
        Ok(())
    }

    /// Adds what a `pub use` in the module at `parent` names.
    fn add_import(&mut self, item: &Item, import: &Value, parent: &str) -> Result<(), XtaskError> {
        let name = import["name"].as_str().unwrap_or("?");
        let source = import["source"].as_str().unwrap_or("?");
        let target = item.document.target(&id(&import["id"]));
        let imported = match target {
            Some(Target::Local(id)) => Some(Item { id, ..item.clone() }),
            Some(Target::External(path)) => self.external(&path)?,
            None => None,
        };
        match imported {
            Some(imported) if import["is_glob"] == true => self.add_members(&imported, parent),
            Some(imported) => self.add(&imported, parent, Some(name)),
            // An item of a crate that is not in the workspace.
            None => {
                let path = format!("{parent}::{name}");
                let line = format!("use {path} = {source}");
                self.lines.insert(path, vec![line]);
                Ok(())
            }
        }
    }

    /// Returns the item at `path` in another crate of the workspace; `None` in any other crate.
    fn external(&self, path: &[String]) -> Result<Option<Item>, XtaskError> {
        let Some(name) = path.first().filter(|name| name.starts_with("tinkex")) else {
            return Ok(None);
        };
        let document = self.documents.get(name)?;
        let id = document.id_of(path).map(str::to_owned);
        Ok(id.map(|id| Item { id, crate_name: name.clone(), document }))
    }
}

/// Returns the lines of an item: its declaration, and its members with an indentation.
fn describe(document: &Document, item: &Value, path: &str) -> Vec<String> {
    let inner = &item["inner"];
    let Some((kind, inner)) = inner.as_object().and_then(|object| object.iter().next()) else {
        return Vec::new();
    };
    let generics = &inner["generics"];
    let declaration = |keyword: &str| {
        let attribute = if is_non_exhaustive(item) { "#[non_exhaustive] " } else { "" };
        format!("{attribute}{keyword} {path}{}{}", parameters(generics), where_clause(generics))
    };
    let mut lines = Vec::new();
    match kind.as_str() {
        "struct" => {
            lines.push(declaration("struct"));
            lines.extend(fields(document, &inner["kind"]).map(|field| format!("  {field}")));
            lines.extend(implementations(document, item));
        }
        "union" => lines.push(declaration("union")),
        "enum" => {
            lines.push(declaration("enum"));
            for variant in ids(&inner["variants"]).filter_map(|id| document.item(&id)) {
                lines.push(format!("  {}", describe_variant(document, variant)));
            }
            lines.extend(implementations(document, item));
        }
        "trait" => {
            lines.push(declaration("trait"));
            lines.extend(members(document, &inner["items"]));
        }
        "function" => lines.push(function(path, inner)),
        "type_alias" => {
            lines.push(format!("{} = {}", declaration("type"), type_name(&inner["type"])));
        }
        "constant" => lines.push(format!("const {path}: {}", type_name(&inner["type"]))),
        "static" => lines.push(format!("static {path}: {}", type_name(&inner["type"]))),
        "macro" => lines.push(format!("macro {path}!")),
        other => lines.push(format!("{other} {path}")),
    }
    lines
}

fn is_non_exhaustive(item: &Value) -> bool {
    item["attrs"].as_array().into_iter().flatten().any(|attribute| attribute == "non_exhaustive")
}

/// Writes the public fields of a struct or variant.
fn fields(document: &Document, kind: &Value) -> impl Iterator<Item = String> {
    let fields = match kind.get("plain").or_else(|| kind.get("struct")) {
        Some(plain) => &plain["fields"],
        None => &kind["tuple"],
    };
    ids(fields).filter_map(|id| document.item(&id)).map(|field| {
        let name = field["name"].as_str().unwrap_or("?");
        format!("{name}: {}", type_name(&field["inner"]["struct_field"]))
    })
}

fn describe_variant(document: &Document, variant: &Value) -> String {
    let name = variant["name"].as_str().unwrap_or("?");
    let kind = &variant["inner"]["variant"]["kind"];
    let fields: Vec<String> = fields(document, kind).collect();
    let fields =
        if fields.is_empty() { String::new() } else { format!(" {{ {} }}", fields.join(", ")) };
    let attribute = if is_non_exhaustive(variant) { "#[non_exhaustive] " } else { "" };
    format!("{attribute}{name}{fields}")
}

/// Writes methods and constants of a type, and the traits that it implements.
fn implementations(document: &Document, item: &Value) -> Vec<String> {
    let kind = if item["inner"].get("enum").is_some() { "enum" } else { "struct" };
    let mut own = Vec::new();
    let mut traits = BTreeSet::new();
    for implementation in ids(&item["inner"][kind]["impls"]).filter_map(|id| document.item(&id)) {
        let inner = &implementation["inner"]["impl"];
        // Auto traits and implementations for all types follow from the others.
        if inner["is_synthetic"] == true || !inner["blanket_impl"].is_null() {
            continue;
        }
        if inner["trait"].is_null() {
            // `impl A<u8>` differs from `impl<T> A<T>`.
            let specific = where_clause(&inner["generics"]);
            let written = members(document, &inner["items"]);
            own.extend(written.into_iter().map(|member| format!("{member}{specific}")));
        } else if !is_derived_marker(&inner["trait"]) {
            traits.insert(implemented_trait(document, item, inner));
        }
    }
    own.sort();
    // Traits without associated types share a line.
    let (with_types, plain): (Vec<String>, Vec<String>) =
        traits.into_iter().partition(|implemented| implemented.contains('{'));
    if !plain.is_empty() {
        own.push(format!("  impl {}", plain.join(", ")));
    }
    own.extend(with_types.into_iter().map(|implemented| format!("  impl {implemented}")));
    own
}

/// Returns whether a trait is a marker that a derive macro implements beside a trait of its own.
fn is_derived_marker(implemented: &Value) -> bool {
    implemented["path"].as_str().is_some_and(|path| path.ends_with("StructuralPartialEq"))
}

/// Writes a trait that `item` implements, with its associated types.
fn implemented_trait(document: &Document, item: &Value, implementation: &Value) -> String {
    let items = ids(&implementation["items"]).filter_map(|id| document.item(&id));
    let types = items.filter_map(|item| {
        let associated = item["inner"].get("assoc_type")?;
        let name = item["name"].as_str()?;
        Some(format!("{name} = {}", type_name(associated.get("type")?)))
    });
    let types: Vec<String> = types.collect();
    let types =
        if types.is_empty() { String::new() } else { format!(" {{ {} }}", types.join(", ")) };
    // The list of a type has implementations for references to it and for types that contain it, too.
    let subject = &implementation["for"];
    let is_own = subject["resolved_path"]["id"] == item["id"];
    let subject = if is_own { String::new() } else { format!(" for {}", type_name(subject)) };
    format!("{}{subject}{types}", path(&implementation["trait"]))
}

/// Writes the functions, constants and types of a trait or of an inherent implementation.
fn members(document: &Document, items: &Value) -> Vec<String> {
    let items = ids(items).filter_map(|id| document.item(&id));
    let member = |item: &Value| {
        let name = item["name"].as_str()?;
        let (kind, inner) = item["inner"].as_object()?.iter().next()?;
        match kind.as_str() {
            "function" => Some(format!("  {}", function(name, inner))),
            "assoc_const" => Some(format!("  const {name}: {}", type_name(&inner["type"]))),
            "assoc_type" => Some(format!("  type {name}{}", parameters(&inner["generics"]))),
            _ => None,
        }
    };
    items.filter_map(member).collect()
}
