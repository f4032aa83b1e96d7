#!/usr/bin/env python3
"""Runs the workloads of benches/engine.rs with torch, transformers and peft.

    peer.py make FOLDER                       creates models A and B with random weights
    peer.py run FOLDER PRECISION WORK ROUNDS SECONDS
                                              prints a result in the format of benches/engine.rs;
                                              stops after SECONDS seconds
"""

import os
import resource
import sys
import threading
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
SHAPES = {
    "A": dict(vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
              num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    "B": dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
              num_attention_heads=16, num_key_value_heads=8, head_dim=128),
}


def make(folder):
    for name, shape in SHAPES.items():
        path = os.path.join(folder, name)
        if os.path.exists(os.path.join(path, "config.json")):
            continue
        torch.manual_seed(1)
        config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=4096,
                             eos_token_id=None, bos_token_id=None)
        model = Qwen3ForCausalLM(config)
        if name == "B":
            model = model.to(torch.bfloat16)
        model.save_pretrained(path)


def prompt(length, salt, vocab):
    generator = torch.Generator().manual_seed(salt)
    return torch.randint(0, vocab, (length,), generator=generator)


def uniform(vocab):
    return [[prompt(257, i, vocab) for i in range(4)]]


def ragged(vocab):
    rows = []
    for group in range(4):
        shared = prompt([128, 256, 384, 512][group], 100 + group, vocab)
        for completion in range(8):
            length = 16 + (completion * 34 + group * 7) % 241
            rows.append(torch.cat([shared, prompt(length, 1000 + group * 8 + completion, vocab)]))
    # Batches of four, padded to the longest: all 32 at once would not fit into memory.
    return [rows[i : i + 4] for i in range(0, 32, 4)]


def train(model, batches, optimizer):
    for batch in batches:
        longest = max(len(row) for row in batch) - 1
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        targets = torch.full((len(batch), longest), -100)
        for i, row in enumerate(batch):
            tokens[i, : len(row) - 1] = row[:-1]
            targets[i, : len(row) - 1] = row[1:]
            mask[i, : len(row) - 1] = 1
        logits = model(tokens, attention_mask=mask, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="sum") * 0.001
        loss.backward()
        del logits, loss
    optimizer.step()
    optimizer.zero_grad()


def main():
    if sys.argv[1] == "make":
        return make(sys.argv[2])
    _, _, folder, precision, work, rounds, time_limit = sys.argv
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    loaded = time.perf_counter() - start
    vocab = model.config.vocab_size
    if work == "load":
        return report(loaded, time.process_time())
    targets = [name for name in TARGETS if name != "lm_head" or not work.startswith("lora")]
    model = get_peft_model(model, LoraConfig(r=32, lora_alpha=32, target_modules=targets,
                                             lora_dropout=0.0, task_type="CAUSAL_LM"))
    if work in ("train", "ragged"):
        batches = uniform(vocab) if work == "train" else ragged(vocab)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        step = lambda round_index: train(model, batches, optimizer)
    else:
        batch = int(work.removeprefix("lora"))
        model.eval()

        def step(round_index):
            tokens = torch.stack([prompt(64, round_index * 1000 + i, vocab) for i in range(batch)])
            with torch.no_grad():
                model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens),
                               do_sample=False, max_new_tokens=128, min_new_tokens=128)

    best = [float("inf"), float("inf")]
    start = time.perf_counter()

    def stop():
        # No round has finished: the elapsed time is a lower bound.
        if best[0] == float("inf"):
            report(time.perf_counter() - start, time.process_time(), " longer=1")
        else:
            report(*best)
        sys.stdout.flush()
        os._exit(0)

    # A thread, because Python handles a signal only after the current operation, which may take
    # minutes.
    timer = threading.Timer(float(time_limit), stop)
    timer.daemon = True
    timer.start()
    for round_index in range(int(rounds)):
        wall, cpu = time.perf_counter(), time.process_time()
        step(round_index)
        best = [min(best[0], time.perf_counter() - wall), min(best[1], time.process_time() - cpu)]
    timer.cancel()
    report(*best)


def report(wall, cpu, more=""):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"RESULT wall={wall:.4f} cpu={cpu:.4f} peak={peak:.1f}{more}")


if __name__ == "__main__":
    main()
