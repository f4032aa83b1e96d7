"""What the recorders share: reading and writing fixtures."""

import json
import os
import re


def save(folder, name, content):
    """Writes a fixture as JSON with one value per line, so that a change is a short diff."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "w") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")


def load(*path):
    with open(os.path.join(*path)) as file:
        return json.load(file)


def finish(folder, failures, recorded):
    """Reports what was recorded, and notes what could not be: the SDK may not have it."""
    # Without the folders of this machine.
    failures = {name: re.sub(r" \(/[^)]*\)", "", reason) for name, reason in failures.items()}
    if failures:
        save(folder, "not-recorded.json", failures)
    for name, reason in failures.items():
        print(f"    not recorded: {name}: {reason}", flush=True)
    print(f"    recorded {recorded}", flush=True)
    # Exit without waiting for the background threads of the SDK.
    os._exit(0)
