//! Model cards: the `README.md` of an export.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;

use crate::{ExportDType, PeftConfig};

/// Facts that a model card states.
#[derive(Debug)]
pub(super) struct CardDetails {
    /// Name of the target folder.
    pub(super) name: String,
    pub(super) config: PeftConfig,
    /// Names of the adapted modules.
    pub(super) modules: Vec<String>,
    /// Folder of the base model.
    pub(super) base: Option<PathBuf>,
    /// Whether the merged model is untied although the base model is tied.
    pub(super) unties: bool,
    /// Element type of the weights, if all weights have the same type.
    pub(super) dtype: Option<ExportDType>,
    /// Rows of the table that the caller added.
    pub(super) details: Vec<(String, String)>,
}

impl CardDetails {
    /// Returns the card of a Hugging Face folder with merged weights.
    pub(super) fn merged(&self) -> String {
        let base = self.base_name();
        let mut text = self.front_matter("transformers", "finetune");
        let _ = write!(
            text,
            "\n# {}\n\n{base} with a LoRA adapter merged into its weights.\n\n{}\n",
            plain(&self.name),
            self.table(&base)
        );
        if self.unties {
            text += "\nThe base model shares one tensor between embedding and unembedding. The \
                     adapter changes only\nthe unembedding, so this model has a separate \
                     `lm_head.weight`.\n";
        }
        text += "
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = \".\"  # the folder of this file
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=\"auto\")
```

```shell
vllm serve .
```
";
        text
    }

    /// Returns the card of a PEFT folder.
    pub(super) fn adapter(&self) -> String {
        let base = self.base_name();
        let mut text = self.front_matter("peft", "adapter");
        let _ = write!(
            text,
            "\n# {}\n\nA LoRA adapter of {base}.\n\n{}\n",
            plain(&self.name),
            self.table(&base)
        );
        text += "
## Use

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained(\".\")  # the folder of this file
```
";
        text
    }

    /// Returns the card of a folder with the GGUF file `name`.
    pub(super) fn gguf(&self, name: &str) -> String {
        let base = self.base_name();
        let dtype = self.dtype.unwrap_or(ExportDType::F16);
        let mut text = self.front_matter("gguf", "finetune");
        let _ = write!(
            text,
            "\n# {}\n\n{base} with a LoRA adapter merged into its weights, as {dtype}.\n\n{}\n",
            plain(&self.name),
            self.table(&base)
        );
        let name = plain(name);
        let _ = write!(
            text,
            "\n## Use\n\n```shell\nllama-cli -m {name}\necho 'FROM ./{name}' > Modelfile && \
             ollama create my-model\n```\n"
        );
        text
    }

    /// Returns the YAML metadata of the card, which the Hugging Face hub reads.
    fn front_matter(&self, library: &str, relation: &str) -> String {
        let mut text = "---\n".to_owned();
        // The Hugging Face hub accepts only names of its repositories as `base_model`.
        if let Some(name) = self.repository() {
            let _ = writeln!(text, "base_model: {name}\nbase_model_relation: {relation}");
        }
        let _ = write!(
            text,
            "library_name: {library}\npipeline_tag: text-generation\ntags:\n- tinkex\n- lora\n---\n"
        );
        text
    }

    /// Returns the name of the base model, if it may be a repository of a hub.
    fn repository(&self) -> Option<&str> {
        let name = self.config.base_model.split(':').next().unwrap_or_default();
        let is_segment = |text: &str| {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            !text.is_empty() && !text.starts_with(['.', '-']) && text.chars().all(is_allowed)
        };
        let parts: Vec<&str> = name.split('/').collect();
        (parts.len() == 2 && parts.into_iter().all(is_segment)).then_some(name)
    }

    /// Returns the name of the base model as Markdown.
    fn base_name(&self) -> String {
        let folder = || self.base.as_ref()?.file_name().map(|name| name.to_string_lossy());
        match self.config.base_model.as_str() {
            "" => folder().map_or_else(|| "an unnamed base model".to_owned(), |name| code(&name)),
            name => code(name),
        }
    }

    fn table(&self, base: &str) -> String {
        let PeftConfig { rank, alpha, .. } = self.config;
        let suffixes: BTreeSet<&str> =
            self.modules.iter().filter_map(|module| module.rsplit('.').next()).collect();
        let suffixes = suffixes.into_iter().map(code).collect::<Vec<_>>().join(", ");
        let mut rows = vec![
            ("base model".to_owned(), base.to_owned()),
            ("adapter".to_owned(), format!("LoRA, rank {rank}, alpha {alpha}")),
            ("adapted modules".to_owned(), suffixes),
        ];
        if let Some(dtype) = self.dtype {
            rows.push(("weights".to_owned(), dtype.to_string()));
        }
        rows.extend(self.details.iter().map(|(name, value)| (plain(name), code(value))));
        rows.push(("created with".to_owned(), format!("tinkex {}", env!("CARGO_PKG_VERSION"))));
        let mut text = "| | |\n|---|---|".to_owned();
        for (name, value) in rows {
            let _ = write!(text, "\n| {name} | {value} |");
        }
        text
    }
}

/// Returns a text without characters that have a meaning in a Markdown table.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() && !"|`<>[]".contains(*c)).collect()
}

/// Returns a text as Markdown code.
fn code(text: &str) -> String {
    format!("`{}`", plain(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(base_model: &str) -> CardDetails {
        CardDetails {
            name: "out".to_owned(),
            config: PeftConfig {
                rank: 8,
                alpha: 16.0,
                base_model: base_model.to_owned(),
                target_modules: Vec::new(),
            },
            modules: vec!["model.layers.0.mlp.up_proj".to_owned(), "lm_head".to_owned()],
            base: Some("models/base".into()),
            unties: true,
            dtype: Some(ExportDType::Bf16),
            details: vec![("checkpoint".to_owned(), "tinker://run/weights/1".to_owned())],
        }
    }

    #[test]
    fn a_card_states_what_was_trained() {
        let text = card("Qwen/Qwen3-0.6B").merged();
        for part in [
            "base_model: Qwen/Qwen3-0.6B\nbase_model_relation: finetune\n",
            "# out\n\n`Qwen/Qwen3-0.6B` with a LoRA adapter",
            "| adapter | LoRA, rank 8, alpha 16 |",
            "| adapted modules | `lm_head`, `up_proj` |",
            "| weights | bf16 |",
            "| checkpoint | `tinker://run/weights/1` |",
            "separate `lm_head.weight`",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(card("Qwen/Qwen3-0.6B").adapter().contains("library_name: peft"));
    }

    #[test]
    fn names_that_are_no_repositories_cannot_change_the_metadata() {
        for name in ["/home/me/model", "x\n---\nlicense: mit", "a/b/c", "", "../x"] {
            let text = card(name).merged();
            assert!(!text.contains("base_model:"), "{text}");
            assert_eq!(text.matches("\n---\n").count(), 1, "{text}");
        }
        assert!(card("").merged().contains("`base` with"));
    }
}
