#!/usr/bin/env python3
"""Runs the workloads decodeN and loraN of benches/engine.rs with llama.cpp, through its Python bindings.

    peer_llama.py make FOLDER PRECISION FILE   converts a Hugging Face folder (Qwen3) to GGUF
    peer_llama.py quantize FROM FORMAT FILE    quantizes a GGUF file to q8_0 or q4_k (Q4_K_M)
    peer_llama.py adapter FOLDER lora FILE     writes an adapter of rank 32 (f32) for all linear layers
                                               but the unembedding
    peer_llama.py run FILE ADAPTER WORK ROUNDS prints a result in the format of benches/engine.rs

Runs without llama.cpp's sampler: numpy selects the greedy tokens.
"""

import ctypes
import json
import os
import resource
import sys
import time

import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PROMPT, TOKENS, RANK = 64, 128, 32


def make(folder, precision, path):
    import gguf

    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    kind = gguf.GGMLQuantizationType.BF16 if precision == "bf16" else gguf.GGMLQuantizationType.F32
    out = gguf.GGUFWriter(path + ".part", "qwen3")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    out.add_rope_freq_base(rope["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("none")
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if precision == "bf16" else gguf.LlamaFileType.ALL_F32)
    for name, values in tensors(os.path.join(folder, "model.safetensors")):
        if values.ndim == 1:
            out.add_tensor(name, values)
        else:
            packed = gguf.quantize(values, kind)
            out.add_tensor(name, packed, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    os.rename(path + ".part", path)


def quantize(source, format, path):
    import llama_cpp

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
                    "q4_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}[format]
    params.nthread = os.cpu_count()
    part = (path + ".part").encode()
    if llama_cpp.llama_model_quantize(source.encode(), part, ctypes.byref(params)) != 0:
        raise RuntimeError("llama_model_quantize failed")
    os.rename(path + ".part", path)


def adapter(folder, _, path):
    import gguf

    out = gguf.GGUFWriter(path + ".part", "qwen3")
    out.add_type(gguf.GGUFType.ADAPTER)
    out.add_string("adapter.type", "lora")
    out.add_float32("adapter.lora.alpha", RANK)
    random = np.random.default_rng(0)
    for name, values in tensors(os.path.join(folder, "model.safetensors")):
        if values.ndim == 2 and name.startswith("blk."):
            outputs, inputs = values.shape
            bound = 1 / np.sqrt(inputs)
            a = random.uniform(-bound, bound, (RANK, inputs)).astype(np.float32)
            out.add_tensor(name + ".lora_a", a)
            out.add_tensor(name + ".lora_b", np.zeros((outputs, RANK), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    os.rename(path + ".part", path)


def tensors(path):
    """Yields the tensors of a safetensors file with their llama.cpp names, as f32."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    raw = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    for name, about in header.items():
        if name == "__metadata__":
            continue
        start, end = about["data_offsets"]
        if about["dtype"] == "BF16":
            values = (raw[start:end].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw[start:end].view(np.float32)
        yield renamed(name), np.array(values.reshape(about["shape"]))


def renamed(name):
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def run(path, adapter, work, rounds):
    import llama_cpp

    with_adapter = work.startswith("lora")
    batch_size = int(work.removeprefix("lora" if with_adapter else "decode"))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = batch_size * (PROMPT + TOKENS)
    params.n_batch = params.n_ubatch = 512
    params.n_seq_max = batch_size
    params.n_threads = params.n_threads_batch = os.cpu_count()
    context = llama_cpp.llama_init_from_model(model, params)
    if with_adapter:
        lora = llama_cpp.llama_adapter_lora_init(model, adapter.encode())
        if not lora or llama_cpp.llama_set_adapter_lora(context, lora, 1.0) != 0:
            raise RuntimeError(f"cannot apply the adapter {adapter}")
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def step(rows):
        """Runs rows of (token, position, sequence, wanted); returns the greedy tokens of the wanted ones."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        out = []
        for i, (_, _, _, wanted) in enumerate(rows):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                out.append(int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax()))
        return out

    def decode(round_index):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        random = np.random.default_rng(round_index)
        last = []
        for sequence in range(batch_size):
            prompt = random.integers(0, vocab, PROMPT)
            last += step([(int(t), i, sequence, i == PROMPT - 1) for i, t in enumerate(prompt)])
        for i in range(TOKENS - 1):
            last = step([(token, PROMPT + i, sequence, True) for sequence, token in enumerate(last)])

    best = [float("inf"), float("inf")]
    for round_index in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        decode(round_index)
        best = [min(best[0], time.perf_counter() - wall), min(best[1], time.process_time() - cpu)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"RESULT wall={best[0]:.4f} cpu={best[1]:.4f} peak={peak:.1f}")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(*sys.argv[2:])
    elif sys.argv[1] == "quantize":
        quantize(*sys.argv[2:])
    elif sys.argv[1] == "adapter":
        adapter(*sys.argv[2:])
    else:
        run(*sys.argv[2:5], int(sys.argv[5]))
