//! Files of the built-in model, for other programs.

use std::path::Path;

use tinkex_engine::builtin;
use tinkex_weights::write_file;

/// `tokenizer_config.json` of the built-in model.
const TOKENIZER_CONFIG: &str = r#"{
  "tokenizer_class": "PreTrainedTokenizerFast",
  "eos_token": "<|im_end|>",
  "pad_token": "<|endoftext|>",
  "model_max_length": 2048,
  "chat_template": "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
}
"#;

/// Writes the tokenizer files of the built-in model to `folder`, in the layout of Hugging Face
/// tokenizer libraries. Files that already have this content are not rewritten.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn write_tokenizer(folder: &Path) -> Result<(), tinkex_engine::Error> {
    let files: [(&str, &[u8]); 3] = [
        ("config.json", builtin::CONFIG),
        ("tokenizer.json", builtin::TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG.as_bytes()),
    ];
    for (name, content) in files {
        let path = folder.join(name);
        if std::fs::read(&path).ok().as_deref() != Some(content) {
            write_file(&path, |out| out.write_all(content))?;
        }
    }
    Ok(())
}

/// Writes the files of the built-in model to `folder`, in the layout of Hugging Face model folders.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn write_built_in_model(folder: &Path) -> Result<(), tinkex_engine::Error> {
    write_tokenizer(folder)?;
    let path = folder.join("model.safetensors");
    Ok(write_file(&path, |out| out.write_all(builtin::WEIGHTS))?)
}
