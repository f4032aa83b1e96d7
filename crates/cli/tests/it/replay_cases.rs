//! [`ReplayCase`]: how a recording of the Python CLI is replayed, and what the command must do.
//!
//! By default a recording is replayed without a terminal and must succeed, with the recorded
//! requests, table and JSON document. Every exception is in the table [`CASES`].

use crate::capture::file;

/// How a recording is replayed, and what the command must do.
#[derive(Clone, Copy)]
pub(crate) struct ReplayCase {
    /// Name of the recording.
    pub(crate) name: &'static str,
    /// Expected exit code.
    pub(crate) exit: u8,
    /// Texts that the error message must contain.
    pub(crate) messages: &'static [&'static str],
    /// Whether the error message must contain the status and message of the last response, if that
    /// is an error.
    pub(crate) has_server_message: bool,
    pub(crate) requests: ExpectedRequests,
    /// Expected standard output without `--format json`.
    pub(crate) table: ExpectedTable,
    /// Expected standard output with `--format json`.
    pub(crate) document: ExpectedDocument,
    /// Whether the command line is invalid with `--format json`.
    pub(crate) rejects_json: bool,
    /// Whether standard input is a terminal, so that the command may ask questions.
    pub(crate) at_terminal: bool,
    pub(crate) interruption: Option<Interruption>,
    /// Recording whose server responses are used, if not its own.
    pub(crate) responses_of: Option<&'static str>,
    /// Whether the files are downloaded as the server sends them, with `--raw`. The Python CLI
    /// converts none, and the recorded adapters are placeholders.
    pub(crate) raw: bool,
    /// Whether the recorded adapter, a placeholder, is replaced by a valid one.
    pub(crate) valid_adapter: bool,
}

/// Requests that a command must send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedRequests {
    Recorded,
    /// The recorded requests to the Tinker API. Requests to the hub differ.
    SameToTinkerApi,
    None,
    Unchecked,
}

/// Table that a command must print.
#[derive(Clone, Copy)]
pub(crate) enum ExpectedTable {
    /// The recorded table. Not checked if none was recorded.
    Recorded,
    /// The table of another recording.
    Of(&'static str),
    /// The text that the function returns.
    Text(fn() -> String),
    Nothing,
    Unchecked,
}

/// JSON document that a command must print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedDocument {
    /// A document that contains the recorded one. Its content is not checked if none was recorded.
    Recorded,
    /// A document with any content.
    Any,
    Nothing,
    Unchecked,
}

/// When the user presses Ctrl-C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// When the server receives a request whose response is delayed.
    AtSlowResponse,
    /// While the command waits for an answer to its question.
    AtPrompt,
}

impl ReplayCase {
    /// Returns the case of the recording `name`.
    pub(crate) fn of(name: &str) -> &'static Self {
        const DEFAULT: &ReplayCase = &succeeds("recordings that are not in the table");
        CASES.iter().find(|case| case.name == name).unwrap_or(DEFAULT)
    }

    /// Returns the case for a replay with `--format json`.
    pub(crate) fn with_json(&self) -> Self {
        if self.rejects_json { rejected(self.name, 2, &[]) } else { *self }
    }

    const fn requests(self, requests: ExpectedRequests) -> Self {
        Self { requests, ..self }
    }

    const fn table(self, table: ExpectedTable) -> Self {
        Self { table, ..self }
    }

    const fn document(self, document: ExpectedDocument) -> Self {
        Self { document, ..self }
    }

    /// Expects the recorded result although the command fails.
    const fn printing_the_result(self) -> Self {
        self.table(ExpectedTable::Recorded).document(ExpectedDocument::Recorded)
    }

    const fn without_server_message(self) -> Self {
        Self { has_server_message: false, ..self }
    }

    const fn rejects_json(self) -> Self {
        Self { rejects_json: true, ..self }
    }

    const fn at_terminal(self) -> Self {
        Self { at_terminal: true, ..self }
    }

    const fn interrupted(self, interruption: Interruption) -> Self {
        Self { interruption: Some(interruption), ..self }
    }

    const fn raw(self) -> Self {
        Self { raw: true, ..self }
    }

    const fn with_valid_adapter(self) -> Self {
        Self { valid_adapter: true, ..self }
    }

    const fn responding_like(self, recording: &'static str) -> Self {
        Self { responses_of: Some(recording), ..self }
    }
}

/// Creates the case of a command that succeeds and behaves as recorded.
const fn succeeds(name: &'static str) -> ReplayCase {
    ReplayCase {
        name,
        exit: 0,
        messages: &[],
        has_server_message: true,
        requests: ExpectedRequests::Recorded,
        table: ExpectedTable::Recorded,
        document: ExpectedDocument::Recorded,
        rejects_json: false,
        at_terminal: false,
        interruption: None,
        responses_of: None,
        raw: false,
        valid_adapter: false,
    }
}

/// Creates the case of a command that sends the recorded requests, then fails without a result.
const fn fails(name: &'static str, exit: u8, messages: &'static [&'static str]) -> ReplayCase {
    let case = ReplayCase { exit, messages, ..succeeds(name) };
    case.table(ExpectedTable::Nothing).document(ExpectedDocument::Nothing)
}

/// Creates the case of a command that fails before it sends a request.
const fn rejected(name: &'static str, exit: u8, messages: &'static [&'static str]) -> ReplayCase {
    fails(name, exit, messages).requests(ExpectedRequests::None)
}

/// Creates the case of a command whose argument the Python CLI rejects, and we read as the name of a
/// run, which does not exist.
const fn unknown_run(name: &'static str, messages: &'static [&'static str]) -> ReplayCase {
    fails(name, 4, messages).requests(ExpectedRequests::Unchecked).without_server_message()
}

/// All exceptions from the default replay, sorted by name.
pub(crate) const CASES: &[ReplayCase] = &[
    fails("auth-credential-cmd-plain-server", 3, &["TINKER_API_KEY"]),
    fails("auth-login-401", 3, &["Invalid API key"]).without_server_message(),
    fails("auth-login-500-text", 5, &["500"]).without_server_message(),
    fails("auth-login-already", 1, &["already logged in", "auth logout"]),
    fails("auth-login-bad-json", 7, &["key_id"]),
    fails("auth-login-empty", 3, &["no API key"]),
    fails("auth-login-eof", 3, &["no API key"]),
    fails("auth-login-unreachable", 5, &["connection to http://"]),
    fails("auth-logout-corrupt-file", 1, &["credentials.json"]),
    fails(
        "auth-logout-generated-server-error",
        6,
        &["43", "Example Org", "tinker-cli-host", "/keys/43"],
    ),
    fails("auth-logout-none", 3, &["no default credential", "auth login"]),
    fails("auth-status-401", 3, &[]).printing_the_result(),
    fails("auth-status-402", 1, &[]).printing_the_result(),
    fails("auth-status-no-credentials", 3, &["TINKER_API_KEY"]).printing_the_result(),
    fails("auth-whoami-jwt-disabled", 3, &["plain API key"]),
    fails("auth-whoami-token-401", 3, &[]),
    // CSV and JSON cannot both go to standard output.
    succeeds("billing-checkpoint-storage-csv").rejects_json(),
    // We print an empty table with title and columns.
    succeeds("billing-checkpoint-storage-empty").table(ExpectedTable::Unchecked),
    fails("billing-usage-403", 3, &[]),
    rejected("billing-usage-bad-date", 2, &["monday"]),
    // CSV and JSON cannot both go to standard output.
    succeeds("billing-usage-csv").rejects_json(),
    // We print an empty table with title and columns.
    succeeds("billing-usage-empty").table(ExpectedTable::Unchecked),
    rejected("checkpoint-delete-bad-date", 2, &["yesterday"]),
    // Names of runs are accepted, so the run is searched.
    unknown_run("checkpoint-delete-bad-prefix", &["\"run-1\""]),
    rejected("checkpoint-delete-bad-structure", 2, &["tinker://run-1/0001"]),
    rejected("checkpoint-delete-bad-type", 2, &["bogus", "sampler_weights"]),
    rejected("checkpoint-delete-both", 2, &["--run-id"]),
    rejected("checkpoint-delete-filters-no-run", 2, &["--run-id"]),
    rejected("checkpoint-delete-nothing", 2, &["tinker://RUN", "--run-id"]),
    // Failed deletions are reported on standard error.
    fails("checkpoint-delete-partial-failure", 6, &["sampler_weights/final"])
        .table(ExpectedTable::Text(|| "Deleted 1 checkpoint(s)\n".to_owned()))
        .document(ExpectedDocument::Any),
    succeeds("checkpoint-delete-prompt-default").requests(ExpectedRequests::None).at_terminal(),
    rejected("checkpoint-delete-prompt-eof", 1, &["no answer"]).at_terminal(),
    succeeds("checkpoint-delete-prompt-invalid-then-y").at_terminal(),
    succeeds("checkpoint-delete-prompt-n").requests(ExpectedRequests::None).at_terminal(),
    succeeds("checkpoint-delete-prompt-y").at_terminal(),
    succeeds("checkpoint-delete-run-id").at_terminal(),
    fails("checkpoint-download-404", 4, &[]),
    unknown_run("checkpoint-download-bad-path", &["\"run-1\""]),
    fails("checkpoint-download-blob-404", 4, &[]),
    rejected("checkpoint-download-exists", 1, &["run-1_external_weights_hf", "--force"]),
    succeeds("checkpoint-download-external").raw(),
    succeeds("checkpoint-download-force").raw(),
    fails("checkpoint-download-no-files", 4, &["tinker://run-1/external_weights/hf"]),
    succeeds("checkpoint-download-output").raw(),
    // Some servers offer sampler weights for download, so the server decides.
    fails("checkpoint-download-sampler", 4, &["sampler_weights", "training checkpoint"])
        .requests(ExpectedRequests::Unchecked),
    fails("checkpoint-download-unsafe", 1, &["../../evil"]),
    rejected("checkpoint-info-bad-kind", 2, &["tinker://run-1/foo/0001"]),
    unknown_run("checkpoint-info-bad-prefix", &["\"run-1\""]),
    rejected("checkpoint-info-bad-structure", 2, &["tinker://run-1/0001"]),
    fails("checkpoint-info-not-found", 4, &["tinker://run-1/weights/9999"]),
    fails("checkpoint-info-run-404", 4, &["run-9"]),
    // An id without checkpoints may be a name, so the runs are listed too.
    succeeds("checkpoint-list-run-id-empty").requests(ExpectedRequests::Unchecked),
    // Without a terminal, cells are not truncated.
    succeeds("checkpoint-list-80col").table(ExpectedTable::Of("checkpoint-list")),
    fails("checkpoint-publish-404", 4, &[]),
    unknown_run("checkpoint-publish-bad-prefix", &["\"weights\""]),
    rejected("checkpoint-publish-bad-structure", 2, &["tinker://run-1"]),
    succeeds("checkpoint-push-hf")
        .with_valid_adapter()
        .table(ExpectedTable::Text(push_table_with_title_in_one_line)),
    // A missing revision is created first.
    fails("checkpoint-push-hf-derived-repo", 4, &[])
        .with_valid_adapter()
        .requests(ExpectedRequests::SameToTinkerApi),
    fails("checkpoint-push-hf-no-adapter", 1, &["adapter_config.json"]),
    rejected("checkpoint-push-hf-not-logged-in", 3, &["HF_TOKEN"]),
    // Sampler weights are accepted; the hub token is checked first.
    rejected("checkpoint-push-hf-sampler", 3, &["HF_TOKEN"]),
    rejected("checkpoint-set-ttl-both", 2, &["--ttl", "--remove"]),
    rejected("checkpoint-set-ttl-neither", 2, &["--ttl"]),
    fails("checkpoint-set-ttl-out-of-range", 7, &[]),
    fails("error-400", 7, &[]),
    fails("error-401", 3, &[]),
    fails("error-401-config-stage", 3, &["API key"]),
    fails("error-402-billing", 1, &[]),
    fails("error-403", 3, &[]),
    fails("error-403-config-stage", 3, &[]),
    fails("error-404", 4, &[]),
    fails("error-404-empty-body", 4, &[]),
    fails("error-404-text-body", 4, &[]),
    fails("error-408-timeout-status", 5, &["--retry-for"]),
    fails("error-409-conflict", 1, &[]),
    fails("error-410", 7, &[]),
    fails("error-418", 7, &[]),
    fails("error-422", 7, &[]),
    fails("error-429-rate-limit", 5, &["--retry-for"]),
    fails("error-500-internal", 5, &["--retry-for"]),
    fails("error-503-text-body", 5, &["--retry-for"]),
    rejected("error-bad-key-prefix", 3, &["TINKER_API_KEY", "tml-"]),
    fails("error-config-stage-500", 5, &[]),
    fails("error-connection-refused", 5, &["connection to http://", "TINKER_BASE_URL"]),
    fails("error-connection-refused-auth-status", 5, &["connection to http://"])
        .printing_the_result(),
    fails("error-connection-refused-model-list", 5, &["connection to http://"]),
    fails("error-corrupt-credentials", 1, &["credentials.json"]),
    rejected("error-no-credentials", 3, &["TINKER_API_KEY", "auth login"]),
    rejected("error-no-credentials-model-list", 3, &["TINKER_API_KEY", "auth login"]),
    fails("error-not-json", 7, &["TINKER_BASE_URL"]),
    fails("error-read-timeout", 5, &["timed out"]),
    fails("error-read-timeout-pyqwest", 5, &["timed out"]),
    fails("error-schema", 7, &["training_run_id"]),
    fails("error-sigint", 130, &["interrupted"]).interrupted(Interruption::AtSlowResponse),
    rejected("error-sigint-prompt", 130, &["interrupted"])
        .at_terminal()
        .interrupted(Interruption::AtPrompt),
    // The Python SDK starts a new round of retries although the server declines a retry.
    fails("error-x-should-retry-false", 1, &["boom"])
        .requests(ExpectedRequests::Unchecked)
        .without_server_message(),
    fails("model-list-nomatch", 4, &["zzz", "tml:organization:org-9", "model list"]),
    succeeds("run-info-odd-text").table(ExpectedTable::Text(run_table_with_literal_markup)),
    // Without a terminal, cells are not truncated.
    succeeds("run-list-80col").table(ExpectedTable::Of("run-list")),
    rejected("run-list-bad-column", 2, &["nope", "checkpoint_time"]),
    fails("session-export-trace-404", 4, &[]),
    fails("session-export-trace-blob-403", 3, &["expired"]),
    fails("session-export-trace-failed", 1, &[]),
    rejected("usage-bad-format", 2, &["yaml", "table"]),
    rejected("usage-bad-int", 2, &["abc", "--limit"]),
    rejected("usage-extra-argument", 2, &["'b'"]),
    // The Python CLI rejects the position of the option, so its recording has neither requests nor
    // a table.
    succeeds("usage-format-after-command")
        .responding_like("run-list")
        .requests(ExpectedRequests::Unchecked)
        .table(ExpectedTable::Unchecked),
    rejected("usage-group-noargs", 2, &["list"]),
    rejected("usage-missing-argument", 2, &["RUN_ID"]),
    rejected("usage-prefix-abbrev", 2, &["--lim", "--limit"]),
    rejected("usage-unknown-command", 2, &["frobnicate"]),
    rejected("usage-unknown-option", 2, &["--nope"]),
    rejected("usage-unknown-subcommand", 2, &["frob"]),
    // The Python CLI rejects the option.
    succeeds("usage-version-flag")
        .table(ExpectedTable::Unchecked)
        .document(ExpectedDocument::Unchecked),
    // The program name and version are ours.
    succeeds("version")
        .table(ExpectedTable::Text(|| format!("tinkex {}\n", env!("CARGO_PKG_VERSION")))),
];

/// Unlike the Python CLI, we print markup literally and escape control characters.
fn run_table_with_literal_markup() -> String {
    let text = file("run-info-odd-text.table.txt").unwrap();
    let text = text.replace("│ x ", "│ [red]x[/red] ");
    let text = text.replace("│ a                                    │", "│ a\\nb │");
    text.lines().filter(|line| !line.contains("│ b ")).map(|line| format!("{line}\n")).collect()
}

/// Unlike the Python CLI, we do not wrap a title that is wider than its table.
fn push_table_with_title_in_one_line() -> String {
    let text = file("checkpoint-push-hf.table.txt").unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    format!("{} {}", first.trim(), rest.trim_start())
}
