"""Exports models as GGUF files and writes what the server generates, for llama.py to compare.

    python greedy.py BASE_URL TINKEX MODELS FOLDER

harness.py describes the arguments. Writes FOLDER/cases.json.
"""

import json
import os

import harness
from harness import FOLDER, base_folder, sequences, server_logprobs, tinkex, train

from tiny_models import TEXTS
from tinker import types
from transformers import AutoTokenizer

CASES = {}


def check_model(service, name):
    os.makedirs(FOLDER, exist_ok=True)
    # Until the texts are almost learned: then the best token is ahead of the second by more than rounding
    # changes, and the log-probabilities are not yet near zero.
    model = train(service, name, steps=10)
    weights = model.save_weights_for_sampler("weights").result().path
    files = {}
    for dtype in ("f32", "f16", "bf16", "q8_0", "q4_k_m"):
        folder = os.path.join(FOLDER, f"{name}-{dtype}")
        tinkex("export", weights, "--to", folder, "--format", "gguf", "--dtype", dtype, "--base", base_folder(name))
        [file] = [file for file in os.listdir(folder) if file.endswith(".gguf")]
        files[dtype] = os.path.join(folder, file)
    sampler = service.create_sampling_client(model_path=weights)
    params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    cases = []
    for tokens in sequences(name)[: len(TEXTS)]:
        prompt = tokens[:4]
        sequence = (
            sampler.sample(types.ModelInput.from_ints(prompt), 1, params, topk_sample_logprobs=2).result().sequences[0]
        )
        # How far the best token is ahead of the second, in nats.
        margins = [first[1] - second[1] for first, second in sequence.topk_logprobs]
        cases.append(dict(prompt=prompt, tokens=sequence.tokens, margins=margins))
    logprobs = [values.tolist() for values in server_logprobs(sampler, name)]
    tokenizer = AutoTokenizer.from_pretrained(base_folder(name))
    texts = [dict(text=text, ids=tokenizer.encode(text)) for text in TEXTS]
    CASES[name] = dict(
        files=files,
        greedy=cases,
        sequences=[dict(tokens=tokens, logprobs=values) for tokens, values in zip(sequences(name), logprobs)],
        texts=texts,
        chat_template=tokenizer.chat_template,
    )
    with open(os.path.join(FOLDER, "cases.json"), "w") as file:
        json.dump(CASES, file)


harness.run("GGUF exports", check_model)
