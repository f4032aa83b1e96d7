"""Writes model folders that mean the same to transformers and to the server, in many forms.

    python model_variants.py MODELS FOLDER

MODELS is the folder that tiny_models.py wrote. Each variant changes the configuration, the names or the
format of the weights, or the generation settings of one of its models.
"""

import json
import os
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file

LINEAR = dict(factor=4.0)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(factor=4.0, original_max_position_embeddings=128)
VARIANTS = {}


def variant(model):
    """Registers a function that changes the folder of a model."""

    def register(function):
        VARIANTS[function.__name__.replace("_", "-")] = (model, function)
        return function

    return register


def change(folder, file="config.json", remove=(), **settings):
    path = os.path.join(folder, file)
    with open(path) as source:
        config = json.load(source)
    config = {key: value for key, value in config.items() if key not in remove} | settings
    with open(path, "w") as out:
        json.dump(config, out)


def change_tensors(folder, function):
    path = os.path.join(folder, "model.safetensors")
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    tensors = function(tensors) or tensors
    save_file(tensors, path, metadata={"format": "pt"})


@variant("llama-untied")
def rope_parameters_with_both_types(folder):
    change(folder, rope_parameters=dict(rope_theta=10000.0, rope_type="llama3", type="llama3", **LLAMA3))


@variant("llama-untied")
def rope_scaling_with_both_types(folder):
    scaling = dict(rope_type="llama3", type="llama3", **LLAMA3)
    change(folder, remove=["rope_parameters"], rope_theta=10000.0, rope_scaling=scaling)


@variant("llama-tied")
def rope_scaling_with_the_old_type(folder):
    change(folder, remove=["rope_parameters"], rope_theta=5000.0, rope_scaling=dict(type="linear", **LINEAR))


@variant("qwen3-untied")
def rope_parameters_and_rope_scaling(folder):
    parameters = dict(rope_theta=10000.0, rope_type="default")
    change(folder, rope_parameters=parameters, rope_scaling=dict(rope_type="linear", **LINEAR))


@variant("qwen2-untied")
def yarn(folder):
    change(folder, rope_parameters=dict(rope_theta=1000000.0, rope_type="yarn", **YARN))


@variant("qwen3-tied")
def yarn_in_the_older_form(folder):
    change(folder, remove=["rope_parameters"], rope_theta=1e6, rope_scaling=dict(rope_type="yarn", **YARN))


@variant("qwen2-tied")
def no_rope_settings(folder):
    change(folder, remove=["rope_parameters"])


@variant("llama-untied")
def defaults(folder):
    """Leaves out every setting that has its default."""
    change(folder, remove=["attention_bias", "mlp_bias", "head_dim", "hidden_act", "pretraining_tp", "tie_word_embeddings"])
    change(folder, remove=["max_position_embeddings", "use_cache", "rope_parameters", "initializer_range", "dtype"])


@variant("qwen3-untied")
def ids_of_minus_one(folder):
    change(folder, pad_token_id=-1, bos_token_id=-1)


@variant("llama-untied")
def biases(folder):
    def add(tensors):
        torch.manual_seed(1)
        for key in [key for key in tensors if "proj.weight" in key]:
            tensors[key.replace("weight", "bias")] = 0.2 * torch.randn(tensors[key].shape[0])

    change(folder, attention_bias=True, mlp_bias=True)
    change_tensors(folder, add)


@variant("qwen3-tied")
def tied_with_another_unembedding(folder):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()

    change_tensors(folder, add)


@variant("qwen3-tied")
def tied_with_the_same_unembedding(folder):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(folder, add)


@variant("qwen2-untied")
def bfloat16(folder):
    change(folder, dtype="bfloat16")
    change_tensors(folder, lambda tensors: {key: value.bfloat16() for key, value in tensors.items()})


@variant("qwen2-tied")
def float16(folder):
    change(folder, remove=["dtype"], torch_dtype="float16")
    change_tensors(folder, lambda tensors: {key: value.half() for key, value in tensors.items()})


@variant("llama-tied")
def shards(folder):
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    os.remove(os.path.join(folder, "model.safetensors"))
    weight_map = {}
    for part, keys in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({key: tensors[key].clone() for key in keys}, os.path.join(folder, file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, file)
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as out:
        json.dump({"metadata": {}, "weight_map": weight_map}, out)


@variant("qwen3-untied")
def end_tokens_in_two_files(folder):
    change(folder, eos_token_id=5)
    change(folder, "generation_config.json", eos_token_id=[6, 7])


@variant("llama-untied")
def full_context(folder):
    """Is scored at exactly its context length, in the checks."""
    change(folder, max_position_embeddings=160)


def make(models, folder):
    for name, (model, function) in VARIANTS.items():
        target = os.path.join(folder, name)
        shutil.copytree(os.path.join(models, model), target)
        function(target)


if __name__ == "__main__":
    make(*sys.argv[1:3])
