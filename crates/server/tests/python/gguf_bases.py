"""Writes what the server generates with GGUF files as base models, for llama.py to compare.

    python gguf_bases.py BASE_URL TINKEX MODELS FOLDER

harness.py describes the arguments. The server serves files that greedy.py wrote, each under the name
NAME-TYPE. Adds to CASES, which is FOLDER/../greedy/cases.json.
"""

import json
import os

import harness
from harness import FOLDER, greedy, scored

import tinker

CASES = os.path.join(os.path.dirname(FOLDER), "greedy", "cases.json")


def main():
    with open(CASES) as file:
        cases = json.load(file)
    service = tinker.ServiceClient()
    served = {model.model_name for model in service.get_server_capabilities().supported_models}
    count = 0
    for name, case in cases.items():
        for dtype in case["files"]:
            if f"{name}-{dtype}" in served:
                sampler = service.create_sampling_client(base_model=f"{name}-{dtype}")
                bases = case.setdefault("bases", {})
                bases[dtype] = dict(greedy=greedy(sampler, name), sequences=scored(sampler, name))
                count += 1
    with open(CASES, "w") as file:
        json.dump(cases, file)
    print(f"GGUF files as base models: {count}", flush=True)
    # Exit without waiting for the background threads of the SDK.
    os._exit(0 if count else 1)


main()
