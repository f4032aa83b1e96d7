"""Trains adapters with the official SDK and compares log-probabilities, for the checks in this folder.

A program that imports this module is called with the arguments BASE_URL TINKEX MODELS FOLDER. TINKEX
is the command line program, MODELS the folder that tiny_models.py wrote; the server serves each of its
models under the name of its folder. FOLDER is a folder for results.
"""

import functools
import json
import os
import subprocess
import sys
import traceback

BASE_URL, TINKEX, MODELS, FOLDER = sys.argv[1:5]
os.environ["TINKER_BASE_URL"] = BASE_URL
# Replace a real key of the environment, so that it is never sent.
os.environ["TINKER_API_KEY"] = "tml-local"
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoConfig, AutoTokenizer, logging

from tiny_models import TEXTS

# Largest accepted difference of a log-probability, in nats.
TOLERANCE = 2e-5
RANK = 4


def datum(tokens):
    tensors = {
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "weights": np.ones(len(tokens) - 1, dtype=np.float32),
    }
    tensors = {key: types.TensorData.from_numpy(value) for key, value in tensors.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


def base_folder(name):
    return os.path.join(MODELS, name)


@functools.cache
def sequences(name):
    """Returns the token sequences to compare: texts, a pair of tokens, a sequence of many ids, also of
    those without a text, and a long text."""
    tokenizer = AutoTokenizer.from_pretrained(base_folder(name))
    texts = [tokenizer.encode(text) for text in TEXTS]
    ids = range(0, AutoConfig.from_pretrained(base_folder(name)).vocab_size, 3)
    return texts + [texts[0][:2], list(reversed(ids)), texts[1] + texts[2] + texts[3]]


def train(service, name, steps=6):
    """Trains an adapter on all modules. Returns the model."""
    model = service.create_lora_training_client(base_model=name, rank=RANK, seed=5)
    data = [datum(tokens) for tokens in sequences(name)[: len(TEXTS)]]
    losses = []
    for _ in range(steps):
        forward_backward = model.forward_backward(data, "cross_entropy")
        optim_step = model.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(forward_backward.result().metrics["loss:sum"])
        optim_step.result()
    assert losses[-1] < 0.8 * losses[0], losses
    return model


def server_logprobs(sampler, name):
    """Returns the log-probabilities of all tokens but the first, for each sequence."""
    calls = [sampler.compute_logprobs(types.ModelInput.from_ints(tokens)) for tokens in sequences(name)]
    return [np.array(call.result()[1:], dtype=np.float64) for call in calls]


def scored(sampler, name):
    """Returns the sequences of tokens with their log-probabilities, for a JSON file."""
    logprobs = server_logprobs(sampler, name)
    return [dict(tokens=tokens, logprobs=found.tolist()) for tokens, found in zip(sequences(name), logprobs)]


def greedy(sampler, name):
    """Continues the beginnings of the texts greedily, for a JSON file."""
    params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    cases = []
    for tokens in sequences(name)[: len(TEXTS)]:
        prompt = types.ModelInput.from_ints(tokens[:4])
        sequence = sampler.sample(prompt, 1, params, topk_sample_logprobs=2).result().sequences[0]
        # How far the best token is ahead of the second, in nats.
        margins = [first[1] - second[1] for first, second in sequence.topk_logprobs]
        cases.append(dict(prompt=tokens[:4], tokens=sequence.tokens, margins=margins))
    return cases


def torch_logprobs(model, name):
    """Returns the same log-probabilities, computed by torch."""
    out = []
    for tokens in sequences(name):
        tokens = torch.tensor(tokens)
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        logprobs = torch.log_softmax(logits.double(), -1)
        out.append(logprobs.gather(1, tokens[1:, None])[:, 0].numpy())
    return out


def difference(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))


def compare(what, model, name, expected, tolerance=TOLERANCE):
    """Compares the log-probabilities of a torch model with those of the server."""
    found = difference(torch_logprobs(model, name), expected)
    print(f"    {what}: largest difference {found:.1e}", flush=True)
    assert found <= tolerance, f"{what} differs from the server by {found} nats"


def same_adapter(one, other):
    """Fails if two adapter folders differ in a tensor or in a setting that changes the result."""
    files = [os.path.join(folder, "adapter_model.safetensors") for folder in (one, other)]
    one_tensors, other_tensors = (load_file(file) for file in files)
    assert one_tensors.keys() == other_tensors.keys(), one_tensors.keys() ^ other_tensors.keys()
    for key, value in one_tensors.items():
        assert value.dtype == other_tensors[key].dtype, key
        assert value.numpy().tobytes() == other_tensors[key].numpy().tobytes(), f"{key} differs"
    configs = []
    for folder in (one, other):
        with open(os.path.join(folder, "adapter_config.json")) as file:
            config = json.load(file)
        configs.append((config["r"], config["lora_alpha"], sorted(config["target_modules"])))
    assert configs[0] == configs[1], configs


def tinkex(*arguments):
    """Runs the command line, which uses the Rust SDK. Returns its result."""
    output = subprocess.run([TINKEX, *arguments, "--json"], capture_output=True, text=True)
    assert output.returncode == 0, f"tinkex {' '.join(arguments)}: {output.stderr}"
    return json.loads(output.stdout)


def run(title, check):
    """Runs `check` with a service client for each served model of MODELS. A failure does not stop the others."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    service = tinker.ServiceClient()
    served = {model.model_name for model in service.get_server_capabilities().supported_models}
    names = sorted(served.intersection(os.listdir(MODELS)))
    failed = 0
    for name in names:
        print(f"  {name}", flush=True)
        try:
            check(service, name)
        except Exception:
            failed += 1
            print(f"  {name}: FAILED\n{traceback.format_exc()}", flush=True)
    print(f"{title}: {len(names) - failed} of {len(names)} models passed", flush=True)
    # Exit without waiting for the background threads of the SDK.
    os._exit(1 if failed or not names else 0)
