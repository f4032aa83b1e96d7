#!/usr/bin/env python3
"""Records the log-probabilities of the golden models under other configurations.

    pip install torch transformers
    python configurations.py      # writes configurations.json beside this file

Each case changes fields of a model's config.json, loads the folder with transformers, and records the
log-probability of every token of one sequence. The cases are the ones in which fields contradict each
other, have several forms, or are missing.
"""

import json
import os
import shutil
import tempfile

import torch
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
LENGTH = 120

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=500.0)
# Fields with the value None are removed.
CASES = [
    ("llama", "tied, with an unembedding of its own", dict(tie_word_embeddings=True)),
    ("llama", "both names of the rotary type", dict(rope_parameters=dict(LLAMA3, type="llama3", rope_type="llama3"))),
    ("llama", "contradicting names of the rotary type", dict(rope_parameters=dict(LINEAR, type="llama3"))),
    ("llama", "rope_scaling and rope_parameters", dict(rope_parameters=LINEAR, rope_scaling=dict(LLAMA3, type="llama3"))),
    ("llama", "older form", dict(rope_parameters=None, rope_scaling=dict(LLAMA3, rope_type="llama3"), rope_theta=700.0)),
    ("llama", "original context beside the object", dict(original_max_position_embeddings=100)),
    ("llama", "no context length", dict(max_position_embeddings=None)),
    ("llama", "ids of -1", dict(eos_token_id=-1, bos_token_id=-1)),
    ("qwen2", "linear", dict(rope_parameters=LINEAR)),
    ("qwen2", "dynamic", dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=900.0))),
    ("qwen2", "window from a later layer on", dict(use_sliding_window=True, sliding_window=8, max_window_layers=2, layer_types=None)),
    ("qwen2", "field of Llama only", dict(mlp_bias=True)),
    ("qwen3", "yarn", dict(rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64))),
    (
        "qwen3",
        "yarn with mscale",
        dict(rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.3)),
    ),
    ("qwen3", "yarn without truncation", dict(rope_scaling=dict(type="yarn", factor=8.0, truncate=False, rope_theta=2000.0))),
    ("qwen3", "no theta", dict(rope_parameters=None)),
]


def record(model, name, changes):
    with tempfile.TemporaryDirectory() as folder:
        for file in os.listdir(os.path.join(HERE, model)):
            if file.startswith("model") or file == "config.json":
                shutil.copy(os.path.join(HERE, model, file), folder)
        path = os.path.join(folder, "config.json")
        with open(path) as file:
            config = json.load(file)
        for field, value in changes.items():
            config.pop(field, None)
            if value is not None:
                config[field] = value
        with open(path, "w") as file:
            json.dump(config, file)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    vocabulary = config["vocab_size"]
    tokens = torch.tensor([(i * i + 31 * i + 7) % vocabulary for i in range(LENGTH + 1)])
    with torch.no_grad():
        logprobs = torch.log_softmax(loaded(tokens[None, :-1], use_cache=False).logits[0].float(), -1)
    logprobs = logprobs.gather(1, tokens[1:, None])[:, 0].tolist()
    return dict(model=model, name=name, changes=changes, tokens=tokens.tolist(), logprobs=logprobs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(os.path.join(HERE, "configurations.json"), "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(record(*case)) for case in CASES) + "\n]\n")
