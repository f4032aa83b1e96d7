"""Checks that models that `tinkex export` writes load in transformers and compute what the server computes.

    python exports.py BASE_URL TINKEX MODELS FOLDER

harness.py describes the arguments. For each model, the official SDK trains an adapter on all modules.
`tinkex export` merges it into a model in several formats, and writes it as an adapter.
"""

import filecmp
import json
import os

import harness
from harness import FOLDER, base_folder, compare, same_adapter, server_logprobs, tinkex, train

import torch
from safetensors.torch import load_file
from tiny_models import TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer

# Largest accepted difference between the server, which has unrounded weights, and an exported model
# with rounded ones, in nats. bf16 has 8 significant bits and f16 has 11.
# The largest differences that were measured are 0.14 and 0.014.
ROUNDED = {"bf16": (torch.bfloat16, 0.2), "f16": (torch.float16, 0.02)}
# Options of the exports in each precision. Weights of 100 KB are split into several files.
OPTIONS = {"bf16": ["--max-shard-size", "100KB"], "f16": []}
MESSAGES = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "12, isn't it?"}]


def export(checkpoint, name, kind, *options):
    """Exports a checkpoint. Returns the folder, whose name is new."""
    folder = os.path.join(FOLDER, f"{name}-{kind}-{len(os.listdir(FOLDER))}")
    tinkex("export", checkpoint, "--to", folder, "--format", kind, *options)
    return folder


def tensors(folder):
    """Returns all tensors of a model folder, in one file or in several with an index."""
    index = os.path.join(folder, "model.safetensors.index.json")
    files = {"model.safetensors"}
    if os.path.exists(index):
        with open(index) as file:
            files = set(json.load(file)["weight_map"].values())
    return {key: value for file in files for key, value in load_file(os.path.join(folder, file)).items()}


def load_model(folder):
    """Loads a model with transformers. Fails if a tensor is missing, unexpected or of another shape."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    problems = {key: value for key, value in info.items() if value}
    assert not problems, f"{folder}: {problems}"
    return model


def check_text_files(folder, base):
    """Checks the tokenizer, the chat template and the generation settings of an exported model."""
    ours, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(base)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    chat = [t.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) for t in (ours, theirs)]
    assert chat[0] == chat[1], chat
    assert ours.eos_token_id == theirs.eos_token_id
    assert filecmp.cmp(os.path.join(folder, "generation_config.json"), os.path.join(base, "generation_config.json"), False)
    assert os.path.exists(os.path.join(folder, "README.md")), "no model card"


def check_merged(checkpoint, name, expected):
    """Exports the merged model in each precision, and returns the tensors in f32."""
    base = base_folder(name)
    exact = export(checkpoint, name, "hf", "--dtype", "f32", "--base", base)
    compare("merged by tinkex, f32", load_model(exact), name, expected)
    check_text_files(exact, base)
    exact = tensors(exact)
    for dtype, (torch_dtype, tolerance) in ROUNDED.items():
        folder = export(checkpoint, name, "hf", "--dtype", dtype, "--base", base, *OPTIONS[dtype])
        is_split = os.path.exists(os.path.join(folder, "model.safetensors.index.json"))
        assert is_split == bool(OPTIONS[dtype]), os.listdir(folder)
        rounded = tensors(folder)
        assert rounded.keys() == exact.keys(), rounded.keys() ^ exact.keys()
        for key, value in rounded.items():
            assert value.dtype == torch_dtype, f"{key} is {value.dtype}"
            assert torch.equal(value, exact[key].to(torch_dtype)), f"{key} is not the rounded value"
        compare(f"merged by tinkex, {dtype}", load_model(folder), name, expected, tolerance)


def check_adapter(checkpoint, name, downloaded):
    """Exports the adapter, which must equal the downloaded one, imports it and exports it again."""
    first = export(checkpoint, name, "peft")
    same_adapter(downloaded, first)
    imported = tinkex("import", first, "--base", name)["sampler"]
    same_adapter(first, export(imported, name, "peft"))


def check_model(service, name):
    os.makedirs(FOLDER, exist_ok=True)
    model = train(service, name)
    state = model.save_state("state").result().path
    weights = model.save_weights_for_sampler("weights").result().path
    expected = server_logprobs(service.create_sampling_client(model_path=weights), name)
    check_merged(weights, name, expected)
    downloaded = tinkex("checkpoint", "download", state, "--output", FOLDER)["destination"]
    check_adapter(state, name, downloaded)


harness.run("exports", check_model)
