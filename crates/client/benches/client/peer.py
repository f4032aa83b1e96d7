"""Runs the workloads of `work.rs` with the Python SDK.

    python peer.py KIND URL COUNT CONCURRENT
"""

import sys
import time

START_CPU, START_WALL = time.process_time(), time.perf_counter()

import asyncio  # noqa: E402

import numpy as np  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402

PROMPT_TOKENS, SAMPLED_TOKENS = 512, 256
DATUMS, DATUM_TOKENS = 128, 1024
MODEL = "bench/model"
REST = [1_000 + i * 37 % 100_000 for i in range(1, PROMPT_TOKENS)]


def report(count, cpu, wall):
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    with open("/proc/self/status", encoding="ascii") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    print(
        '{"count":%d,"cpu_seconds":%f,"wall_seconds":%f,"peak_kib":%d}' % (count, cpu, wall, peak),
        flush=True,
    )


async def sample(sampler, n):
    prompt = types.ModelInput.from_ints([n, *REST])
    params = types.SamplingParams(max_tokens=SAMPLED_TOKENS)
    response = await sampler.sample_async(prompt=prompt, num_samples=1, sampling_params=params)
    tokens = response.sequences[0].tokens
    if tokens[0] != n or len(tokens) != SAMPLED_TOKENS:
        sys.exit(f"sample {n} has the result of {tokens[0]}")


async def run_samples(sampler, count, concurrent):
    numbers = iter(range(count))

    async def worker():
        for n in numbers:
            await sample(sampler, n)

    await asyncio.gather(*(worker() for _ in range(concurrent)))


async def samples(service, count, concurrent):
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    await run_samples(sampler, 2 * concurrent, concurrent)
    cpu, wall = time.process_time(), time.perf_counter()
    await run_samples(sampler, count, concurrent)
    report(count, cpu, wall)


async def steps(service, count):
    model = await service.create_lora_training_client_async(base_model=MODEL, rank=32)
    # The SDK converts numpy arrays faster than lists.
    random = np.random.default_rng(1)

    def datum():
        tokens = random.integers(0, 150_000, DATUM_TOKENS + 1)
        half = np.repeat(np.array([0.0, 1.0], dtype=np.float32), DATUM_TOKENS // 2)
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(tokens[1:]),
                "logprobs": types.TensorData.from_numpy(-0.5 * half),
                "advantages": types.TensorData.from_numpy(0.5 * half),
            },
        )

    batch = [datum() for _ in range(DATUMS)]

    async def step():
        gradients = await model.forward_backward_async(batch, "importance_sampling")
        optim = await model.optim_step_async(types.AdamParams(learning_rate=1e-4))
        outputs = len((await gradients.result_async()).loss_fn_outputs)
        await optim.result_async()
        if outputs != DATUMS:
            sys.exit(f"{outputs} outputs")

    await step()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        await step()
    report(count, cpu, wall)


async def burst(service, count):
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    await asyncio.gather(*(sample(sampler, n) for n in range(count)))
    report(count, START_CPU, START_WALL)


async def main(kind, url, count, concurrent):
    service = tinker.ServiceClient(base_url=url, api_key="tml-bench")
    if kind == "samples":
        await samples(service, count, concurrent)
    elif kind == "steps":
        await steps(service, count)
    elif kind == "burst":
        await burst(service, count)
    elif kind == "start":
        sampler = await service.create_sampling_client_async(base_model=MODEL)
        await sample(sampler, 7)
        report(count, START_CPU, START_WALL)
    else:
        sys.exit(f"unknown kind of work: {kind}")


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
