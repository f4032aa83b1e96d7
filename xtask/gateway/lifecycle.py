"""Trains, saves, samples and resumes with the official SDK: `lifecycle.py BASE_URL MODEL`.

Prints each stage when it is complete. A stage that fails ends the program with its error.
"""

import sys
import traceback

import sdk
import tinker


def main():
    service = tinker.ServiceClient()
    names = [model.model_name for model in service.get_server_capabilities().supported_models]
    assert sdk.MODEL in names, names
    model = service.create_lora_training_client(base_model=sdk.MODEL, rank=8, seed=1)
    losses = list(sdk.train(model, 0, 6))
    assert losses[-1] < losses[0], losses
    print("train", flush=True)

    path = model.save_state("half").result().path
    sampler = model.save_weights_and_get_sampling_client()
    print("save", flush=True)

    first = sdk.sample(sampler)
    assert len(first) == 2 and all(len(s.tokens) == len(s.logprobs) == 8 for s in first), first
    rest = list(sdk.train(model, 6, 4))
    again = sdk.sample(sampler)
    assert [s.tokens for s in first] == [s.tokens for s in again], "training changed saved weights"
    assert [list(s.logprobs) for s in first] == [list(s.logprobs) for s in again], (first, again)
    print("sample", flush=True)

    resumed = service.create_training_client_from_state_with_optimizer(path)
    continued = list(sdk.train(resumed, 6, 4))
    assert continued == rest, (continued, rest)
    print("resume", flush=True)


try:
    main()
except Exception:
    traceback.print_exc(file=sys.stderr)
    sys.stderr.flush()
    sdk.leave(1)
sdk.leave()
