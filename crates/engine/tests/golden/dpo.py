#!/usr/bin/env python3
"""Records direct preference optimization with torch, for the test of the recipe.

    pip install torch transformers peft
    python dpo.py      # writes qwen3/dpo.json and qwen3/dpo.safetensors

The reference is the recorded adapter of qwen3/ itself, as for a run that starts from a checkpoint.
The loss is that of the paper (Rafailov et al., 2023), summed over the pairs, on autograd. Everything
is computed in float32 on the CPU.

    dpo.json           pairs (tokens, and the length of the prompt), β, the parameters of Adam, and loss,
                       margin and accuracy before each step
    dpo.safetensors    grad.{tensor}: gradient of the loss after two steps;
                       adam.{tensor}: the adapter after five steps
"""

import json
import os

import torch
import torch.nn.functional as functional
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from record import adapter_tensors, logits_of

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(HERE, "qwen3")
BETA = 0.3
STEPS = 5
ADAM = dict(learning_rate=5e-4, beta1=0.9, beta2=0.95, eps=1e-8)


def load():
    base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(base, os.path.join(FOLDER, "adapter"), is_trainable=True).eval()


def pairs(vocab):
    """Returns pairs with prompts and completions of different lengths."""
    torch.manual_seed(5)
    out = []
    for prompt, chosen, rejected in [(5, 4, 6), (1, 3, 1), (8, 2, 2), (3, 7, 5), (2, 1, 4)]:
        start = torch.randint(0, vocab, (prompt,))
        completion = lambda length: torch.cat([start, torch.randint(0, vocab, (length,))])
        out.append(dict(prompt=prompt, chosen=completion(chosen), rejected=completion(rejected)))
    return out


def completion_logprob(model, tokens, prompt):
    """Returns the log-probability of the tokens after the prompt."""
    logprobs = torch.log_softmax(logits_of(model, tokens[:-1]), -1)
    logprobs = logprobs.gather(1, tokens[1:, None])[:, 0]
    return logprobs[prompt - 1 :].sum()


def rewards(model, data, reference):
    """Returns β (ln π − ln π₀) of the chosen and the rejected completions."""
    out = []
    for pair, (chosen, rejected) in zip(data, reference):
        out.append(
            (
                BETA * (completion_logprob(model, pair["chosen"], pair["prompt"]) - chosen),
                BETA * (completion_logprob(model, pair["rejected"], pair["prompt"]) - rejected),
            )
        )
    return out


def loss_of(model, data, reference):
    values = rewards(model, data, reference)
    margins = torch.stack([chosen - rejected for chosen, rejected in values])
    return -functional.logsigmoid(margins).sum(), margins


def main():
    model = load()
    data = pairs(model.config.vocab_size)
    with torch.no_grad():
        reference = [
            tuple(completion_logprob(model, pair[name], pair["prompt"]) for name in ("chosen", "rejected"))
            for pair in data
        ]
    tensors = adapter_tensors(model)
    optimizer = torch.optim.Adam(
        list(tensors.values()), lr=ADAM["learning_rate"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"]
    )
    steps, saved = [], {}
    for step in range(STEPS):
        loss, margins = loss_of(model, data, reference)
        grads = torch.autograd.grad(loss, list(tensors.values()))
        if step == 2:
            saved |= {f"grad.{name}": grad for name, grad in zip(tensors, grads)}
        for value, grad in zip(tensors.values(), grads):
            value.grad = grad
        optimizer.step()
        accuracy = (margins > 0).float().mean().item()
        steps.append(dict(loss=loss.item(), margin=margins.mean().item(), accuracy=accuracy))
    saved |= {f"adam.{name}": value.detach().clone() for name, value in tensors.items()}
    save_file({name: value.contiguous() for name, value in saved.items()}, os.path.join(FOLDER, "dpo.safetensors"))
    plain = [dict(prompt=p["prompt"], chosen=p["chosen"].tolist(), rejected=p["rejected"].tolist()) for p in data]
    with open(os.path.join(FOLDER, "dpo.json"), "w") as file:
        json.dump(dict(beta=BETA, adam=ADAM, pairs=plain, steps=steps), file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
