//! Recorded command lines of the Python CLI: arguments, server responses and output.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::replay_cases::ReplayCase;

/// One recorded command line.
pub(crate) struct Capture {
    pub(crate) name: String,
    index: Value,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/cli")
}

/// Reads a file of the recordings, or returns `None` if it does not exist.
pub(crate) fn file(name: &str) -> Option<String> {
    fs::read_to_string(folder().join(name)).ok()
}

/// Returns all recordings.
pub(crate) fn all() -> Vec<Capture> {
    let index: BTreeMap<String, Value> =
        serde_json::from_str(&file("index.json").unwrap()).unwrap();
    index.into_iter().map(|(name, index)| Capture { name, index }).collect()
}

/// Returns a safetensors file that is also text: the LoRA matrices of one module, with zeros only.
fn adapter_text() -> String {
    let name = |matrix| format!("base_model.model.lm_head.lora_{matrix}.weight");
    let tensor = |start: u32| serde_json::json!({ "dtype": "F32", "shape": [1, 1], "data_offsets": [start, start + 4] });
    let header = serde_json::json!({ name("A"): tensor(0), name("B"): tensor(4) });
    // The length is 256: its bytes are ASCII, so that the file is text.
    let header = format!("{:<256}", header.to_string());
    assert_eq!(header.len(), 256);
    format!("\0\u{1}\0\0\0\0\0\0{header}\0\0\0\0\0\0\0\0")
}

impl Capture {
    /// Returns whether the command was recorded in a terminal.
    pub(crate) fn is_terminal(&self) -> bool {
        self.name.starts_with("tty-")
    }

    /// Returns the arguments, the program name first, with `--format json` added if `json` is set.
    pub(crate) fn line(&self, json: bool) -> Vec<String> {
        let args = self.index["argv"].as_array().unwrap();
        let mut args: Vec<String> =
            args.iter().map(|arg| arg.as_str().unwrap().to_owned()).collect();
        if json && !args.contains(&"json".to_owned()) {
            args.splice(1..1, ["--format".to_owned(), "json".to_owned()]);
        }
        if ReplayCase::of(&self.name).raw {
            args.push("--raw".to_owned());
        }
        args
    }

    /// Returns the standard input of the command.
    pub(crate) fn stdin(&self) -> &str {
        self.index["stdin"].as_str().unwrap_or_default()
    }

    /// Returns the scripted responses and base URL of the server, as JSON text.
    pub(crate) fn replies_text(&self) -> String {
        let name = ReplayCase::of(&self.name).responses_of.unwrap_or(&self.name);
        let default =
            format!(r#"{{"base_url":"http://127.0.0.1:18765/{name}.table","replies":[]}}"#);
        let replies = file(&format!("{name}.reply.json")).unwrap_or(default);
        if !ReplayCase::of(&self.name).valid_adapter {
            return replies;
        }
        let mut replies: Value = serde_json::from_str(&replies).unwrap();
        for reply in replies["replies"].as_array_mut().unwrap() {
            match reply["path"].as_str() {
                Some("/blob/adapter_config.json") => {
                    reply["text"] = r#"{"r": 1, "lora_alpha": 1}"#.into();
                }
                Some("/blob/adapter_model.safetensors") => reply["text"] = adapter_text().into(),
                _ => {}
            }
        }
        replies.to_string()
    }

    pub(crate) fn replies(&self) -> Value {
        serde_json::from_str(&self.replies_text()).unwrap()
    }

    /// Returns the environment variables, with `HOME` set to `home`.
    pub(crate) fn env(&self, home: &Path) -> BTreeMap<String, String> {
        let base_url = self.replies()["base_url"].as_str().unwrap().to_owned();
        let mut env = BTreeMap::from([
            ("TINKER_API_KEY".to_owned(), "tml-test-0000".to_owned()),
            ("TINKER_BASE_URL".to_owned(), base_url.clone()),
            ("HOME".to_owned(), home.to_str().unwrap().to_owned()),
            ("PATH".to_owned(), "/usr/bin:/bin".to_owned()),
        ]);
        for (name, value) in self.index["env"].as_object().into_iter().flatten() {
            match value.as_str() {
                Some(value) => {
                    let scenario = base_url.rsplit('/').next().unwrap();
                    env.insert(name.clone(), value.replace("{SCEN}", scenario));
                }
                None => drop(env.remove(name)),
            }
        }
        env
    }

    /// Creates the files that existed before the command ran.
    pub(crate) fn prepare(&self, home: &Path, work: &Path) {
        for name in self.index["files_before"].as_array().into_iter().flatten() {
            let path = work.join(name.as_str().unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "old").unwrap();
        }
        if let Some(text) = self.credentials_before() {
            fs::create_dir_all(home.join(".tinker")).unwrap();
            fs::write(home.join(".tinker/credentials.json"), text).unwrap();
        }
    }

    /// Returns the credential file before the command ran.
    pub(crate) fn credentials_before(&self) -> Option<String> {
        let before = &self.index["credentials_before"];
        let text = || before.as_str().map_or_else(|| before.to_string(), str::to_owned);
        (!before.is_null()).then(text)
    }

    /// Returns the recorded result, preferring table mode.
    fn outcome(&self) -> &Value {
        let modes = &self.index["modes"];
        ["table", "json", "tty"].iter().map(|m| &modes[m]).find(|mode| mode.is_object()).unwrap()
    }

    /// Returns the exit code of the Python CLI.
    pub(crate) fn exit(&self) -> i64 {
        self.outcome()["exit_code"].as_i64().unwrap_or(1)
    }

    pub(crate) fn requests(&self) -> Vec<Value> {
        self.outcome()["requests"].as_array().cloned().unwrap_or_default()
    }

    /// Returns the files after the command, by name, with their sizes or contents.
    pub(crate) fn files_after(&self) -> BTreeMap<String, Value> {
        let files = self.outcome()["files_after"].as_object().cloned().unwrap_or_default();
        files.into_iter().collect()
    }

    /// Returns the credential file after the command.
    pub(crate) fn credentials_after(&self) -> Option<&str> {
        self.outcome()["credentials_after"]["text"].as_str()
    }

    /// Returns the status and message of the last response other than telemetry, if it is an error.
    pub(crate) fn error_response(&self) -> Option<(u64, Option<String>)> {
        let last = self.requests();
        let last = last.iter().rev().find(|request| request["path"] != "/api/v1/telemetry")?;
        let status = last["status"].as_u64().filter(|status| *status >= 400)?;
        let replies = self.replies();
        let route = replies["replies"].as_array().unwrap().iter().find(|route| {
            last["path"].as_str().unwrap().ends_with(route["path"].as_str().unwrap())
                && route["method"] == last["method"]
        });
        let message = route.and_then(|route| {
            let detail = route["body"]["detail"].as_str().or(route["text"].as_str());
            detail.map(str::to_owned)
        });
        Some((status, message))
    }
}
