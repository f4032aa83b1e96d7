"""Checks that trained adapters load in peft and compute what the server computes.

    python adapters.py BASE_URL TINKEX MODELS FOLDER

TINKEX is the command line program, MODELS the folder that tiny_models.py wrote; the server serves
each of its models under the name of its folder. FOLDER is an empty folder for downloads.

For each model, the official SDK trains an adapter on all modules and saves it in every way. Each
saved adapter is downloaded, loaded with peft, and compared with the log-probabilities of the server:
as an adapter, merged, and merged and loaded again by transformers.
"""

import functools
import json
import os
import subprocess
import sys
import traceback
import urllib.request
import warnings

BASE_URL, TINKEX, MODELS, FOLDER = sys.argv[1:5]
os.environ["TINKER_BASE_URL"] = BASE_URL
# Replace a real key of the environment, so that it is never sent.
os.environ["TINKER_API_KEY"] = "tml-local"
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import tinker
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from tinker import types
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

from tiny_models import NAMES, TEXTS

# Largest accepted difference of a log-probability, in nats.
TOLERANCE = 2e-5
# Smallest accepted effect of the training on a log-probability, in nats. It shows that a lost
# adapter would be noticed.
EFFECT = 0.1
RANK = 4
# Matrices A and B of seven modules in each of two layers, and of the unembedding.
TENSORS = 2 * (7 * 2 + 1)
# peft gives this warning if the unembedding has an adapter and its weights are those of the embedding.
TIED_WARNING = "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"


def datum(tokens):
    tensors = {
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "weights": np.ones(len(tokens) - 1, dtype=np.float32),
    }
    tensors = {key: types.TensorData.from_numpy(value) for key, value in tensors.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


@functools.cache
def sequences(name):
    """Returns the token sequences to compare: texts, a pair of tokens, a sequence of many ids, also of
    those without a text, and a long text."""
    folder = os.path.join(MODELS, name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.encode(text) for text in TEXTS]
    ids = range(0, AutoConfig.from_pretrained(folder).vocab_size, 3)
    return texts + [texts[0][:2], list(reversed(ids)), texts[1] + texts[2] + texts[3]]


def train(service, name):
    """Trains an adapter on all modules. Returns the model."""
    model = service.create_lora_training_client(base_model=name, rank=RANK, seed=5)
    data = [datum(tokens) for tokens in sequences(name)[:4]]
    losses = []
    for _ in range(6):
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


def torch_logprobs(model, name):
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


def download_with_tinkex(path):
    """Downloads a checkpoint with the command line, which uses the Rust SDK. Returns the folder."""
    command = [TINKEX, "checkpoint", "download", path, "--output", FOLDER, "--json"]
    output = subprocess.run(command, capture_output=True, text=True)
    assert output.returncode == 0, f"{' '.join(command)}: {output.stderr}"
    return json.loads(output.stdout)["destination"]


def download_with_sdk(path):
    """Downloads external weights from the URLs that the official SDK returns. Returns the folder."""
    urls = tinker.RestClient().get_external_weights_urls(path).result().urls
    folder = os.path.join(FOLDER, path.removeprefix("tinker://").replace("/", "_") + "_urls")
    os.makedirs(folder)
    for file, url in urls.items():
        with open(os.path.join(folder, file), "wb") as out:
            out.write(urllib.request.urlopen(url).read())
    return folder


def load_base(name, untie):
    """Loads a base model. `untie` copies the weights of tied embeddings, as a user has to do before merging."""
    folder = os.path.join(MODELS, name)
    if not untie:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tie_word_embeddings=False)
    model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone()
    return model


def load_adapter(base, adapter, allowed=()):
    """Loads an adapter with peft. Fails if peft warns, or does not use each tensor of the file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base, adapter).eval()
    # The connections of the SDK may be collected here, with warnings of their own.
    messages = [str(warning.message) for warning in caught if warning.category is not ResourceWarning]
    unexpected = [message for message in messages if not message.startswith(tuple(allowed))]
    assert not unexpected, f"peft warns about {adapter}: {unexpected}"
    stored = load_file(os.path.join(adapter, "adapter_model.safetensors"))
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert stored.keys() == loaded.keys(), f"not in both file and model: {stored.keys() ^ loaded.keys()}"
    assert len(stored) == TENSORS, sorted(stored)
    for key, tensor in stored.items():
        assert torch.equal(tensor, loaded[key]), f"{key} differs from the file"
    return model


def compare(what, model, name, expected):
    found = difference(torch_logprobs(model, name), expected)
    print(f"    {what}: largest difference {found:.1e}", flush=True)
    assert found <= TOLERANCE, f"{what} differs from the server by {found} nats"


def check_adapter(how, adapter, name, expected):
    """Compares an adapter folder with the server, unmerged and merged."""
    tied = name.endswith("-tied")
    allowed = [TIED_WARNING] if tied else []
    model = load_adapter(load_base(name, False), adapter, allowed)
    compare(f"{how}, adapter", model, name, expected)
    if tied:
        model = load_adapter(load_base(name, True), adapter)
        compare(f"{how}, adapter on untied weights", model, name, expected)
    merged = model.merge_and_unload()
    compare(f"{how}, merged", merged, name, expected)
    folder = adapter + "-merged"
    merged.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    compare(f"{how}, merged and loaded", loaded, name, expected)


def check_model(service, name):
    model = train(service, name)
    state = model.save_state("state").result().path
    weights = model.save_weights_for_sampler("weights").result().path
    external = model.save_weights_external("external").result().path

    expected = server_logprobs(service.create_sampling_client(model_path=weights), name)
    base = server_logprobs(service.create_sampling_client(base_model=name), name)
    found = difference(torch_logprobs(load_base(name, False), name), base)
    assert found <= TOLERANCE, f"the base model differs by {found} nats"
    assert difference(base, expected) > EFFECT, "the training changed too little for this check"

    downloads = {
        "training state by tinkex": lambda: download_with_tinkex(state),
        "sampler weights by tinkex": lambda: download_with_tinkex(weights),
        "external weights by tinkex": lambda: download_with_tinkex(external),
        "external weights by URL": lambda: download_with_sdk(external),
    }
    failures = []
    for how, download in downloads.items():
        try:
            check_adapter(how, download(), name, expected)
        except AssertionError as failure:
            failures.append(f"{how}: {failure}")
    assert not failures, "\n" + "\n".join(failures)


def main():
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    service = tinker.ServiceClient()
    failed = 0
    for name in NAMES:
        print(f"  {name}", flush=True)
        try:
            check_model(service, name)
        except Exception:
            failed += 1
            print(f"  {name}: FAILED\n{traceback.format_exc()}", flush=True)
    print(f"adapters: {len(NAMES) - failed} of {len(NAMES)} models passed", flush=True)
    # Exit without waiting for the background threads of the SDK.
    os._exit(1 if failed else 0)


main()
