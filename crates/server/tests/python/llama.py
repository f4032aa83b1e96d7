"""Checks that llama.cpp loads exported GGUF files and generates what the server generates.

    python llama.py CASES

CASES is the file that greedy.py and gguf_bases.py wrote. Needs llama-cpp-python, gguf and numpy. Also
runs the Python code for llama.cpp of docs/weights.md.
"""

import ctypes
import json
import os
import re
import sys

import gguf
import llama_cpp
import numpy as np

# Largest accepted difference of a log-probability between llama.cpp and the server, in nats. A generated
# token must be the same if it is ahead of the second best token by twice that.
#
# llama.cpp rounds activations to the precision of the weights (8 bits if they are quantized), the server
# does not. With the same GGUF file as base model, both have the same weights. Measured: 6.6e-5, 0.014, 0.19,
# 0.36, 0.84.
SAME_FILE = {"f32": 1e-4, "f16": 0.02, "bf16": 0.25, "q8_0": 0.5, "q4_k_m": 1.2}
# If llama.cpp gets the same weights as f32, it does not round activations.
DEQUANTIZED = 1e-4
# With the exported checkpoint, the server has unrounded weights. Measured: 4.9e-5, 0.036, 0.33. Quantized weights
# differ too much for a comparison: by 0.7 nats in q8_0 and 7 in q4_k_m, with weights that are random.
CHECKPOINT = {"f32": 1e-4, "f16": 0.05, "bf16": 0.4}


class Model:
    """A loaded GGUF file."""

    def __init__(self, path):
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 256
        # The defaults round keys and values to f16.
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(256, 0, 1)

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def logprobs(self, tokens, position):
        """Appends tokens at a position. Returns the log-probabilities of the token after each of them."""
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = position + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = True
        assert llama_cpp.llama_decode(self.context, self.batch) == 0, "llama_decode failed"
        logits = llama_cpp.llama_get_logits(self.context)
        logits = np.ctypeslib.as_array(logits, shape=(len(tokens), self.size)).astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    def tokenize(self, text):
        raw = text.encode()
        out = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), out, len(out), False, True)
        return list(out[:count])

    def chat_template(self):
        text = llama_cpp.llama_model_chat_template(self.model, None)
        return text.decode() if text else None


def largest_difference(model, sequences):
    """Compares the log-probabilities of sequences of tokens."""
    largest = 0.0
    for sequence in sequences:
        model.clear()
        tokens = sequence["tokens"]
        logprobs = model.logprobs(tokens, 0)[np.arange(len(tokens) - 1), tokens[1:]]
        largest = max(largest, np.abs(logprobs - sequence["logprobs"]).max())
    return largest


def equal_tokens(model, case, tolerance):
    """Generates greedily. Returns the number of tokens until one differs from that of the server."""
    model.clear()
    next_tokens, position = case["prompt"], 0
    for step, token in enumerate(case["tokens"]):
        best = int(model.logprobs(next_tokens, position)[-1].argmax())
        position += len(next_tokens)
        if best != token:
            margin = case["margins"][step]
            assert margin <= 2 * tolerance, f"token {step} of {case} is {best}, and the margin is {margin} nats"
            return step
        next_tokens = [best]
    return len(case["tokens"])


def check_header(name, dtype, path):
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    assert architecture == name.split("-")[0], architecture
    if dtype == "q4_k_m" and name.endswith("-wide"):
        types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        output = "output.weight" if "output.weight" in types else "token_embd.weight"
        assert (types["blk.0.attn_q.weight"], types[output]) == ("Q4_K", "Q6_K"), types


def compare(what, model, expected, tolerance, all_tokens):
    """Compares log-probabilities and generated tokens with those of the server."""
    largest = largest_difference(model, expected["sequences"])
    equal = sum(equal_tokens(model, case, tolerance) for case in expected["greedy"])
    count = sum(len(case["tokens"]) for case in expected["greedy"])
    print(f"  {what}: {equal} of {count} tokens equal, largest difference {largest:.1e} nats", flush=True)
    assert largest <= tolerance, f"{what}: the log-probabilities differ by {largest} nats"
    assert equal == count or not all_tokens, f"{what}: the generated tokens differ"


def check_file(name, dtype, path, expected):
    check_header(name, dtype, path)
    model = Model(path)
    try:
        for case in expected["texts"]:
            assert model.tokenize(case["text"]) == case["ids"], case
        assert model.chat_template() == expected["chat_template"], model.chat_template()
        unrounded = dtype in ("f32", "f16")
        if dtype in CHECKPOINT:
            compare(f"{name} {dtype}, checkpoint", model, expected, CHECKPOINT[dtype], unrounded)
        base = expected["bases"][dtype]
        compare(f"{name} {dtype}, same file", model, base, SAME_FILE[dtype], unrounded)
    finally:
        model.close()
    if dtype not in CHECKPOINT:
        model = Model(dequantized(path))
        try:
            compare(f"{name} {dtype}, dequantized", model, base, DEQUANTIZED, True)
        finally:
            model.close()


def dequantized(path):
    """Writes a copy of a file with all tensors as f32, which the package gguf computes. Returns its path."""
    reader, copy = gguf.GGUFReader(path), path + ".f32"
    writer = gguf.GGUFWriter(copy, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *elements = field.types
            writer.add_key_value(field.name, field.contents(), kind, sub_type=elements[0] if elements else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


def check_documented_code(path):
    """Runs the code of docs/weights.md with the file `path`."""
    docs = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../docs/weights.md")
    with open(docs) as file:
        blocks = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)
    (code,) = [block for block in blocks if "from llama_cpp import" in block]
    documented = '"my-model/my-model.gguf"'
    assert documented in code, code
    names = {}
    exec(code.replace(documented, repr(path)), names)
    assert isinstance(names["answer"], str), names["answer"]
    names["model"].close()
    print(f"  the code of docs/weights.md answers {names['answer'][:20]!r}", flush=True)


def main():
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    # llama.cpp logs to standard error.
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    failed = 0
    for name, expected in cases.items():
        for dtype, path in expected["files"].items():
            try:
                check_file(name, dtype, path, expected)
            except AssertionError as failure:
                failed += 1
                print(f"  {name} {dtype}: FAILED: {failure}", flush=True)
    check_documented_code(next(iter(cases.values()))["files"]["q8_0"])
    same = sum(len(case.get("bases", {})) for case in cases.values())
    print(f"GGUF files: {failed} failed, {same} were also served as base models")
    sys.exit(1 if failed or not same else 0)


main()
