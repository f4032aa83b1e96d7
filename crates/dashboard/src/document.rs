//! The documents that the web page reads.
//!
//! [`documents!`] defines the types. For tests it also defines their declarations in TypeScript,
//! against which the type checker checks the scripts of the page. A test compares
//! `ui/documents.d.ts` with the declarations: a field that is renamed here changes the
//! declarations, and the type checker then rejects the scripts.
//!
//! Times are milliseconds since the Unix epoch. A number that is not finite is `None`, because JSON
//! cannot represent it.

use std::collections::BTreeMap;

use serde::Serialize;
use tinkex_runs::RunSettings;
use tinkex_wire::JsonObject;

use crate::history::MetricCurve;

/// Defines documents. `struct A: B` has the fields of `B`, too.
macro_rules! documents {
    ($(
        $(#[doc = $doc:literal])+
        $vis:vis struct $name:ident $(: $base:ident)? {
            $( $(#[doc = $field_doc:literal])* $field:ident: $type:ty, )*
        }
    )+) => {
        $(
            $(#[doc = $doc])+
            #[derive(Clone, Debug, Serialize)]
            $vis struct $name {
                $(
                    /// Fields that are on the same level of the document.
                    #[serde(flatten)]
                    $vis base: $base,
                )?
                $( $(#[doc = $field_doc])* $vis $field: $type, )*
            }

            #[cfg(test)]
            impl typescript::TypeScript for $name {
                fn type_name() -> String {
                    stringify!($name).to_owned()
                }
            }
        )+

        /// Returns the declarations of all documents in TypeScript.
        #[cfg(test)]
        fn declarations() -> String {
            let mut text = String::new();
            $(
                let base: &[&str] = &[$(stringify!($base))?];
                let fields = [$((
                    &[$($field_doc),*][..],
                    stringify!($field),
                    <$type as typescript::TypeScript>::type_name(),
                )),*];
                text += &typescript::interface(&[$($doc),+], stringify!($name), base, &fields);
            )+
            text
        }
    };
}

/// Request of a timeline: kind, sequence number, time at which it finished, seconds in the queue,
/// seconds of execution, tokens, error. A tuple instead of an object, because a timeline has
/// thousands of rows.
pub(crate) type RequestRow = (String, u64, i64, f64, f64, u64, Option<String>);

/// Token that could have been sampled: id, text, log-probability.
pub(crate) type AlternativeRow = (u32, String, Option<f32>);

/// Settings of a run: of a model on the server, or of a run folder.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum SettingsDocument {
    Server(JsonObject),
    Folder(Box<RunSettings>),
}

documents! {
    /// Description of the source.
    pub(crate) struct InfoDocument {
        /// `server` or `folders`.
        kind: &'static str,
        version: &'static str,
        models: Vec<String>,
        folders: Vec<String>,
        /// Whether metrics are recorded.
        history: bool,
        /// Whether prompts and completions are recorded.
        samples: bool,
        /// Views that the source has documents for.
        views: Vec<&'static str>,
        /// Id of the event after which the stream of changes continues.
        cursor: Option<String>,
        time: Option<i64>,
    }

    /// A run in the list of runs.
    pub(crate) struct RunDocument {
        id: String,
        name: Option<String>,
        base_model: Option<String>,
        rank: Option<u64>,
        /// `training`, `idle`, `ended` or `failed`.
        status: &'static str,
        steps: u32,
        /// Planned number of steps.
        total_steps: Option<u64>,
        /// Loss per token of the last step.
        loss: Option<f64>,
        /// Losses at equal distances.
        losses: Vec<Option<f32>>,
        tokens: u64,
        tokens_per_second: Option<f64>,
        error: Option<String>,
        /// Number of unfinished requests.
        queued: usize,
        created: Option<i64>,
        last_used: Option<i64>,
        checkpoints: usize,
        storage_bytes: Option<u64>,
        session: Option<String>,
    }

    /// All runs.
    pub(crate) struct RunListDocument {
        runs: Vec<RunDocument>,
    }

    /// A checkpoint of a run.
    pub(crate) struct CheckpointDocument {
        path: String,
        name: String,
        kind: String,
        step: Option<u64>,
        seq: Option<u64>,
        created: Option<i64>,
        expires: Option<i64>,
        size_bytes: Option<u64>,
        public: bool,
    }

    /// A run with its settings and checkpoints.
    pub(crate) struct RunDetails: RunDocument {
        settings: SettingsDocument,
        metadata: JsonObject,
        session_metadata: JsonObject,
        tags: Vec<String>,
        saved: Vec<CheckpointDocument>,
    }

    /// Points of a metric.
    pub(crate) struct CurveDocument {
        step: Vec<u32>,
        time: Vec<i64>,
        value: Vec<Option<f64>>,
        /// Mean of the values that each pair of points stands for; empty if all points are sent.
        mean: Vec<Option<f64>>,
    }

    /// Metrics of a run.
    pub(crate) struct MetricsDocument {
        metrics: BTreeMap<String, CurveDocument>,
    }

    /// Newest requests of a run.
    pub(crate) struct RequestsDocument {
        /// Names of the values of a row.
        columns: [&'static str; 7],
        training: Vec<RequestRow>,
        sampling: Vec<RequestRow>,
        /// Number of unfinished requests.
        queued: usize,
        now: i64,
    }

    /// Tokens.
    pub(crate) struct TokensDocument {
        ids: Vec<u32>,
        text: Vec<String>,
        /// Positions of special tokens.
        special: Vec<usize>,
    }

    /// A completion.
    pub(crate) struct CompletionDocument: TokensDocument {
        logprobs: Vec<Option<f32>>,
        /// Most probable tokens of each position; empty if the program did not ask for them.
        top: Vec<Vec<AlternativeRow>>,
        /// Reason for the end.
        stop: String,
        /// Advantage in the training batch that the completion came back in.
        advantage: Option<f64>,
    }

    /// A sampling request.
    pub(crate) struct SampleDocument {
        id: i64,
        time: i64,
        queued_seconds: f64,
        compute_seconds: f64,
        base_model: String,
        /// Name of the weights.
        model: Option<String>,
        /// Identifies the weights, also if they have no name.
        weights: String,
        run: Option<String>,
        session: String,
        source: String,
        prompt_tokens: u64,
        prompt: Option<TokensDocument>,
        /// Equal for equal prompts. Text: a number of 64 bits would lose digits in JavaScript.
        group: Option<String>,
        completions: Vec<CompletionDocument>,
        error: Option<String>,
    }

    /// Newest samples that match a query.
    pub(crate) struct SampleListDocument {
        samples: Vec<SampleDocument>,
        /// Whether older samples match, too.
        more: bool,
        /// Number of all samples in the log.
        total: u64,
    }

    /// A figure of `/metrics`.
    pub struct FigureDocument {
        /// Current value.
        value: u64,
        /// Description of the figure.
        help: &'static str,
    }

    /// Limits of the server.
    pub struct LimitsDocument {
        /// Bytes for each purpose.
        memory: BTreeMap<&'static str, usize>,
        /// Number of queued requests.
        queued: usize,
    }

    /// An upstream of a gateway.
    pub struct UpstreamDocument {
        /// Name of the upstream.
        name: String,
        /// Whether the upstream responds.
        up: bool,
    }

    /// Figures of the server, without the prefix of their names in `/metrics`.
    pub struct FiguresDocument {
        /// Values that only grow.
        counters: BTreeMap<&'static str, FigureDocument>,
        /// Values that grow and shrink.
        gauges: BTreeMap<&'static str, FigureDocument>,
        /// Limits of the gauges.
        limits: LimitsDocument,
        /// Upstreams of the gateway.
        upstreams: Vec<UpstreamDocument>,
        /// Memory that the process may use.
        process_bytes: Option<u64>,
        /// Free space on the disk of the data folder.
        disk_free_bytes: Option<u64>,
        /// Current time of the server.
        time: i64,
    }

    /// A request that failed.
    pub(crate) struct FailureDocument {
        run: Option<String>,
        kind: String,
        time: i64,
        error: String,
    }

    /// State of the server.
    pub(crate) struct ServerDocument {
        figures: FiguresDocument,
        errors: Vec<FailureDocument>,
    }

    /// An event of the stream of changes.
    pub(crate) struct ChangesDocument {
        /// Runs with new values.
        runs: Vec<RunDocument>,
        /// Ids of the runs that do not exist any more.
        deleted: Vec<String>,
        /// Id of the newest sample, if samples were added.
        last_sample: Option<i64>,
    }
}

impl From<MetricCurve> for CurveDocument {
    fn from(curve: MetricCurve) -> Self {
        Self { step: curve.step, time: curve.time, value: curve.value, mean: curve.mean }
    }
}

impl MetricsDocument {
    pub(crate) fn new(curves: impl IntoIterator<Item = (String, MetricCurve)>) -> Self {
        let metrics = curves.into_iter().map(|(name, curve)| (name, curve.into())).collect();
        Self { metrics }
    }
}

/// Declarations in TypeScript.
#[cfg(test)]
mod typescript {
    use std::collections::BTreeMap;
    use std::fmt::Write as _;

    use super::{AlternativeRow, JsonObject, RequestRow, SettingsDocument};

    /// A type that has a name in TypeScript.
    pub(super) trait TypeScript {
        fn type_name() -> String;
    }

    macro_rules! type_names {
        ($($name:literal: $($type:ty),+;)+) => {
            $($(impl TypeScript for $type {
                fn type_name() -> String {
                    $name.to_owned()
                }
            })+)+
        };
    }

    type_names! {
        "boolean": bool;
        "number": u32, u64, usize, i64, f32, f64;
        "string": String, &'static str;
        "Record<string, unknown>": JsonObject, SettingsDocument;
        "[string, number, number, number, number, number, string | null]": RequestRow;
        "[number, string, number | null]": AlternativeRow;
    }

    impl<T: TypeScript> TypeScript for Option<T> {
        fn type_name() -> String {
            format!("{} | null", T::type_name())
        }
    }

    impl<T: TypeScript> TypeScript for Vec<T> {
        fn type_name() -> String {
            let item = T::type_name();
            if item.contains('|') && !item.starts_with('[') {
                format!("({item})[]")
            } else {
                format!("{item}[]")
            }
        }
    }

    impl<T: TypeScript, const N: usize> TypeScript for [T; N] {
        fn type_name() -> String {
            Vec::<T>::type_name()
        }
    }

    impl<K: AsRef<str>, T: TypeScript> TypeScript for BTreeMap<K, T> {
        fn type_name() -> String {
            format!("Record<string, {}>", T::type_name())
        }
    }

    /// Formats a comment with the lines of a doc comment.
    fn comment(indent: &str, lines: &[&str]) -> String {
        let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
        if lines.is_empty() {
            return String::new();
        }
        format!("{indent}/** {} */\n", lines.join(" "))
    }

    /// Formats the declaration of a document. A field is its comment, name and type.
    pub(super) fn interface(
        doc: &[&str],
        name: &str,
        base: &[&str],
        fields: &[(&[&str], &str, String)],
    ) -> String {
        let base = base.iter().map(|base| format!(" extends {base}")).collect::<String>();
        let mut text = format!("\n{}export interface {name}{base} {{\n", comment("", doc));
        for (doc, field, type_name) in fields {
            text += &comment("  ", doc);
            writeln!(text, "  {field}: {type_name};").unwrap();
        }
        text + "}\n"
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Documents of `/ui/api/` by name.
    const NAMES: [(&str, &str); 7] = [
        ("info", "InfoDocument"),
        ("runs", "RunListDocument"),
        ("run", "RunDetails"),
        ("metrics", "MetricsDocument"),
        ("requests", "RequestsDocument"),
        ("samples", "SampleListDocument"),
        ("server", "ServerDocument"),
    ];

    #[test]
    fn the_scripts_of_the_page_are_checked_with_the_types_of_the_documents() {
        let names = NAMES.map(|(name, document)| format!("  {name}: {document};\n"));
        let expected = format!(
            "// Generated from crates/dashboard/src/document.rs, whose tests compare it.\n\
             \n/** Documents by their names in `/ui/api/`. */\nexport interface Documents {{\n{}}}\n{}",
            names.concat(),
            declarations()
        );
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("ui/documents.d.ts");
        if std::fs::read_to_string(&path).unwrap_or_default() != expected {
            let new = path.with_extension("ts.new");
            std::fs::write(&new, expected).unwrap();
            panic!(
                "{} differs from the documents: replace it by {}",
                path.display(),
                new.display()
            );
        }
    }
}
