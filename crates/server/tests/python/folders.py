"""Checks that the server reads model folders as transformers reads them.

    python folders.py BASE_URL TINKEX MODELS FOLDER

MODELS is the folder that model_variants.py wrote; harness.py describes the other arguments.
"""

import harness
from harness import base_folder, compare, server_logprobs

import torch
from tinker import types
from transformers import AutoModelForCausalLM


def check_context_length(sampler):
    """Scores a sequence that fills the context."""
    tokens = [i % 100 + 3 for i in range(160)]
    assert len(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()) == len(tokens)


def check_end_tokens(sampler):
    """The end tokens of both files end a sample."""
    ids = {5, 6, 7}
    params = types.SamplingParams(max_tokens=300, temperature=2.0, seed=1)
    samples = sampler.sample(types.ModelInput.from_ints([8, 9]), 40, params).result().sequences
    ends = {sample.tokens[-1] for sample in samples if sample.stop_reason == "stop"}
    assert ends == ids, ends
    assert not any(ids & set(sample.tokens[:-1]) for sample in samples), "a sample goes on after its end"


def check_model(service, name):
    sampler = service.create_sampling_client(base_model=name)
    model = AutoModelForCausalLM.from_pretrained(base_folder(name), dtype=torch.float32).eval()
    compare("base model", model, name, server_logprobs(sampler, name))
    if name == "full-context":
        check_context_length(sampler)
    if name == "end-tokens-in-two-files":
        check_end_tokens(sampler)


harness.run("model folders", check_model)
