// @ts-check
// Programs that send the request of the playground. The key is read from the environment.

/** @import { ChatRequest } from "./types.js" */

/** @param {unknown} value */
const json = (value) => JSON.stringify(value, null, 2);

/**
 * @param {string} origin
 * @param {ChatRequest} body
 */
function curl(origin, body) {
  return `curl ${origin}/v1/chat/completions \\
  -H "Authorization: Bearer $TINKER_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${json(body).replaceAll("'", "'\\''")}'`;
}

/**
 * Literal of a JSON value in Python, whose names of booleans and of null differ.
 * @param {unknown} value
 * @param {string} indent
 * @returns {string}
 */
function pythonLiteral(value, indent) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  const inner = `${indent}  `;
  if (Array.isArray(value)) {
    return `[\n${value.map((one) => `${inner}${pythonLiteral(one, inner)}`).join(",\n")}\n${indent}]`;
  }
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${pythonLiteral(one, inner)}`);
    return `{\n${entries.join(",\n")}\n${indent}}`;
  }
  return JSON.stringify(value);
}

/**
 * @param {string} origin
 * @param {ChatRequest} body
 */
function python(origin, body) {
  const { messages, model, ...rest } = body;
  const options = Object.entries(rest).map(([name, value]) => `    ${name}=${pythonLiteral(value, "    ")},\n`).join("");
  return `import os
from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=os.environ["TINKER_API_KEY"])
response = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=${pythonLiteral(messages, "    ")},
${options})
print(response.choices[0].message.content)
`;
}

/**
 * Converts the escapes of JSON strings to escapes of Rust, which has neither \b nor \f and writes code
 * points in braces.
 * @param {string} text
 */
function rustEscapes(text) {
  return text.replace(/\\(u[0-9a-f]{4}|.)/g, (escape, code) => {
    if (code === "b") return "\\u{8}";
    if (code === "f") return "\\u{c}";
    return code.length > 1 ? `\\u{${code.slice(1)}}` : escape;
  });
}

/**
 * @param {string} origin
 * @param {ChatRequest} body
 */
function rust(origin, body) {
  return `// Cargo.toml: reqwest = { version = "0.13", features = ["json"] }, serde_json = "1",
//             tokio = { version = "1", features = ["full"] }
#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let body = serde_json::json!(${rustEscapes(json(body)).replaceAll("\n", "\n    ")});
    let response: serde_json::Value = reqwest::Client::new()
        .post(${JSON.stringify(`${origin}/v1/chat/completions`)})
        .bearer_auth(std::env::var("TINKER_API_KEY")?)
        .json(&body)
        .send()
        .await?
        .error_for_status()?
        .json()
        .await?;
    println!("{}", response["choices"][0]["message"]["content"].as_str().unwrap_or_default());
    Ok(())
}
`;
}

/**
 * Functions that write the program, by the name of the language.
 * @type {Record<string, (origin: string, body: ChatRequest) => string>}
 */
export const SNIPPETS = { curl, Python: python, Rust: rust };
