//! Starts a server on a database with arbitrary rows.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use rusqlite::Connection;
use rusqlite::types::Value;
use tempfile::TempDir;
use tinkex_server::{DropUndone, Server, ServerOptions};
use tokio::runtime::Runtime;

/// Name of the database in a data folder.
const DATABASE: &str = "metadata.sqlite";

/// Data folder of a server that has been started and stopped, and a folder for copies of it.
struct TemplateFolder {
    folder: TempDir,
    runtime: Runtime,
}

static TEMPLATE: LazyLock<TemplateFolder> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let folder = tempfile::Builder::new().prefix("tinkex-fuzz-").tempdir_in(parent);
    let folder = folder.expect("a folder");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    assert!(runtime.block_on(start_and_stop(folder.path().join("template"))));
    TemplateFolder { folder, runtime }
});

/// Starts a server with a data folder and stops it. Returns whether it started.
async fn start_and_stop(data_dir: PathBuf) -> bool {
    let mut options = ServerOptions::new(data_dir);
    options.threads = 1;
    options.drop_undone = DropUndone::Missing;
    match Server::start(options).await {
        Ok(server) => {
            server.stop().await;
            true
        }
        Err(_) => false,
    }
}

/// Adds rows and starts a server. Every line of the input is a row: the name of a table and its
/// columns, separated by tabs.
pub(crate) fn rows(input: &[u8]) {
    let Ok(input) = std::str::from_utf8(input) else { return };
    let TemplateFolder { folder, runtime } = &*TEMPLATE;
    let (template, data) = (folder.path().join("template"), folder.path().join("data"));
    let _ = std::fs::remove_dir_all(&data);
    std::fs::create_dir_all(data.join("weights")).expect("created");
    for name in [DATABASE, "payloads"] {
        std::fs::copy(template.join(name), data.join(name)).expect("copied");
    }
    let connection = Connection::open(data.join(DATABASE)).expect("opened");
    let mut added = 0;
    for line in input.lines().take(20) {
        added += usize::from(insert(&connection, line).is_ok());
    }
    drop(connection);
    if added > 0 {
        runtime.block_on(start_and_stop(data));
    }
}

/// Inserts a row into one of the tables.
fn insert(connection: &Connection, line: &str) -> rusqlite::Result<()> {
    let (table, values) = line.split_once('\t').unwrap_or((line, ""));
    let columns = match table {
        "changes" => "changes (run, seq, kind, body_payload)",
        "checkpoints" => "checkpoints (path, record)",
        "deleted" => "deleted_checkpoints (path, deleted_at)",
        "requests" => {
            "requests (id, body_payload, result_payload, result_bytes, finished_at, result_kind, \
             record, starts)"
        }
        "runs" => "runs (id, last_used, last_seq, record)",
        "samplers" => "samplers (id, record)",
        "sessions" => "sessions (id, record)",
        "usage" => "usage (hour, session, base_model, meter, count)",
        "state" => {
            let (next, clock) = values.split_once('\t').unwrap_or((values, ""));
            let sql = "UPDATE writer_state SET next_payload = ?, clock = ?";
            return connection.execute(sql, [value(next), value(clock)]).map(drop);
        }
        _ => return Err(rusqlite::Error::InvalidQuery),
    };
    let count = columns.matches(',').count() + 1;
    let mut values: Vec<Value> = values.split('\t').map(value).collect();
    values.resize(count, Value::Null);
    let marks = vec!["?"; count].join(", ");
    let sql = format!("INSERT OR REPLACE INTO {columns} VALUES ({marks})");
    connection.execute(&sql, rusqlite::params_from_iter(values)).map(drop)
}

/// Returns an integer, a text, or null for an empty text.
fn value(text: &str) -> Value {
    match text.parse() {
        Ok(number) => Value::Integer(number),
        Err(_) if text.is_empty() => Value::Null,
        Err(_) => Value::Text(text.to_owned()),
    }
}
