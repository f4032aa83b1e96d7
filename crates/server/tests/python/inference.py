"""Runs the official `openai` and `anthropic` packages against a local server.

    python inference.py BASE_URL SECURED_URL KEY GUIDE

SECURED_URL is a server that requires the API key KEY. The official Tinker SDK trains and samples the
weights that the completions are compared with. GUIDE is a Markdown file whose Python programs are run.

Each check is a function. A failed check is reported, and the remaining ones still run.
"""

import asyncio
import contextlib
import io
import json
import os
import re
import struct
import sys
import time
import traceback
import urllib.request

BASE_URL, SECURED_URL, KEY, GUIDE = sys.argv[1:5]
os.environ["TINKER_BASE_URL"] = BASE_URL
# Replace a real key of the environment, so that it is never sent.
os.environ["TINKER_API_KEY"] = "tml-local"
os.environ["TINKER_TELEMETRY"] = "0"

import anthropic
import numpy as np
import openai
import tinker
from tinker import types

MODEL = "tinkex/tiny"
QUESTION = "What does a cow say?"
ANSWER = 'A cow says "moo".'
STORY = "Once upon a time"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]

oai = openai.OpenAI(base_url=f"{BASE_URL}/oai/api/v1", api_key="tml-local", max_retries=0)
short_oai = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="tml-local", max_retries=0)
claude = anthropic.Anthropic(base_url=f"{BASE_URL}/anthropic/api", api_key="tml-local", max_retries=0)
short_claude = anthropic.Anthropic(base_url=BASE_URL, api_key="tml-local", max_retries=0)
CHECKS = []


def async_oai():
    """Returns a client for the running event loop."""
    return openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="tml-local", max_retries=0)


def async_claude():
    """Returns a client for the running event loop."""
    return anthropic.AsyncAnthropic(base_url=BASE_URL, api_key="tml-local", max_retries=0)


def check(function):
    """Registers a check: a function of the Tinker service client that raises on failure."""
    CHECKS.append(function)
    return function


def user(text):
    return [{"role": "user", "content": text}]


def fails(kind, status, call, *words):
    """Asserts that a call raises an error of the package with this status and these words."""
    try:
        call()
    except kind as error:
        assert error.status_code == status, error
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError(f"no {kind.__name__}")


def metrics():
    """Returns the metrics of the server by name."""
    with urllib.request.urlopen(f"{BASE_URL}/metrics") as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("tinkex_"): float(value) for name, value in pairs}


def wait_for_idle_server():
    """Waits until no request runs, which a cancelled one must reach long before its last token."""
    for _ in range(200):
        now = metrics()
        if now["queued"] == 0 and now["cache_pages"] == 0:
            return now
        time.sleep(0.05)
    raise AssertionError(f"the server did not become idle: {metrics()}")


def complete(**changes):
    return oai.completions.create(**{"model": MODEL, "prompt": STORY, "temperature": 0, **changes})


def token_ids(text):
    scored = complete(prompt=text, max_tokens=0, echo=True, extra_body={"return_token_ids": True})
    return scored.choices[0].prompt_token_ids


def bits(logprobs):
    """Returns 32-bit numbers as bytes, so that they are compared exactly."""
    return [struct.pack("f", logprob) for logprob in logprobs]


@check
def models_are_listed(service):
    names = [model.id for model in oai.models.list()]
    assert MODEL in names, names
    assert oai.models.retrieve(MODEL).id == MODEL
    assert [model.id for model in short_oai.models.list()] == names
    fails(openai.NotFoundError, 404, lambda: oai.models.retrieve("tinkex/tny"), MODEL)


@check
def chat_is_streamed_with_the_same_text(service):
    request = dict(model=MODEL, messages=user(QUESTION), temperature=0)
    whole = oai.chat.completions.create(**request)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (ANSWER, "stop"), whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    stream = short_oai.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ANSWER, text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
    assert len(chunks) > 4, "the answer arrives in pieces"

    async def one(client):
        stream = await client.chat.completions.create(**request, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def streams():
        async with async_oai() as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(streams()) == [ANSWER] * 8
    # The helper of the package accumulates the same message.
    with oai.chat.completions.stream(**request) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER


@check
def completions_are_streamed_with_the_same_text(service):
    request = dict(max_tokens=40, extra_body={"return_token_ids": True, "ignore_eos": True})
    whole = complete(**request).choices[0]
    assert len(whole.text) > 20, whole
    pieces = [chunk.choices[0] for chunk in complete(**request, stream=True) if chunk.choices]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids

    async def stream():
        options = {"model": MODEL, "prompt": STORY, "temperature": 0, "stream": True, **request}
        async with async_oai() as client:
            chunks = await client.completions.create(**options)
            return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

    assert asyncio.run(stream()) == whole.text
    both = complete(prompt=[STORY, "The cat"], **request).choices
    assert (len(both), both[0].text) == (2, whole.text)
    by_ids = complete(prompt=token_ids(STORY), **request).choices[0]
    assert by_ids.text == whole.text


@check
def completions_equal_samples_of_the_tinker_api(service):
    prompt = token_ids(STORY)
    model = service.create_lora_training_client(base_model=MODEL, rank=8, seed=3)
    for _ in range(2):
        step = [model.forward_backward([datum(prompt, prompt)], "cross_entropy"),
                model.optim_step(types.AdamParams(learning_rate=1e-2))]
        [call.result() for call in step]
    path = model.save_weights_for_sampler("compared").result().path
    for weights, sampler in [
        (MODEL, service.create_sampling_client(base_model=MODEL)),
        (path, service.create_sampling_client(model_path=path)),
    ]:
        for settings in [dict(temperature=0.0), dict(temperature=0.9, seed=11), dict(temperature=1.0, seed=12)]:
            params = types.SamplingParams(max_tokens=24, stop=[], **settings)
            sample = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result()
            extra = {"return_token_ids": True, "ignore_eos": True}
            request = dict(model=weights, prompt=prompt, max_tokens=24, n=2, logprobs=0, extra_body=extra)
            whole = complete(**request, **settings).choices
            streamed = [[], []]
            for chunk in complete(**request, **settings, stream=True):
                for choice in chunk.choices:
                    streamed[choice.index].extend(zip(choice.token_ids, choice.logprobs.token_logprobs))
            for sequence, choice, pairs in zip(sample.sequences, whole, streamed, strict=True):
                assert choice.token_ids == list(sequence.tokens), (weights, settings)
                assert [token for token, _ in pairs] == choice.token_ids
                expected = bits(sequence.logprobs)
                assert bits(choice.logprobs.token_logprobs) == expected, (weights, settings)
                assert bits(logprob for _, logprob in pairs) == expected


@check
def log_probabilities_have_alternatives(service):
    request = dict(model=MODEL, messages=user(QUESTION), temperature=0, logprobs=True, top_logprobs=3)
    content = oai.chat.completions.create(**request).choices[0].logprobs.content
    # The token that ends the answer has no text.
    assert "".join(token.token for token in content).startswith(ANSWER), content
    for token in content:
        best = token.top_logprobs[0]
        assert (best.token, best.logprob) == (token.token, token.logprob), token
        assert len(token.top_logprobs) == 3
    streamed = oai.chat.completions.create(**request, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices]
    parts = [token for part in parts if part for token in part.content]
    assert parts == content

    scored = complete(prompt="The cat sat", max_tokens=0, echo=True, logprobs=1).choices[0]
    sampler = service.create_sampling_client(base_model=MODEL)
    expected = sampler.compute_logprobs(types.ModelInput.from_ints(token_ids("The cat sat"))).result()
    assert scored.text == "The cat sat" and scored.logprobs.token_logprobs[0] is None, scored
    assert bits(scored.logprobs.token_logprobs[1:]) == bits(expected[1:])


@check
def several_choices_differ_and_repeat_with_their_seed(service):
    request = dict(model=MODEL, messages=user("Tell me a story."), n=3, seed=5, temperature=1.0, max_tokens=20)
    texts = [choice.message.content for choice in oai.chat.completions.create(**request).choices]
    assert len(set(texts)) == 3, texts
    again = [choice.message.content for choice in oai.chat.completions.create(**request).choices]
    assert again == texts
    streamed = [""] * 3
    for chunk in oai.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts, (streamed, texts)


@check
def stop_strings_end_the_text(service):
    request = dict(model=MODEL, messages=user(QUESTION), temperature=0)
    for stop in [' "moo', [" says", "nothing"]]:
        choice = oai.chat.completions.create(**request, stop=stop).choices[0]
        expected = ANSWER[: ANSWER.index(stop if isinstance(stop, str) else stop[0])]
        assert (choice.message.content, choice.finish_reason) == (expected, "stop"), choice
        chunks = oai.chat.completions.create(**request, stop=stop, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == expected, text
    assert complete(max_tokens=3, extra_body={"ignore_eos": True}).choices[0].finish_reason == "length"


@check
def tools_are_called(service):
    model = service.create_lora_training_client(base_model=MODEL, rank=16, seed=1)
    prompt = token_ids("<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n")
    data = [datum(prompt, token_ids(f"{CALL}<|im_end|>"))]
    for _ in range(200):
        forward_backward = model.forward_backward(data, "cross_entropy")
        optim_step = model.optim_step(types.AdamParams(learning_rate=1e-2))
        loss = forward_backward.result().metrics["loss:sum"]
        optim_step.result()
        if loss < 0.1:
            break
    path = model.save_weights_for_sampler("tools").result().path
    request = dict(model=path, messages=user("Weather?"), tools=TOOLS, temperature=0)
    choice = oai.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call = choice.message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"}), choice
    with oai.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0]
    streamed_call = streamed.message.tool_calls[0].function
    assert (streamed_call.name, streamed_call.arguments) == (call.name, call.arguments), streamed
    # The result of the tool is a message of the next request.
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}
    messages = [*request["messages"], choice.message.model_dump(exclude_none=True), result]
    assert oai.chat.completions.create(**{**request, "messages": messages}, max_tokens=4).choices

    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    request = dict(model=path, messages=user("Weather?"), tools=tools, max_tokens=90)
    for call in [claude.messages.create, stream_message]:
        message = call(**request, extra_body={"temperature": 0})
        assert message.stop_reason == "tool_use", message
        block = message.content[-1]
        assert (block.type, block.name, block.input) == ("tool_use", "weather", {"city": "Ulm"}), message
    fails(openai.BadRequestError, 400,
          lambda: oai.chat.completions.create(model=MODEL, messages=user("x"), tools=TOOLS, tool_choice="required"),
          "tool_choice")


def stream_message(**request):
    with short_claude.messages.stream(**request) as stream:
        return stream.get_final_message()


@check
def messages_are_streamed_with_the_same_text(service):
    request = dict(model=MODEL, messages=user(QUESTION), max_tokens=40, extra_body={"temperature": 0})
    whole = claude.messages.create(**request)
    assert (whole.content[0].text, whole.stop_reason) == (ANSWER, "end_turn"), whole
    assert short_claude.messages.create(**request).content[0].text == ANSWER
    counted = claude.messages.count_tokens(model=MODEL, messages=user(QUESTION))
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    events = [event.type for event in claude.messages.create(**request, stream=True)]
    assert (events[0], events[-1]) == ("message_start", "message_stop"), events
    assert events.count("content_block_start") == events.count("content_block_stop") == 1, events
    streamed = stream_message(**request)
    assert (streamed.content[0].text, streamed.usage.output_tokens) == (ANSWER, whole.usage.output_tokens)

    async def stream():
        async with async_claude() as client, client.messages.stream(**request) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(stream()) == ANSWER
    stopped = claude.messages.create(**request, stop_sequences=[" says"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "A cow", "stop_sequence", " says"), stopped
    short = claude.messages.create(**{**request, "max_tokens": 2}, system="Answer.")
    assert short.stop_reason == "max_tokens", short


@check
def errors_have_the_types_of_the_packages(service):
    error = fails(openai.NotFoundError, 404, lambda: complete(model="tinkex/tny"), f"nearest: {MODEL}")
    assert (error.code, error.param) == ("model_not_found", "model"), error.body
    fails(openai.NotFoundError, 404, lambda: complete(model="tinker://none/sampler_weights/x"))
    fails(openai.BadRequestError, 400, lambda: complete(temperature=-1), "temperature")
    for parameter, value in [("logit_bias", {"5": 1}), ("presence_penalty", 1.0), ("suffix", "x")]:
        error = fails(openai.BadRequestError, 400, lambda: complete(**{parameter: value}), parameter)
        assert error.param == parameter, error.body
    fails(openai.BadRequestError, 400, lambda: complete(max_tokens=10**6), "context")
    complete(max_tokens=1, user="me", extra_body={"metadata": {}, "store": False})
    fails(anthropic.NotFoundError, 404,
          lambda: claude.messages.create(model="tinkex/tny", messages=user("x"), max_tokens=1), MODEL)
    error = fails(anthropic.BadRequestError, 400,
                  lambda: claude.messages.create(model=MODEL, messages=[], max_tokens=1))
    assert error.body["error"]["type"] == "invalid_request_error", error.body


@check
def keys_are_required_in_every_form(service):
    secured = f"{SECURED_URL}/v1"
    wrong = openai.OpenAI(base_url=secured, api_key="tml-wrong", max_retries=0)
    error = fails(openai.AuthenticationError, 401, lambda: list(wrong.models.list()))
    assert error.code == "invalid_api_key" and KEY not in str(error), error.body
    assert list(openai.OpenAI(base_url=secured, api_key=KEY, max_retries=0).models.list())
    request = dict(model=MODEL, messages=user("x"), max_tokens=1)
    wrong = anthropic.Anthropic(base_url=SECURED_URL, api_key="tml-wrong", max_retries=0)
    fails(anthropic.AuthenticationError, 401, lambda: wrong.messages.create(**request))
    assert anthropic.Anthropic(base_url=SECURED_URL, api_key=KEY, max_retries=0).messages.create(**request)
    bearer = anthropic.Anthropic(base_url=SECURED_URL, auth_token=KEY, max_retries=0)
    assert bearer.messages.create(**request)


@check
def closing_a_stream_cancels_its_request(service):
    before = wait_for_idle_server()
    extra = {"ignore_eos": True}
    streams = [
        complete(prompt=[5, 6], max_tokens=1900, n=8, stream=True, extra_body=extra),
        short_oai.chat.completions.create(
            model=MODEL, messages=user("x"), max_tokens=1900, n=8, stream=True, extra_body=extra),
    ]
    for stream in streams:
        next(iter(stream))
        stream.close()
    after = wait_for_idle_server()
    assert after["failed_requests_total"] - before["failed_requests_total"] == 2, (before, after)
    sampled = after["sampled_tokens_total"] - before["sampled_tokens_total"]
    assert sampled < 2 * 8 * 1900 / 2, f"{sampled} tokens were sampled after the streams were closed"


@check
def documented_programs_run(service):
    with open(GUIDE) as file:
        programs = re.findall(r"```python\n(.*?)```", file.read(), flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for program in programs:
            exec(compile(program.replace("http://127.0.0.1:8080", BASE_URL), GUIDE, "exec"), {})
    assert len(programs) == 2, programs
    assert "cow" in printed.getvalue() and "dog" in printed.getvalue(), printed.getvalue()


def datum(prompt, completion):
    tokens = prompt + completion
    inputs = {
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "weights": np.array([0.0] * (len(prompt) - 1) + [1.0] * len(completion), dtype=np.float32),
    }
    tensors = {key: types.TensorData.from_numpy(value) for key, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


def main():
    service, failed = tinker.ServiceClient(), []
    for function in CHECKS:
        try:
            function(service)
            print(f"ok      {function.__name__}", flush=True)
        except Exception:
            failed.append(function.__name__)
            print(f"FAILED  {function.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"openai {openai.__version__}, anthropic {anthropic.__version__}: "
          f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks passed")
    sys.exit(bool(failed))


main()
