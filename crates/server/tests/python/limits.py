"""Checks with the official Python SDK how the limits of users end requests.

    python limits.py BASE_URL MODEL ADMINISTRATOR_KEY

A limit that another request relieves (429) must delay the program, and a spent quota (403) must end it at once with
the reason.
"""

import json
import os
import sys
import time
import urllib.request

BASE_URL, MODEL, KEY = sys.argv[1:4]
os.environ["TINKER_BASE_URL"] = BASE_URL
os.environ["TINKER_TELEMETRY"] = "0"


def administer(method, path, body):
    """Sends a request with the key of the administrator."""
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(BASE_URL + path, data=data, headers=headers, method=method)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


limits = {"samples": 2, "tokens_per_day": 12}
created = administer("POST", "/api/v1/keys", {"name": "sdk", "role": "user", "limits": limits})
os.environ["TINKER_API_KEY"] = created["key"]

import numpy as np
import tinker
from tinker import types


def train(model):
    """Trains on four tokens."""
    tokens = [5, 6, 7, 8, 9]
    inputs = {
        "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
        "weights": types.TensorData.from_numpy(np.ones(4, dtype=np.float32)),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    return model.forward_backward([datum], "cross_entropy").result(timeout=60)


service = tinker.ServiceClient()
sampler = service.create_sampling_client(base_model=MODEL)
prompt = types.ModelInput.from_ints([5, 6])
params = types.SamplingParams(max_tokens=32, stop=[], seed=1)
samples = [sampler.sample(prompt, num_samples=2, sampling_params=params) for _ in range(4)]
for sample in samples:
    assert len(sample.result(timeout=120).sequences) == 2
print("ok      eight samples with a limit of two at a time all succeed (429)", flush=True)

model = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1)
for _ in range(3):
    train(model)
start = time.monotonic()
try:
    train(model)
except Exception as error:
    message = str(error)
else:
    raise SystemExit("FAILED  a pass beyond the quota succeeded")
assert "the training quota of user sdk is spent" in message, message
print(f"ok      a spent quota fails after {time.monotonic() - start:.1f} s (403): {message[:120]}", flush=True)
os._exit(0)
