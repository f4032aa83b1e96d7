"""Checks that `tinkex import` returns adapters to the server without changing a bit.

    python imports.py BASE_URL TINKEX MODELS FOLDER

harness.py describes the arguments. For each model, an adapter that the server trained and adapters that
peft created are imported. The server must compute what peft computes, and the files that are downloaded
again must have the same values. Adapters that the server cannot compute must be refused.
"""

import os
import subprocess

import harness
from harness import (
    FOLDER,
    TINKEX,
    base_folder,
    compare,
    datum,
    difference,
    same_adapter,
    sequences,
    server_logprobs,
    tinkex,
    train,
)

import torch
from peft import LoraConfig, get_peft_model
from tinker import types
from transformers import AutoModelForCausalLM

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = ATTENTION + ["gate_proj", "up_proj", "down_proj", "lm_head"]
# Adapters that peft can create and the server can compute.
SUPPORTED = {
    "all": dict(r=8, lora_alpha=16, target_modules=ALL),
    "attention": dict(r=3, lora_alpha=7, target_modules=ATTENTION),
    "two": dict(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"]),
    "layer": dict(r=2, lora_alpha=8, target_modules=["up_proj"], layers_to_transform=[1]),
    "half": dict(r=4, lora_alpha=2.5, target_modules=ALL),
}
# Adapters that the server cannot compute, with a word of the error.
REFUSED = {
    "rslora": (dict(r=4, target_modules=ALL, use_rslora=True), "use_rslora"),
    "dora": (dict(r=4, target_modules=ATTENTION, use_dora=True), "use_dora"),
    "rank_pattern": (dict(r=4, target_modules=ATTENTION, rank_pattern={"q_proj": 2}), "rank_pattern"),
    "alpha_pattern": (dict(r=4, target_modules=ATTENTION, alpha_pattern={"q_proj": 2}), "alpha_pattern"),
    "modules_to_save": (dict(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"]), "modules_to_save"),
    "embedding": (dict(r=4, target_modules=["q_proj", "embed_tokens"]), "embed_tokens"),
    "bias": (dict(r=4, target_modules=ATTENTION, bias="lora_only"), "bias"),
}


def download(path):
    return tinkex("checkpoint", "download", path, "--output", FOLDER)["destination"]


def import_adapter(adapter, name):
    """Imports an adapter folder. Returns its paths for sampling and for training."""
    imported = tinkex("import", adapter, "--base", name)
    return imported["sampler"], imported["checkpoint"]


def created_by_peft(name, kind, settings):
    """Creates an adapter with random weights. Returns its model and its folder."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(base_folder(name), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(init_lora_weights=False, **settings)).eval()
    folder = os.path.join(FOLDER, f"{name}-{kind}")
    model.save_pretrained(folder, save_embedding_layers=False)
    return model, folder


def check_trained(service, name):
    """Imports an adapter that the server trained."""
    model = train(service, name)
    weights = model.save_weights_for_sampler("weights").result().path
    expected = server_logprobs(service.create_sampling_client(model_path=weights), name)
    adapter = download(model.save_state("state").result().path)
    sampler, checkpoint = import_adapter(adapter, name)
    found = server_logprobs(service.create_sampling_client(model_path=sampler), name)
    assert difference(found, expected) == 0.0, "the imported adapter computes other log-probabilities"
    for path in (sampler, checkpoint):
        same_adapter(adapter, download(path))


def check_created(service, name, kind, settings):
    """Imports an adapter that peft created, and trains it further."""
    model, adapter = created_by_peft(name, kind, settings)
    sampler, checkpoint = import_adapter(adapter, name)
    expected = server_logprobs(service.create_sampling_client(model_path=sampler), name)
    compare(f"{kind}, created by peft and imported", model, name, expected)
    for path in (sampler, checkpoint):
        same_adapter(adapter, download(path))

    training = service.create_training_client_from_state(checkpoint)
    data = [datum(sequences(name)[0])]
    step = training.forward_backward(data, "cross_entropy").result()
    logprobs = step.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert (logprobs == expected[0]).all(), "training starts from other weights"
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    after = training.forward(data, "cross_entropy").result()
    assert after.metrics["loss:sum"] < step.metrics["loss:sum"], "the step does not train"


def check_refused(name, kind, settings, word):
    _, adapter = created_by_peft(name, kind, settings)
    command = [TINKEX, "import", adapter, "--base", name]
    output = subprocess.run(command, capture_output=True, text=True)
    assert output.returncode != 0, f"{kind} was imported"
    assert word in output.stderr, f"the error does not name {word}: {output.stderr}"


def check_model(service, name):
    os.makedirs(FOLDER, exist_ok=True)
    check_trained(service, name)
    for kind, settings in SUPPORTED.items():
        check_created(service, name, kind, settings)
    if name == "qwen2-untied":
        for kind, (settings, word) in REFUSED.items():
            check_refused(name, kind, settings, word)


harness.run("imports", check_model)
