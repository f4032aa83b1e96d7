"""Helpers for programs of the official SDK: `PROGRAM BASE_URL MODEL …`."""

import os
import struct
import sys

BASE_URL, MODEL = sys.argv[1:3]
os.environ["TINKER_BASE_URL"] = BASE_URL
# Replace a real key of the environment, so that it is never sent.
os.environ["TINKER_API_KEY"] = "tml-any"
os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import tinker
from tinker import types

RATE = 1e-2


def datum(prompt, completion):
    """Builds a datum whose completion has weight 1."""
    tokens = prompt + completion
    tensors = {
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "weights": np.array([0.0] * (len(prompt) - 1) + [1.0] * len(completion), dtype=np.float32),
    }
    tensors = {name: types.TensorData.from_numpy(value) for name, value in tensors.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


def batch(step):
    """Returns the examples of a step; every step has other ones."""
    return [datum([5 + step % 50, 6, 7], [8 + n, 9, 10]) for n in range(4)]


def start_step(model, step):
    """Submits a training step. Returns the futures of the pass and of the optimizer step."""
    forward_backward = model.forward_backward(batch(step), "cross_entropy")
    return forward_backward, model.optim_step(types.AdamParams(learning_rate=RATE))


def finish_step(futures):
    """Waits for a training step and returns its loss."""
    forward_backward, optim_step = futures
    output = forward_backward.result()
    optim_step.result()
    # SkyRL itself reports the losses of tokens only.
    tokens = lambda: sum(float(part["elementwise_loss"].to_numpy().sum()) for part in output.loss_fn_outputs)
    return output.metrics["loss:sum"] if "loss:sum" in output.metrics else tokens()


def train(model, first, count):
    """Runs training steps with two of them submitted at any time. Yields their losses."""
    submitted = []
    for step in range(first, first + count):
        submitted.append(start_step(model, step))
        if len(submitted) == 2:
            yield finish_step(submitted.pop(0))
    for futures in submitted:
        yield finish_step(futures)


def bits(number):
    """Returns the bits of a 64-bit number in hexadecimal."""
    return struct.pack(">d", number).hex()


def sample(sampler, count=2):
    """Returns the sequences of a sample with a seed."""
    params = types.SamplingParams(max_tokens=8, seed=7, stop=[])
    return sampler.sample(types.ModelInput.from_ints([5, 6, 7]), count, params).result().sequences


def leave(status=0):
    """Exits without waiting for the background threads of the SDK."""
    sys.stdout.flush()
    os._exit(status)
