#!/usr/bin/env python3
"""Records the golden results that the engine's tests compare with.

    pip install torch transformers peft
    python record.py              # writes llama/, qwen2/, qwen3/ and encodings.json
                                  # beside this file; reads tokenizer.json (crates/builtin-model)
    python record.py check DIR    # compares the log-probabilities that peft computes with
                                  # DIR/{model,adapter} to the recorded ones

Creates three tiny random models in Hugging Face format, one PEFT adapter each (rank 4, alpha 32, A
and B both random), and records the results of torch: logits, log-probabilities, losses, the
gradient of every loss with respect to every adapter tensor, ten optimizer steps, and greedy
completions. Everything is computed in float32 on the CPU. The losses and optimizers are implemented
here independently of the engine, on autograd.

Layout of a model's folder:

    config.json, model*.safetensors[, model.safetensors.index.json]   the model
    adapter/                                                         the adapter, saved by peft
    expected.json          inputs and small results
    expected.safetensors   large results:
        logits.base.{i}  logits.adapter.{i}      logits of sequence i, (tokens, vocabulary)
        grad.{loss}.{tensor}                     gradient of the summed loss, by PEFT tensor name
        adam.{tensor}  dimuon.{tensor}           the adapter after ten steps
"""

import copy
import json
import math
import os
import shutil
import sys

import torch
import torch.nn.functional as functional
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "..", "autodiff", "tests", "golden"))
from graphs import trace  # noqa: E402

RANK, ALPHA = 4, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
STEPS = 10
ADAM = dict(learning_rate=2e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
DIMUON = dict(learning_rate=2e-3, beta1=0.9, grad_clip_norm=1.0)


def models():
    """Yields the name of each model, the model, and the arguments for saving it."""
    torch.manual_seed(11)
    shared = dict(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    llama = LlamaConfig(
        vocab_size=131,
        hidden_size=40,
        intermediate_size=72,
        head_dim=10,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        **shared,
    )
    qwen2 = Qwen2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=56,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        **shared,
    )
    qwen3 = Qwen3Config(
        vocab_size=113,
        hidden_size=36,
        intermediate_size=64,
        head_dim=16,  # all heads together are wider than the hidden state, as in Qwen3-0.6B
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_theta=1000000.0,
        **shared,
    )
    yield "llama", randomise(LlamaForCausalLM(llama)), dict()
    # Weights that are exact in bfloat16, stored as bfloat16 in several files.
    yield "qwen2", randomise(Qwen2ForCausalLM(qwen2), torch.bfloat16), dict(max_shard_size="20KB")
    yield "qwen3", randomise(Qwen3ForCausalLM(qwen3)), dict()


def randomise(model, dtype=torch.float32):
    """Replaces all weights by random values that `dtype` represents exactly, and returns the model.

    The scales keep activations and gradients near 1, so that the tests compare significant digits.
    """
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif name.endswith("bias"):
                value.copy_(0.2 * torch.randn_like(value))
            elif "embed_tokens" in name or "lm_head" in name:
                value.copy_(0.5 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) / math.sqrt(value.shape[1]))
            value.copy_(value.to(dtype).to(torch.float32))
    return model.eval()


def adapt(model):
    """Returns the model with an adapter on all target modules, whose A and B are both random.

    A new PEFT adapter has B = 0, which would make its outputs and the gradients of A zero.
    """
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, bias="none", lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_A" in name:
                value.copy_(torch.randn_like(value) / math.sqrt(value.shape[1]))
            elif "lora_B" in name:
                # alpha / r = 8, so this scale changes the result without dominating the base model.
                value.copy_(0.02 * torch.randn_like(value))
    return model


def adapter_tensors(model):
    """Returns the trained parameters by their names in a PEFT file."""
    return {
        name.replace(".default.weight", ".weight"): value
        for name, value in model.named_parameters()
        if "lora_" in name
    }


def data(vocab):
    """Returns three data of different lengths, with the inputs of all losses.

    Per position of the sequence:

        input, target         the token and the next one
        weights, advantages   zero in the first third, like those of a prompt
        mask                  0 in the first third, 1 elsewhere
        noise                 difference between the sampling log-probabilities and the adapter's;
                              `record` replaces it by `logprobs`
        targets2, weights2    three targets per position and their weights
        slope                 gradient of the surrogate loss with respect to the log-probability
    """
    out = []
    for length in (17, 9, 1):
        tokens = torch.randint(0, vocab, (length + 1,))
        prompt_length = length // 3
        weights = torch.rand(length).mul(1.5).sub(0.25)
        weights[:prompt_length] = 0.0
        advantages = torch.randn(length)
        advantages[:prompt_length] = 0.0
        mask = torch.ones(length)
        mask[:prompt_length] = 0.0
        out.append(
            dict(
                input=tokens[:-1],
                target=tokens[1:],
                weights=weights,
                advantages=advantages,
                mask=mask,
                noise=torch.randn(length) * 0.35,
                targets2=torch.randint(0, vocab, (length, 3)),
                weights2=torch.rand(length, 3) - 0.3,
                slope=0.5 * advantages - weights,
            )
        )
    return out


def logits_of(model, tokens):
    """Returns the logits after every token of a sequence, of shape (tokens, vocabulary)."""
    return model(tokens[None], use_cache=False).logits[0].float()


def all_logprobs_of(model, datum):
    """Returns the log-probability of every token of the vocabulary at every position."""
    return torch.log_softmax(logits_of(model, datum["input"]), -1)


def target_logprobs_of(all_logprobs, datum):
    """Returns the log-probability of the target at every position."""
    return all_logprobs.gather(1, datum["target"][:, None])[:, 0]


# Losses and their configurations, in the format of the API. `cross_entropy_targets` and
# `custom_targets` have several targets per position.
LOSS_CONFIGS = {
    "cross_entropy": {},
    "cross_entropy_targets": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "surrogate": {},
    "custom": {},
    "custom_targets": {},
}

# Custom losses that are traced. The names of the parameters are recorded with the graph: `q` are the
# sampling log-probabilities, `a` the advantages, `w` the weights.
TRACED = {
    "custom": lambda logprobs, q, a: (
        -(torch.exp((logprobs - q).clamp(-0.3, 0.3)) * a).sum()
        + 0.1 * functional.softplus(logprobs - q).mean()
        + 0.05 * logprobs.logsumexp(0)
    ),
    "custom_targets": lambda logprobs, w: (
        -(functional.softmax(logprobs, dim=-1) * w * logprobs).sum() + functional.gelu(logprobs).mean()
    ),
}


def loss_of(name, model, datum):
    """Returns the loss of one datum, summed over its positions."""
    all_logprobs = all_logprobs_of(model, datum)
    logprobs = target_logprobs_of(all_logprobs, datum)
    advantages = datum["advantages"]
    config = LOSS_CONFIGS[name]
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    if name == "cross_entropy":
        return -(datum["weights"] * logprobs).sum()
    if name == "cross_entropy_targets":
        return -(datum["weights2"] * all_logprobs.gather(1, datum["targets2"])).sum()
    sampling_logprobs = datum["logprobs"]
    ratio = torch.exp(logprobs - sampling_logprobs)
    if name == "surrogate":
        # The surrogate that a client sends for a custom loss: its gradient with respect to every
        # log-probability, held fixed.
        return (datum["slope"] * logprobs).sum()
    if name == "custom":
        return TRACED[name](logprobs, sampling_logprobs, advantages)
    if name == "custom_targets":
        return TRACED[name](all_logprobs.gather(1, datum["targets2"]), datum["weights2"])
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        return -clipped_objective(ratio, advantages, low, high)
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * logprobs * advantages).sum()
    if name == "dro":
        return -(logprobs * advantages - config["beta"] / 2 * (logprobs - sampling_logprobs) ** 2).sum()
    if name == "gspo":
        mask = datum["mask"]
        # The ratio of the sequence: the geometric mean over the unmasked positions.
        sequence_ratio = torch.exp((mask * (logprobs.detach() - sampling_logprobs)).sum() / mask.sum())
        # The factor is 1; it gives each position the gradient of its own log-probability.
        ratios = sequence_ratio * torch.exp(logprobs - logprobs.detach())
        return -clipped_objective(ratios, advantages, low, high)
    raise ValueError(name)


def clipped_objective(ratio, advantages, low, high):
    """Returns the clipped objective of PPO, summed over the positions."""
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def gradient(name, model, batch):
    """Returns the loss of a batch, and its gradient with respect to every adapter tensor by name."""
    tensors = adapter_tensors(model)
    loss = sum(loss_of(name, model, datum) for datum in batch)
    grads = torch.autograd.grad(loss, list(tensors.values()))
    return loss.item(), dict(zip(tensors, grads))


def clip(grads, max_norm):
    """Returns the norm of all gradients together, and the gradients scaled to at most `max_norm`.

    A `max_norm` of 0 disables clipping. 1e-6 is the constant of `torch.nn.utils.clip_grad_norm_`.
    """
    norm = math.sqrt(sum(float(grad.double().pow(2).sum()) for grad in grads.values()))
    scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    return norm, {name: grad * scale for name, grad in grads.items()}


def adam_steps(model, batch):
    """Takes the steps of Adam in place. Returns the loss and the gradient norm before each step."""
    tensors = adapter_tensors(model)
    optimizer = torch.optim.AdamW(
        list(tensors.values()),
        lr=ADAM["learning_rate"],
        betas=(ADAM["beta1"], ADAM["beta2"]),
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )
    log = []
    for _ in range(STEPS):
        loss, grads = gradient("cross_entropy", model, batch)
        norm, grads = clip(grads, ADAM["grad_clip_norm"])
        for name, value in tensors.items():
            value.grad = grads[name]
        optimizer.step()
        log.append(dict(loss=loss, grad_norm=norm))
    return log


def dimuon_direction(momentum):
    """Returns the direction of a Dimuon step for one matrix.

    Divides every element by the geometric mean of the root mean squares of its row and column,
    orthogonalizes the result with five Newton-Schulz iterations, and scales it to the Frobenius norm
    √rank. Rows and columns near zero count as a tenth of the root mean square of the matrix, so that
    the division does not amplify them without limit.
    """
    mean_square = momentum.pow(2).mean()
    if mean_square == 0:
        return torch.zeros_like(momentum)
    row_mean_square = momentum.pow(2).mean(1, keepdim=True) + 0.01 * mean_square
    column_mean_square = momentum.pow(2).mean(0, keepdim=True) + 0.01 * mean_square
    balanced = momentum / (row_mean_square * column_mean_square) ** 0.25
    # The iteration multiplies by `x @ x.T`, which is smaller if the matrix is wide.
    is_tall = balanced.shape[0] > balanced.shape[1]
    x = balanced.T if is_tall else balanced
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    orthogonal = x.T if is_tall else x
    return orthogonal * math.sqrt(RANK) / (orthogonal.norm() + 1e-12)


def dimuon_steps(model, batch):
    """Takes the steps of Dimuon in place. Returns the loss and the gradient norm before each step."""
    tensors = adapter_tensors(model)
    momentum = {name: torch.zeros_like(value) for name, value in tensors.items()}
    log = []
    for _ in range(STEPS):
        loss, grads = gradient("cross_entropy", model, batch)
        norm, grads = clip(grads, DIMUON["grad_clip_norm"])
        with torch.no_grad():
            for name, value in tensors.items():
                momentum[name] = DIMUON["beta1"] * momentum[name] + (1 - DIMUON["beta1"]) * grads[name]
                value -= DIMUON["learning_rate"] * dimuon_direction(momentum[name])
        log.append(dict(loss=loss, grad_norm=norm))
    return log


def greedy(model, prompt, count):
    """Returns `count` greedy tokens after a prompt, and their log-probabilities.

    Fails if two logits are so close that rounding could exchange them.
    """
    tokens, logprobs, margin = list(prompt), [], math.inf
    for _ in range(count):
        row = logits_of(model, torch.tensor(tokens))[-1]
        best = torch.topk(row, 2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
        logprobs.append(torch.log_softmax(row, -1)[tokens[-1]].item())
    assert margin > 1e-3, f"the two highest logits differ by only {margin}; the greedy token is not robust"
    return dict(prompt=list(prompt), tokens=tokens[len(prompt) :], logprobs=logprobs)


def record(name, model, save_arguments):
    """Writes the folder of one model: the model, its adapter, and all expected results."""
    folder = os.path.join(HERE, name)
    shutil.rmtree(folder, ignore_errors=True)
    dtype = torch.bfloat16 if name == "qwen2" else torch.float32
    # Convert a copy: the conversion would round the rotary frequencies of the original.
    copy.deepcopy(model).to(dtype).save_pretrained(folder, **save_arguments)
    remove(os.path.join(folder, "generation_config.json"))

    batch = data(model.config.vocab_size)
    # Results for expected.safetensors and expected.json.
    large, small = {}, {}
    with torch.no_grad():
        base_logprobs = [target_logprobs_of(all_logprobs_of(model, datum), datum).tolist() for datum in batch]
        for i, datum in enumerate(batch):
            large[f"logits.base.{i}"] = logits_of(model, datum["input"])
        prompt = batch[0]["input"][:6].tolist()
        small["greedy_base"] = greedy(model, prompt, 12)

    model = adapt(model)
    model.save_pretrained(os.path.join(folder, "adapter"), save_embedding_layers=False)
    remove(os.path.join(folder, "adapter", "README.md"))
    strip_paths(os.path.join(folder, "adapter", "adapter_config.json"), name)
    with torch.no_grad():
        adapter_logprobs = []
        for i, datum in enumerate(batch):
            large[f"logits.adapter.{i}"] = logits_of(model, datum["input"])
            all_logprobs = all_logprobs_of(model, datum)
            logprobs = target_logprobs_of(all_logprobs, datum)
            datum["logprobs"] = logprobs + datum.pop("noise")
            adapter_logprobs.append(logprobs.tolist())
            datum["targets2_logprobs"] = all_logprobs.gather(1, datum["targets2"])
        small["greedy_adapter"] = greedy(model, prompt, 12)

    small["data"] = [
        {key: value.tolist() for key, value in datum.items()}
        | dict(base_logprobs=base_logprobs[i], adapter_logprobs=adapter_logprobs[i])
        for i, datum in enumerate(batch)
    ]
    small["losses"] = {}
    for loss, config in LOSS_CONFIGS.items():
        value, grads = gradient(loss, model, batch)
        small["losses"][loss] = dict(config=config, sum=value)
        if loss in TRACED:
            small["losses"][loss]["nodes"] = trace(TRACED[loss])
        for tensor, grad in grads.items():
            large[f"grad.{loss}.{tensor}"] = grad
    start = {key: value.detach().clone() for key, value in adapter_tensors(model).items()}
    for kind, steps, params in (("adam", adam_steps, ADAM), ("dimuon", dimuon_steps, DIMUON)):
        with torch.no_grad():
            for key, value in adapter_tensors(model).items():
                value.copy_(start[key])
        small[kind] = dict(params=params, loss="cross_entropy", steps=steps(model, batch))
        for key, value in adapter_tensors(model).items():
            large[f"{kind}.{key}"] = value.detach().clone()

    with open(os.path.join(folder, "expected.json"), "w") as file:
        json.dump(small, file, indent=1)
        file.write("\n")
    save_file({key: value.contiguous() for key, value in large.items()}, os.path.join(folder, "expected.safetensors"))


def encodings():
    """Encodes texts with the `tokenizers` library and the tokenizer that the engine trained."""
    tokenizer = Tokenizer.from_file(os.path.join(HERE, "tokenizer.json"))
    words = "The little dog, Max, ran 12 times; isn't it so? Yes! (No.) x=3*y_2\t\"quoted\" \\ end"
    texts = ["", " ", "a", "  a", "a  b", " a b  ", "\n\n x", "\r\n", "1234567890", " 42", "+ 1", "a1b2", words]
    texts += ["caf\u00e9 \u2603 \U0001f600\U0001f600 na\u00efve", "\u4f60\u597d\uff0c\u4e16\u754c", "\u0627\u0644\u0639", "e\u0301"]
    texts += ["\u00a0nbsp\u2003em", "\x00\x01\x7f", "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"]
    texts += ["<|im_start", "<|endoftext|><|endoftext|>x", "a<|im_end|> b", "<<|im_end|>>", "....!!!", " ...", ". .", "--a--"]
    texts += ["What is 17 + 25?", "Once there was a brave cat named Iris.", "the " * 9, "The capital of Norway is Oslo."]
    cases = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        cases.append(dict(text=text, ids=ids, decoded=tokenizer.decode(ids, skip_special_tokens=False)))
    with open(os.path.join(HERE, "encodings.json"), "w") as file:
        json.dump(cases, file, indent=0)
        file.write("\n")


def remove(path):
    """Removes a file that the libraries write and the tests do not need, if it exists."""
    if os.path.exists(path):
        os.remove(path)


def strip_paths(path, name):
    """Replaces the path of the recording machine in an adapter configuration by the model's name, and
    sorts the configuration, so that recording twice gives the same file."""
    with open(path) as file:
        config = json.load(file)
    config["base_model_name_or_path"] = name
    config["target_modules"].sort()
    with open(path, "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)
        file.write("\n")


def check(folder):
    """Compares the log-probabilities that peft computes with an adapter saved by another program to the
    recorded ones, and prints the largest difference."""
    model = AutoModelForCausalLM.from_pretrained(
        os.path.join(folder, "model"), dtype=torch.float32, attn_implementation="eager"
    )
    model = PeftModel.from_pretrained(model, os.path.join(folder, "adapter")).eval()
    with open(os.path.join(folder, "model", "expected.json")) as file:
        expected = json.load(file)
    worst = 0.0
    with torch.no_grad():
        for datum in expected["data"]:
            expected_logprobs = torch.tensor(datum["adapter_logprobs"])
            datum = dict(input=torch.tensor(datum["input"]), target=torch.tensor(datum["target"]))
            logprobs = target_logprobs_of(all_logprobs_of(model, datum), datum)
            worst = max(worst, (logprobs - expected_logprobs).abs().max().item())
    print(f"largest difference from the recorded log-probabilities: {worst:.2e}")
    return 0 if worst < 2e-5 else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3 and sys.argv[1] == "check":
        sys.exit(check(sys.argv[2]))
    encodings()
    for name, model, save_arguments in models():
        record(name, model, save_arguments)
