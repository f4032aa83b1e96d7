//! A model that has learned what to answer, with a chat template that has reasoning and tools.

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex::{AdamParams, Datum, LoraOptions, LossFn};
use tinkex_text::{ChatFormat, Message, Tokenizer};

use crate::harness::TestServer;

/// Name of the base model.
pub(crate) const BASE: &str = "org/tools";
/// Question that the model answers with two tool calls, if it has tools.
pub(crate) const WEATHER: &str = "Weather?";
pub(crate) const REASONING: &str = "I look.";
pub(crate) const CONTENT: &str = "One moment.";
/// Question that the model answers with [`RIVERS`].
pub(crate) const RIVER: &str = "Rivers?";
pub(crate) const RIVERS: &str = "Rhine, Danube and Elbe";

const FIRST_CALL: &str = "{\"city\": \"Ulm\"}";

/// ChatML with tools and reasoning, and tool calls as Qwen models write them.
const TEMPLATE: &str = r#"
{%- if tools %}{{ '<|im_start|>system\ntools: ' + (tools | length | string) + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"#;

/// A server with the model, and the name of the trained weights.
pub(crate) struct TaughtModel {
    pub(crate) server: TestServer,
    pub(crate) name: String,
    _folder: TempDir,
}

/// Returns the tools of the conversation about the weather, in the form of the OpenAI API.
pub(crate) fn tools() -> Value {
    let tool = |name: &str| {
        let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    json!([tool("weather"), tool("time")])
}

impl TaughtModel {
    /// Starts a server and trains the model.
    pub(crate) async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        tinkex_server::write_built_in_model(folder.path()).unwrap();
        let config = json!({"eos_token": "<|im_end|>", "chat_template": TEMPLATE});
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let path = folder.path().to_owned();
        let server = TestServer::with(|options| *options = options.clone().model(BASE, path)).await;
        let service = server.client();
        let model = service
            .create_lora_training_client(LoraOptions::new(BASE).rank(16).seed(1))
            .await
            .unwrap();
        let batch = data(&Tokenizer::from_folder(folder.path()).unwrap());
        let mut loss = f64::INFINITY;
        for _ in 0..200 {
            let adam = AdamParams::with_learning_rate(1e-2);
            let step = model.step(batch.clone(), LossFn::CrossEntropy, adam).await.unwrap();
            loss = step.pass.metrics["loss:sum"].as_f64();
            if loss < 0.3 {
                break;
            }
        }
        assert!(loss < 0.3, "the model has not learned its answers: {loss}");
        let name = model.save_weights_for_sampler("taught").await.unwrap().to_string();
        Self { server, name, _folder: folder }
    }
}

/// Returns what the model learns.
fn data(tokenizer: &Tokenizer) -> Vec<Datum> {
    let plain = tokenizer.chat().unwrap();
    let with_tools = plain.clone().tools(tools());
    let without_thinking = |format: &ChatFormat| format.clone().variable("enable_thinking", false);
    let call = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let calls = format!("{CONTENT}\n{}\n{}", call("weather", FIRST_CALL), call("time", "{}"));
    let forced = "<tool_call>\n{\"name\": \"weather\", \"arguments\": ";
    let completion = |format: &ChatFormat, question: &str, start: &str, answer: &str| {
        let prompt = format.render_prompt(&[Message::user(question)]).unwrap();
        let prompt = tokenizer.encode_piece(&format!("{prompt}{start}")).unwrap();
        let answer = tokenizer.encode_piece(&format!("{answer}<|im_end|>")).unwrap();
        Datum::completion(prompt, answer).unwrap()
    };
    let thinking = format!("<think>\n{REASONING}\n</think>\n\n{calls}");
    vec![
        completion(&with_tools, WEATHER, "", &thinking),
        completion(&with_tools, WEATHER, forced, &format!("{FIRST_CALL}}}\n</tool_call>")),
        completion(&without_thinking(&with_tools), WEATHER, "", &calls),
        completion(&plain, RIVER, "", RIVERS),
        completion(&without_thinking(&plain), RIVER, "", RIVERS),
    ]
}
