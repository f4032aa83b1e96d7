//! URLs of a server's OpenAI- and Anthropic-compatible endpoints, and a request to try them.

use std::path::Path;

use serde_json::Value;

use crate::format::shell_quote;
use crate::local::PLACEHOLDER_KEY;

/// Returns the base URL for clients of the OpenAI API.
pub(crate) fn openai_url(base_url: &str) -> String {
    format!("{base_url}/v1")
}

/// Returns the base URL for clients of the Anthropic API, which add `/v1/messages` to it.
pub(crate) fn anthropic_url(base_url: &str) -> &str {
    base_url
}

/// Returns a command that sets the variables of Tinker clients.
///
/// `key_file` contains the API key that the server requires, if it requires one. The key itself
/// must not be printed: output ends up in logs.
pub(crate) fn export_variables(base_url: &str, key_file: Option<&Path>) -> String {
    let key = key_file.map_or_else(
        || PLACEHOLDER_KEY.to_owned(),
        |file| format!("\"$(cat {})\"", shell_quote(&file.display().to_string())),
    );
    format!("export TINKER_BASE_URL={base_url} TINKER_API_KEY={key}")
}

/// Returns a `curl` command that sends a chat message to a model.
///
/// The temperature is 0, so that a small model answers sensibly, and everybody sees the same answer.
///
/// `key_file` is the file that [`export_variables`] describes.
pub(crate) fn curl_chat(
    base_url: &str,
    key_file: Option<&Path>,
    model: &str,
    message: &str,
) -> String {
    let model = Value::from(model);
    let message = Value::from(message);
    // Written as text: a JSON object would be sorted by field name.
    let messages = format!(r#"[{{"role":"user","content":{message}}}]"#);
    let body = format!(r#"{{"model":{model},"temperature":0,"messages":{messages}}}"#);
    curl(base_url, "chat/completions", key_file, &body)
}

/// Returns a `curl` command that lets a model continue a text.
pub(crate) fn curl_completion(
    base_url: &str,
    key_file: Option<&Path>,
    model: &str,
    prompt: &str,
) -> String {
    let model = Value::from(model);
    let prompt = Value::from(prompt);
    curl(base_url, "completions", key_file, &format!(r#"{{"model":{model},"prompt":{prompt}}}"#))
}

fn curl(base_url: &str, endpoint: &str, key_file: Option<&Path>, body: &str) -> String {
    let key = key_file.map(|file| {
        let quoted = shell_quote(&file.display().to_string());
        format!(" -H \"authorization: Bearer $(cat {quoted})\"")
    });
    format!(
        "curl {}/{endpoint}{} -H 'content-type: application/json' -d {}",
        openai_url(base_url),
        key.unwrap_or_default(),
        shell_quote(body),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_for_the_shell() {
        assert_eq!(
            curl_chat("http://h:1", Some(Path::new("my key")), "m", "What's up?"),
            "curl http://h:1/v1/chat/completions -H \"authorization: Bearer $(cat 'my key')\" \
             -H 'content-type: application/json' \
             -d '{\"model\":\"m\",\"temperature\":0,\
             \"messages\":[{\"role\":\"user\",\"content\":\"What'\\''s up?\"}]}'"
        );
    }
}
