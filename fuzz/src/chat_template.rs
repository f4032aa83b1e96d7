//! Compiles and renders chat templates, which come with a model.

use std::sync::LazyLock;

use tinkex_text::{ChatFormat, Message, Tokenizer};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let json = r#"{"version":"1.0","model":{"type":"WordLevel","unk_token":"?",
        "vocab":{"?":0,"hello":1,"world":2}},"pre_tokenizer":{"type":"Whitespace"},
        "added_tokens":[{"id":3,"content":"<end>","special":true,"single_word":false,
        "lstrip":false,"rstrip":false,"normalized":false}]}"#;
    Tokenizer::from_json(json).expect("a tokenizer")
});

/// Renders a conversation with a template.
pub(crate) fn render(input: &[u8]) {
    let Ok(source) = std::str::from_utf8(input) else { return };
    let Ok(format) = ChatFormat::with_template(&TOKENIZER, source) else { return };
    let messages = [
        Message::system("Be brief."),
        Message::user("Hello\nworld <end>"),
        Message::assistant("").with("tool_calls", serde_json::json!([{"name": "f", "x": [1.5]}])),
        Message::tool("{\"a\": 1}"),
        Message::assistant("<think>é</think> done"),
    ];
    let format = format.variable("enable_thinking", true).tools(["a", "b"]);
    let _ = format.render(&messages);
    let _ = format.render_prompt(&messages[..2]);
    let _ = format.stop_tokens();
    let _ = format.render_continuation(&messages);
}
