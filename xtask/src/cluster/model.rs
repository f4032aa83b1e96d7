//! Model folders for SkyRL: copies of the repository's small model with a chat template.

use std::path::PathBuf;

use serde_json::json;

use crate::step::{XtaskError, root, target};

/// Files of the small model.
const FILES: [&str; 3] = ["config.json", "model.safetensors", "tokenizer.json"];
const TEMPLATE: &str = "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + \
    message.content + '<|im_end|>\\n' }}{%- endfor %}\
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}";

/// Creates a model folder. Its path is the name under which SkyRL serves the model.
pub(super) fn create(name: &str) -> Result<PathBuf, XtaskError> {
    let folder = target().join("cluster/models").join(name);
    let failed = |error: std::io::Error| {
        XtaskError::new(format!("cannot create the model {}: {error}", folder.display()))
    };
    std::fs::create_dir_all(&folder).map_err(failed)?;
    for file in FILES {
        let source = root().join("crates/engine/models/tiny").join(file);
        std::fs::copy(source, folder.join(file)).map_err(failed)?;
    }
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).map_err(failed)?;
    Ok(folder)
}
