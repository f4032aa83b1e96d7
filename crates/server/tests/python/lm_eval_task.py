"""Evaluates a checkpoint with `lm-eval`, and compares the log-probabilities with `tinkex logprobs`.

    python lm_eval_task.py BASE_URL TINKEX FOLDER

TINKEX is the command line program, FOLDER an empty folder for the task and the tokenizer. The official
Tinker SDK trains the checkpoint. The harness reads it through the OpenAI-compatible endpoint: its
model `local-completions` scores answers by the log-probabilities of an echoed prompt.
"""

import json
import os
import subprocess
import sys

BASE_URL, TINKEX, FOLDER = sys.argv[1:4]
os.environ["TINKER_BASE_URL"] = BASE_URL
# Replace a real key of the environment, so that it is never sent.
os.environ["TINKER_API_KEY"] = os.environ["OPENAI_API_KEY"] = "tml-local"
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["TINKEX_DATA_DIR"] = os.path.join(FOLDER, "tinkex")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = os.path.join(FOLDER, "hub")

import lm_eval
import numpy as np
import tinker
from lm_eval.tasks import TaskManager
from tinker import types
from transformers import AutoTokenizer

MODEL = "tinkex/tiny"
# Largest accepted difference of a log-probability, in nats.
TOLERANCE = 1e-5
QUESTIONS = [
    ("What does a cow say?", ["moo", "woof", "meow"], 0),
    ("What does a dog say?", ["moo", "woof", "meow"], 1),
    ("What does a cat say?", ["moo", "woof", "meow"], 2),
    ("Which day comes after Monday?", ["Sunday", "Friday", "Tuesday"], 2),
]
TASK = """
task: tinkex_animals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


def tinkex(*arguments):
    """Runs the command line program and returns its JSON."""
    done = subprocess.run([TINKEX, *arguments, "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def write_task():
    data = os.path.join(FOLDER, "questions.jsonl")
    with open(data, "w") as file:
        for question, choices, answer in QUESTIONS:
            file.write(json.dumps({"question": question, "choices": choices, "answer": answer}) + "\n")
    with open(os.path.join(FOLDER, "animals.yaml"), "w") as file:
        file.write(TASK.format(data=data))


def train(tokenizer):
    """Trains an adapter on the answers and returns the path of its checkpoint."""
    model = tinker.ServiceClient().create_lora_training_client(base_model=MODEL, rank=16, seed=1)
    data = []
    for question, choices, answer in QUESTIONS:
        tokens = tokenizer.encode(f"Question: {question}\nAnswer: {choices[answer]}")
        tensors = {
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "weights": np.ones(len(tokens) - 1, dtype=np.float32),
        }
        tensors = {key: types.TensorData.from_numpy(value) for key, value in tensors.items()}
        inputs = types.ModelInput.from_ints(tokens[:-1])
        data.append(types.Datum(model_input=inputs, loss_fn_inputs=tensors))
    for _ in range(40):
        forward_backward = model.forward_backward(data, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        forward_backward.result()
    return model.save_weights_for_sampler("animals").result().path


def evaluate(path, folder):
    arguments = {
        "model": path,
        "base_url": f"{BASE_URL}/v1/completions",
        "tokenizer": folder,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 1,
    }
    return lm_eval.simple_evaluate(
        model="local-completions", model_args=arguments, tasks=["tinkex_animals"],
        task_manager=TaskManager(include_path=FOLDER, include_defaults=False), log_samples=True,
    )


def main():
    # The program writes the tokenizer of the built-in model into its data folder.
    tinkex("tokenizer", "info", MODEL)
    folder = os.path.join(os.environ["TINKEX_DATA_DIR"], "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write_task()
    path = train(tokenizer)
    results = evaluate(path, folder)
    compared = 0
    for sample in results["samples"]["tinkex_animals"]:
        question, choices, _ = QUESTIONS[sample["doc_id"]]
        for choice, response in zip(choices, sample["resps"], strict=True):
            context = f"Question: {question}\nAnswer:"
            start = len(tokenizer.encode(context))
            tokens = ",".join(map(str, tokenizer.encode(f"{context} {choice}")))
            scored = tinkex("logprobs", path, "--tokens", tokens)["tokens"]
            expected = sum(token["logprob"] for token in scored[start:])
            assert abs(response[0][0] - expected) < TOLERANCE, (question, choice, response, expected)
            compared += 1
    accuracy = results["results"]["tinkex_animals"]["acc,none"]
    assert accuracy == 1.0, results["results"]
    print(f"lm-eval {lm_eval.__version__}: accuracy {accuracy}, {compared} log-probabilities are those of "
          f"`tinkex logprobs` within {TOLERANCE} nats")


main()
