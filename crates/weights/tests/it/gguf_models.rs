//! Models in GGUF files, compared with the same models in Hugging Face folders.

use std::fs;
use std::path::{Path, PathBuf};

use tinkex_weights::{
    BlockFormat, DType, Error, GgufModel, GgufValue, GgufWriter, ModelConfig, ModelFolder,
    RopeScaling, gguf_tensor_name,
};

use crate::golden::{MODELS, folder};

/// A GGUF file to write, derived from a recorded model in the way of llama.cpp's converter.
struct GgufCopy {
    writer: GgufWriter,
    /// Bytes of the tensors, in the order of the writer.
    tensors: Vec<Vec<u8>>,
}

impl GgufCopy {
    fn new(model: &str) -> Self {
        let source = ModelFolder::open(folder(model)).unwrap();
        let config = source.config();
        let mut writer = GgufWriter::new();
        metadata(&mut writer, model, config);
        let mut tensors = Vec::new();
        for (name, shape) in config.tensors() {
            let mut values = source.tensor(&name).unwrap().to_f32().unwrap();
            if model == "llama" && (name.contains("q_proj") || name.contains("k_proj")) {
                values = interleave(&values, shape[1], config.head_dim);
            }
            writer.tensor(&gguf_tensor_name(&name).unwrap(), DType::F32, &shape).unwrap();
            tensors.push(values.iter().flat_map(|value| value.to_le_bytes()).collect());
        }
        if let RopeScaling::Llama3 { .. } = config.rope.scaling {
            let mut plain = config.rope.clone();
            plain.scaling = RopeScaling::None;
            let scaled = config.rope.frequencies(config.head_dim);
            let frequencies = plain.frequencies(config.head_dim);
            #[expect(clippy::cast_possible_truncation, reason = "stored as f32")]
            let factors = frequencies.iter().zip(scaled).map(|(a, b)| (a / b) as f32);
            writer.tensor("rope_freqs.weight", DType::F32, &[config.head_dim / 2]).unwrap();
            tensors.push(factors.flat_map(f32::to_le_bytes).collect());
        }
        Self { writer, tensors }
    }

    /// Writes the file to a folder and returns its path.
    fn write(&self, folder: &Path) -> PathBuf {
        let path = folder.join("model.gguf");
        self.writer.write(&path, |i, out| Ok(out.write_all(&self.tensors[i])?)).unwrap();
        path
    }
}

fn metadata(writer: &mut GgufWriter, model: &str, config: &ModelConfig) {
    let size = |value: usize| u32::try_from(value).unwrap();
    writer.metadata("general.architecture", model);
    for (key, value) in [
        ("block_count", config.layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
    ] {
        writer.metadata(format!("{model}.{key}"), size(value));
    }
    #[expect(clippy::cast_possible_truncation, reason = "stored as f32")]
    let theta = config.rope.theta as f32;
    writer
        .metadata(format!("{model}.rope.freq_base"), theta)
        .metadata(format!("{model}.attention.layer_norm_rms_epsilon"), config.norm_eps)
        .metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", "qwen2")
        .metadata("tokenizer.ggml.eos_token_id", config.eos[0])
        .metadata("tokenizer.ggml.bos_token_id", 1_u32)
        .metadata("tokenizer.ggml.add_bos_token", true)
        .metadata("tokenizer.chat_template", "{{ messages }}");
    let mut tokens: Vec<String> = (0..config.vocab_size).map(|i| format!("t{i}")).collect();
    let mut types = vec![1_i32; tokens.len()];
    for (i, text, kind) in
        [(0, "a", 1), (1, "<s>", 3), (3, "<|im_end|>", 3), (4, "tool", 4), (5, "[PAD]", 5)]
    {
        tokens[i] = text.to_owned();
        types[i] = kind;
    }
    writer
        .metadata("tokenizer.ggml.tokens", tokens)
        .metadata("tokenizer.ggml.token_type", types)
        .metadata("tokenizer.ggml.merges", vec!["t 6".to_owned(), "t 7".to_owned()]);
}

/// Reorders the rows of each head as llama.cpp's converter does.
fn interleave(values: &[f32], cols: usize, head_dim: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = values.chunks(cols).collect();
    let half = head_dim / 2;
    let mut out = Vec::with_capacity(values.len());
    for head in rows.chunks(head_dim) {
        for i in 0..half {
            out.extend(head[i]);
            out.extend(head[i + half]);
        }
    }
    out
}

#[test]
fn models_equal_models_in_folders() {
    for model in MODELS {
        let copy = tempfile::tempdir().unwrap();
        let found = GgufModel::open(GgufCopy::new(model).write(copy.path())).unwrap();
        let source = ModelFolder::open(folder(model)).unwrap();
        let got = found.config();
        let want = source.config();
        let dimensions = |config: &ModelConfig| {
            let mut config = config.clone();
            config.rope.scaling = RopeScaling::None;
            config.eos = Vec::new();
            config.bos = None;
            config
        };
        assert_eq!(dimensions(got), dimensions(want), "{model}");
        assert_eq!((&got.eos[..], got.bos), (&[want.eos[0], 3][..], Some(1)));
        let frequencies = got.rope.frequencies(got.head_dim);
        for (got, want) in frequencies.iter().zip(want.rope.frequencies(want.head_dim)) {
            assert!((got - want).abs() <= 1e-7 * want, "{model}: {got}, {want}");
        }
        for (name, _) in want.tensors() {
            let got = found.tensor(&name).unwrap();
            let want = source.tensor(&name).unwrap();
            assert!(got.has_values_of(&want).unwrap(), "{model} {name}");
            let len = got.row_len();
            let mut rows = vec![0; 4 * len * 2];
            got.read_rows(1, &mut rows).unwrap();
            let bytes: Vec<u8> =
                want.to_f32().unwrap()[len..3 * len].iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(rows, bytes, "{model} {name}");
        }
        assert!(found.warnings().is_empty(), "{:?}", found.warnings());
    }
}

#[test]
fn unsuitable_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let open = |change: &dyn Fn(&mut GgufCopy)| {
        let mut copy = GgufCopy::new("qwen2");
        change(&mut copy);
        GgufModel::open(copy.write(folder.path()))
    };
    let set = |key: &'static str, value: GgufValue| {
        move |copy: &mut GgufCopy| {
            copy.writer.metadata(key, value.clone());
        }
    };
    for (key, value, want) in [
        ("general.architecture", "gemma".into(), "architecture \"gemma\" is not supported"),
        ("general.architecture", 1_u32.into(), "general.architecture is missing"),
        ("qwen2.block_count", "two".into(), "block_count is \"two\" (string), expected an integer"),
        ("qwen2.block_count", 3_u32.into(), "blk.2.attn_norm.weight"),
        ("qwen2.expert_count", 8_u32.into(), "mixture-of-experts"),
        ("qwen2.embedding_length", 64_u32.into(), "shape"),
        ("qwen2.rope.scaling.type", "longrope".into(), "longrope"),
        ("qwen2.rope.dimension_count", 4_u32.into(), "head dimension 8"),
        (
            "qwen2.attention.head_count",
            vec![4_u32, 4].into(),
            "is an array of 2 elements of type u32, expected an integer",
        ),
        ("qwen2.attention.layer_norm_rms_epsilon", f32::NAN.into(), "rms_epsilon"),
        ("tokenizer.ggml.eos_token_id", "2".into(), "is \"2\" (string), expected a token id"),
        ("split.count", 3_u32.into(), "one of 3 parts"),
        ("qwen2.attention.causal", false.into(), "attention.causal is false"),
        ("qwen2.rope.scaling.attn_factor", 1.5_f32.into(), "expected 1 without yarn scaling"),
    ] {
        let error = open(&set(key, value)).unwrap_err();
        assert!(!matches!(error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains(want), "{key}: {error}");
    }
    let extra = open(&|copy| {
        copy.writer.tensor("blk.0.extra", DType::F32, &[1]).unwrap();
        copy.tensors.push(vec![0; 4]);
    });
    assert!(extra.unwrap().warnings()[0].contains("blk.0.extra"));
    for name in ["output.bias", "blk.1.attn_output.bias", "blk.0.ffn_up.scale"] {
        let error = open(&|copy| {
            copy.writer.tensor(name, DType::F32, &[1]).unwrap();
            copy.tensors.push(vec![0; 4]);
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("tensor {name} changes the result")), "{error}");
    }
    for kind in ["linear", "yarn"] {
        let error = open(&|copy| {
            copy.writer.tensor("rope_freqs.weight", DType::F32, &[4]).unwrap();
            copy.tensors.push([1.0_f32; 4].iter().flat_map(|value| value.to_le_bytes()).collect());
            copy.writer.metadata("qwen2.rope.scaling.type", kind);
            copy.writer.metadata("qwen2.rope.scaling.factor", 4.0_f32);
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("rope_freqs.weight and {kind} scaling")), "{error}");
    }
    let error = open(&|copy| {
        copy.writer.tensor("rope_freqs.weight", DType::F32, &[3]).unwrap();
        copy.tensors.push(vec![0; 12]);
    });
    assert!(error.unwrap_err().to_string().contains("rope_freqs.weight"));
}

/// As in a folder.
#[test]
fn tokens_that_the_model_does_not_have_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let mut copy = GgufCopy::new("qwen2");
    copy.writer
        .metadata("tokenizer.ggml.eos_token_id", 97_u32)
        .metadata("tokenizer.ggml.eot_token_id", -1_i32)
        .metadata("tokenizer.ggml.bos_token_id", u32::MAX);
    let model = GgufModel::open(copy.write(folder.path())).unwrap();
    assert_eq!((&model.config().eos[..], model.config().bos), (&[3][..], None));
    let [eos, bos] = model.warnings() else { panic!("{:?}", model.warnings()) };
    let path = folder.path().join("model.gguf");
    let want = "tokenizer.ggml.eos_token_id 97, but the model has 97 tokens; it is ignored";
    assert_eq!(*eos, format!("{} has the {want}", path.display()));
    assert!(bos.contains("tokenizer.ggml.bos_token_id 4294967295"), "{bos}");
}

#[test]
fn tokenizers_become_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut copy = GgufCopy::new("qwen3");
    let files = GgufModel::open(copy.write(folder.path())).unwrap().tokenizer_files().unwrap();
    let json: serde_json::Value = serde_json::from_str(&files.tokenizer).unwrap();
    assert_eq!(json["model"]["vocab"]["t6"], 6);
    assert_eq!(json["model"]["vocab"].get("[PAD]"), None);
    // Without these entries the `tokenizers` library would give the added tokens other ids.
    assert_eq!(json["model"]["vocab"]["<s>"], 1);
    assert_eq!(json["model"]["vocab"]["tool"], 4);
    assert_eq!(json["model"]["merges"][1], serde_json::json!(["t", "7"]));
    assert_eq!(json["added_tokens"][0]["content"], "<s>");
    assert_eq!(json["added_tokens"][2]["special"], false);
    assert_eq!(json["normalizer"]["type"], "NFC");
    assert_eq!(json["post_processor"]["special_tokens"]["<s>"]["ids"][0], 1);
    let config: serde_json::Value = serde_json::from_str(&files.config).unwrap();
    assert_eq!(config["chat_template"], "{{ messages }}");
    assert_eq!(config["bos_token"], "<s>");
    for (key, value, want) in [
        ("tokenizer.ggml.pre", "unknown-pre", "\"unknown-pre\""),
        ("tokenizer.ggml.model", "llama", "SentencePiece"),
        ("tokenizer.ggml.model", "t5", "\"t5\""),
    ] {
        copy.writer.metadata(key, value);
        let model = GgufModel::open(copy.write(folder.path())).unwrap();
        let error = model.tokenizer_files().unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn truncated_files_and_infinite_scales_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = GgufCopy::new("qwen3").write(folder.path());
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 64]).unwrap();
    let error = GgufModel::open(&path).unwrap_err().to_string();
    assert!(error.contains("truncated"), "{error}");

    let mut writer = GgufWriter::new();
    writer.tensor("x", DType::Block(BlockFormat::Q8_0), &[2, 32]).unwrap();
    writer.write(&path, |_, out| Ok(out.write_all(&[0x7C; 68])?)).unwrap();
    let file = tinkex_weights::GgufFile::open(&path).unwrap();
    let error = file.tensor("x").unwrap().read_rows(1, &mut [0; 34]).unwrap_err().to_string();
    assert!(error.contains("tensor x has a scale that is NaN or infinite"), "{error}");
}

#[test]
fn stored_bf16_rows_that_are_not_finite_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    for (bits, name) in [(0x7F80_u16, "inf"), (0xFF80, "-inf"), (0x7FC0, "NaN"), (0xFF81, "NaN")] {
        // The largest finite number is accepted.
        let numbers = [0x3F80, 0x7F7F, 0xFF7F, 0x8000, 0x3F80, bits];
        let bytes: Vec<u8> = numbers.iter().flat_map(|bits: &u16| bits.to_le_bytes()).collect();
        let mut writer = GgufWriter::new();
        writer.tensor("x", DType::Bf16, &[3, 2]).unwrap();
        writer.write(&path, |_, out| Ok(out.write_all(&bytes)?)).unwrap();
        let file = tinkex_weights::GgufFile::open(&path).unwrap();
        let tensor = file.tensor("x").unwrap();
        let mut rows = [0; 8];
        tensor.read_rows(0, &mut rows).unwrap();
        assert_eq!(rows, bytes[..8]);
        let error = tensor.read_rows(1, &mut rows).unwrap_err().to_string();
        assert!(error.contains(&format!("tensor x is {name} at index 5")), "{error}");
        assert_eq!([0, 1, 3, 4].map(|rows| tensor.end_of_rows(rows)), [0, 4, 12, 12]);
        assert_eq!(tensor.byte_len(), 12);
        assert_eq!(tensor.position().0, path);
        let offset = usize::try_from(tensor.position().1).unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[offset..offset + 12], bytes);
        // Outside of the file there is nothing to read.
        assert!(!tensor.is_cached(1 << 30));
    }
}

#[test]
fn elements_that_are_too_large_to_quantize_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let mut values = [1.0_f32; 512];
    values[300] = 1e7;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut writer = GgufWriter::new();
    writer.tensor("x", DType::F32, &[2, 256]).unwrap();
    writer.write(&path, |_, out| Ok(out.write_all(&bytes)?)).unwrap();
    let file = tinkex_weights::GgufFile::open(&path).unwrap();
    let tensor = file.tensor("x").unwrap();
    let encode = |format: BlockFormat, values: &[f32], out: &mut [u8]| format.encode(values, out);
    for format in BlockFormat::ALL {
        let mut row = vec![0; format.byte_len(256).unwrap()];
        tensor.read_rows_as(format, 0, &mut row, encode).unwrap();
        let mut decoded = [0.0; 256];
        format.decode(&row, &mut decoded);
        assert!(decoded.iter().all(|value| (value - 1.0).abs() < 0.1), "{}", format.name());
        let result =
            tensor.read_rows_as(format, 1, &mut row, encode).map_err(|error| error.to_string());
        match format {
            // The factors of the scales extend the range of f16, whose largest number is 65,504.
            BlockFormat::Q4K | BlockFormat::Q6K => result.unwrap(),
            _ => {
                let error = result.unwrap_err();
                let format = format.name();
                let want = format!("tensor x has elements that are too large for {format}");
                assert!(error.contains(&want), "{error}");
            }
        }
    }
}
