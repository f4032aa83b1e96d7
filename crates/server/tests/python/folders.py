"""Checks that the server reads model folders as transformers reads them.

    python folders.py BASE_URL TINKEX MODELS FOLDER

MODELS is the folder that model_variants.py wrote; harness.py describes the other arguments.
"""

import harness
from harness import base_folder, compare, server_logprobs

import torch
from transformers import AutoModelForCausalLM


def check_model(service, name):
    sampler = service.create_sampling_client(base_model=name)
    model = AutoModelForCausalLM.from_pretrained(base_folder(name), dtype=torch.float32).eval()
    compare("base model", model, name, server_logprobs(sampler, name))


harness.run("model folders", check_model)
