"""Exports models as GGUF files and writes what the server generates, for llama.py to compare.

    python greedy.py BASE_URL TINKEX MODELS FOLDER

harness.py describes the arguments. Writes FOLDER/cases.json, and the files as FOLDER/NAME-TYPE.gguf.
"""

import json
import os

import harness
from harness import FOLDER, base_folder, greedy, scored, tinkex, train

from tiny_models import TEXTS
from transformers import AutoTokenizer

CASES = {}
# Several servers share the models; each run adds its own.
if os.path.exists(os.path.join(FOLDER, "cases.json")):
    with open(os.path.join(FOLDER, "cases.json")) as file:
        CASES = json.load(file)


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
        files[dtype] = os.path.join(FOLDER, f"{name}-{dtype}.gguf")
        os.rename(os.path.join(folder, file), files[dtype])
    sampler = service.create_sampling_client(model_path=weights)
    tokenizer = AutoTokenizer.from_pretrained(base_folder(name))
    texts = [dict(text=text, ids=tokenizer.encode(text)) for text in TEXTS]
    CASES[name] = dict(
        files=files,
        greedy=greedy(sampler, name),
        sequences=scored(sampler, name),
        texts=texts,
        chat_template=tokenizer.chat_template,
    )
    with open(os.path.join(FOLDER, "cases.json"), "w") as file:
        json.dump(CASES, file)


harness.run("GGUF exports", check_model)
