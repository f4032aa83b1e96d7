//! Types, generics and signatures as Rust source. Paths are written as their last part: `Result`, not
//! `crate::Result`.

use serde_json::Value;

/// Returns the last part of a path.
fn last(path: &Value) -> &str {
    let path = path.as_str().unwrap_or("?");
    path.rsplit("::").next().unwrap_or(path)
}

/// Returns the elements of an array.
fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Joins the non-empty results of `write`.
fn join<'a>(
    values: impl Iterator<Item = &'a Value>,
    separator: &str,
    write: impl Fn(&'a Value) -> String,
) -> String {
    let texts: Vec<String> = values.map(write).filter(|text| !text.is_empty()).collect();
    texts.join(separator)
}

/// Writes a type.
pub(super) fn type_name(value: &Value) -> String {
    let Some((kind, inner)) = value.as_object().and_then(|object| object.iter().next()) else {
        return match value.as_str() {
            Some("infer") => "_".to_owned(),
            _ => "?".to_owned(),
        };
    };
    match kind.as_str() {
        "resolved_path" => path(inner),
        "generic" | "primitive" => match inner.as_str() {
            Some("never") => "!".to_owned(),
            other => other.unwrap_or("?").to_owned(),
        },
        "borrowed_ref" => {
            let lifetime = inner["lifetime"].as_str().map(|name| format!("{name} "));
            let mutable = if inner["is_mutable"] == true { "mut " } else { "" };
            let referent = type_name(&inner["type"]);
            format!("&{}{mutable}{referent}", lifetime.unwrap_or_default())
        }
        "raw_pointer" => {
            let kind = if inner["is_mutable"] == true { "mut" } else { "const" };
            format!("*{kind} {}", type_name(&inner["type"]))
        }
        "tuple" => {
            let one = array(inner).count() == 1;
            format!("({}{})", join(array(inner), ", ", type_name), if one { "," } else { "" })
        }
        "slice" => format!("[{}]", type_name(inner)),
        "array" => {
            let length = inner["len"].as_str().unwrap_or("?");
            format!("[{}; {length}]", type_name(&inner["type"]))
        }
        "impl_trait" => format!("impl {}", bounds(inner)),
        "dyn_trait" => {
            let traits = join(array(&inner["traits"]), " + ", |bound| path(&bound["trait"]));
            match inner["lifetime"].as_str() {
                Some(lifetime) => format!("dyn {traits} + {lifetime}"),
                None => format!("dyn {traits}"),
            }
        }
        "function_pointer" => signature("fn", &inner["sig"], ""),
        "qualified_path" => {
            let own = type_name(&inner["self_type"]);
            let name = inner["name"].as_str().unwrap_or("?");
            match &inner["trait"] {
                Value::Null => format!("{own}::{name}"),
                implemented => format!("<{own} as {}>::{name}", path(implemented)),
            }
        }
        _ => "?".to_owned(),
    }
}

/// Writes the path of a type or trait with its arguments.
pub(super) fn path(value: &Value) -> String {
    format!("{}{}", last(&value["path"]), generic_arguments(&value["args"]))
}

fn generic_arguments(value: &Value) -> String {
    if let Some(inner) = value.get("angle_bracketed") {
        let arguments = array(&inner["args"]).chain(array(&inner["constraints"]));
        let arguments = join(arguments, ", ", generic_argument);
        return if arguments.is_empty() { arguments } else { format!("<{arguments}>") };
    }
    if let Some(inner) = value.get("parenthesized") {
        let inputs = join(array(&inner["inputs"]), ", ", type_name);
        return match &inner["output"] {
            Value::Null => format!("({inputs})"),
            output => format!("({inputs}) -> {}", type_name(output)),
        };
    }
    String::new()
}

fn generic_argument(value: &Value) -> String {
    if let Some(lifetime) = value["lifetime"].as_str() {
        return lifetime.to_owned();
    }
    if let Some(argument) = value.get("type") {
        return type_name(argument);
    }
    if let Some(constant) = value.get("const") {
        return constant["expr"].as_str().unwrap_or("?").to_owned();
    }
    // An associated type: `Item = u8` or `Item: Send`.
    let name = value["name"].as_str().unwrap_or("?");
    let binding = &value["binding"];
    if let Some(equality) = binding.get("equality") {
        return match equality.get("type") {
            Some(bound) => format!("{name} = {}", type_name(bound)),
            None => format!("{name} = ?"),
        };
    }
    format!("{name}: {}", bounds(&binding["constraint"]))
}

fn bounds(value: &Value) -> String {
    join(array(value), " + ", bound)
}

fn bound(value: &Value) -> String {
    if let Some(inner) = value.get("trait_bound") {
        let modifier = if inner["modifier"] == "maybe" { "?" } else { "" };
        let parameters = join(array(&inner["generic_params"]), ", ", parameter);
        let quantifier =
            if parameters.is_empty() { String::new() } else { format!("for<{parameters}> ") };
        return format!("{modifier}{quantifier}{}", path(&inner["trait"]));
    }
    if let Some(captured) = value.get("use") {
        let name = |argument: &Value| {
            let names = [&argument["lifetime"], &argument["param"]];
            names.iter().find_map(|name| name.as_str()).unwrap_or("?").to_owned()
        };
        return format!("use<{}>", join(array(captured), ", ", name));
    }
    value["outlives"].as_str().unwrap_or_default().to_owned()
}

fn parameter(value: &Value) -> String {
    let name = value["name"].as_str().unwrap_or("?");
    let kind = &value["kind"];
    if let Some(constant) = kind.get("const") {
        return format!("const {name}: {}", type_name(&constant["type"]));
    }
    let Some(parameter) = kind.get("type") else { return name.to_owned() };
    // The parameter of an argument of type `impl Trait`.
    if parameter["is_synthetic"] == true {
        return String::new();
    }
    let bounds = bounds(&parameter["bounds"]);
    let bounds = if bounds.is_empty() { bounds } else { format!(": {bounds}") };
    match &parameter["default"] {
        Value::Null => format!("{name}{bounds}"),
        default => format!("{name}{bounds} = {}", type_name(default)),
    }
}

/// Writes the parameters of a generic item, such as `<T: Send>`.
pub(super) fn parameters(generics: &Value) -> String {
    let parameters = join(array(&generics["params"]), ", ", parameter);
    if parameters.is_empty() { parameters } else { format!("<{parameters}>") }
}

/// Writes the where clause of a generic item, with a leading space.
pub(super) fn where_clause(generics: &Value) -> String {
    let predicates = join(array(&generics["where_predicates"]), ", ", |predicate| {
        if let Some(inner) = predicate.get("bound_predicate") {
            return format!("{}: {}", type_name(&inner["type"]), bounds(&inner["bounds"]));
        }
        if let Some(inner) = predicate.get("lifetime_predicate") {
            let lifetime = inner["lifetime"].as_str().unwrap_or("?");
            let outlives = array(&inner["outlives"]).filter_map(Value::as_str);
            return format!("{lifetime}: {}", outlives.collect::<Vec<_>>().join(" + "));
        }
        "?".to_owned()
    });
    if predicates.is_empty() { predicates } else { format!(" where {predicates}") }
}

/// Writes a function.
pub(super) fn function(name: &str, inner: &Value) -> String {
    let header = &inner["header"];
    let mut keywords = String::new();
    for (field, keyword) in
        [("is_const", "const "), ("is_async", "async "), ("is_unsafe", "unsafe ")]
    {
        if header[field] == true {
            keywords.push_str(keyword);
        }
    }
    let generics = &inner["generics"];
    let start = format!("{keywords}fn {name}{}", parameters(generics));
    signature(&start, &inner["sig"], &where_clause(generics))
}

fn signature(start: &str, signature: &Value, end: &str) -> String {
    let inputs = join(array(&signature["inputs"]), ", ", input);
    let output = match &signature["output"] {
        Value::Null => String::new(),
        output => format!(" -> {}", type_name(output)),
    };
    format!("{start}({inputs}){output}{end}")
}

fn input(value: &Value) -> String {
    let name = value[0].as_str().unwrap_or("_");
    let written = type_name(&value[1]);
    if name != "self" {
        return format!("{name}: {written}");
    }
    match written.as_str() {
        "Self" => "self".to_owned(),
        _ => match written.strip_suffix("Self") {
            Some(reference) if reference.starts_with('&') => format!("{reference}self"),
            _ => format!("self: {written}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{function, type_name};

    #[test]
    fn types_are_written_as_source() {
        let slice = json!({"borrowed_ref": {"lifetime": "'a", "is_mutable": true,
            "type": {"slice": {"primitive": "u8"}}}});
        assert_eq!(type_name(&slice), "&'a mut [u8]");
        let result = json!({"resolved_path": {"path": "crate::Result", "id": 1, "args":
            {"angle_bracketed": {"args": [{"type": {"tuple": []}}], "constraints": []}}}});
        assert_eq!(type_name(&result), "Result<()>");
        let closure = json!({"impl_trait": [{"trait_bound": {"trait": {"path": "Fn", "args":
            {"parenthesized": {"inputs": [{"primitive": "u8"}], "output": {"generic": "T"}}}},
            "generic_params": [], "modifier": "none"}}]});
        assert_eq!(type_name(&closure), "impl Fn(u8) -> T");
    }

    #[test]
    fn functions_have_their_receiver_and_bounds() {
        let send = json!({"trait_bound": {"trait": {"path": "Send", "args": null},
            "generic_params": [], "modifier": "none"}});
        let get = json!({
            "sig": {"inputs": [["self", {"borrowed_ref": {"lifetime": null, "is_mutable": false,
                "type": {"generic": "Self"}}}], ["key", {"generic": "K"}]],
                "output": {"primitive": "bool"}},
            "generics": {"params": [{"name": "K", "kind": {"type": {"bounds": [send],
                "default": null, "is_synthetic": false}}}], "where_predicates": []},
            "header": {"is_const": false, "is_async": true, "is_unsafe": false},
        });
        assert_eq!(function("get", &get), "async fn get<K: Send>(&self, key: K) -> bool");
    }
}
