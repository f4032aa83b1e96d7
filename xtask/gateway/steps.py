"""Trains with the official SDK and prints exact numbers: `steps.py BASE_URL MODEL STEPS`.

Prints the bits of the loss of every step as `loss STEP HEX`, then the bits of a sample of the trained weights.
The run saves its state every twenty steps.
"""

import sys
import traceback

import sdk
import tinker

STEPS = int(sys.argv[3])
SAVE_EVERY = 20


def main():
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model=sdk.MODEL, rank=8, seed=11)
    for start in range(0, STEPS, SAVE_EVERY):
        count = min(SAVE_EVERY, STEPS - start)
        for step, loss in enumerate(sdk.train(model, start, count), start):
            print(f"loss {step} {sdk.bits(loss)}", flush=True)
        model.save_state(f"after-{start + count}").result()
    for sequence in sdk.sample(model.save_weights_and_get_sampling_client()):
        print("sample", *sequence.tokens, *map(sdk.bits, sequence.logprobs), flush=True)


try:
    main()
except Exception:
    traceback.print_exc(file=sys.stderr)
    sys.stderr.flush()
    sdk.leave(1)
sdk.leave()
