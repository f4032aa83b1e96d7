"""Checks that trained adapters load in peft and compute what the server computes.

    python adapters.py BASE_URL TINKEX MODELS FOLDER

harness.py describes the arguments. For each model, the official SDK trains an adapter on all modules
and saves it in every way. Each saved adapter is downloaded, loaded with peft, and compared with the
log-probabilities of the server: as an adapter, merged, and merged and loaded again by transformers.
"""

import os
import urllib.request
import warnings

import harness
from harness import FOLDER, TOLERANCE, base_folder, compare, difference, server_logprobs, tinkex, torch_logprobs, train

import tinker
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

# Smallest accepted effect of the training on a log-probability, in nats. It shows that a lost
# adapter would be noticed.
EFFECT = 0.1
# Matrices A and B of seven modules in each of two layers, and of the unembedding.
TENSORS = 2 * (7 * 2 + 1)
# peft gives this warning if the unembedding has an adapter and its weights are those of the embedding.
TIED_WARNING = "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"


def download_with_tinkex(path):
    """Downloads a checkpoint with the command line. Returns the folder."""
    return tinkex("checkpoint", "download", path, "--output", FOLDER)["destination"]


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
    folder = base_folder(name)
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
    # The connections of the SDK may be collected here, with warnings of their own. A deprecation is
    # about the code of peft or transformers, not about the adapter.
    messages = [str(warning.message) for warning in caught if warning.category is not ResourceWarning]
    messages = [message for message in messages if "deprecated" not in message]
    unexpected = [message for message in messages if not message.startswith(tuple(allowed))]
    assert not unexpected, f"peft warns about {adapter}: {unexpected}"
    stored = load_file(os.path.join(adapter, "adapter_model.safetensors"))
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert stored.keys() == loaded.keys(), f"not in both file and model: {stored.keys() ^ loaded.keys()}"
    assert len(stored) == TENSORS, sorted(stored)
    for key, tensor in stored.items():
        assert torch.equal(tensor, loaded[key]), f"{key} differs from the file"
    return model


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


harness.run("adapters", check_model)
