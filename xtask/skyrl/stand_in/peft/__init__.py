"""Replaces peft, which SkyRL's JAX backend needs only to write the configuration of an adapter."""

import json
import pathlib


class LoraConfig:
    def __init__(self, **fields):
        self.fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **fields}

    def save_pretrained(self, folder):
        pathlib.Path(str(folder), "adapter_config.json").write_text(json.dumps(self.fields))
