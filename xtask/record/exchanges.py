"""Records the HTTP exchanges of the official Python SDK with a local server.

    python exchanges.py BASE_URL MODEL FOLDER

The SDK talks to the server through a recording proxy. Every exchange becomes one file of FOLDER,
named after the step of the program below and the route. Ids, times, versions and addresses are
replaced by fixed values, so that two runs write the same files.
"""

import base64
import http.client
import http.server
import json
import os
import re
import sys
import threading
import urllib.parse

BASE_URL, MODEL, FOLDER = sys.argv[1:4]
SERVER = urllib.parse.urlsplit(BASE_URL)
API_KEY = "tml-recorded"

# Routes that background tasks use at any time. `fixtures/wire` has their exchanges.
BACKGROUND = ("session_heartbeat", "telemetry")
# Request headers without a meaning for the protocol, or added by HTTP itself.
IGNORED_HEADERS = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")


class Recorder:
    """Collects the exchanges of each step."""

    def __init__(self):
        self.lock = threading.Lock()
        self.step = "start"
        self.exchanges = []

    def add(self, request, response):
        with self.lock:
            if is_recorded(request, response, self.exchanges):
                self.exchanges.append((self.step, request, response))


def route(request):
    return request["path"].split("?")[0].removeprefix("/api/v1/")


def is_recorded(request, response, earlier):
    """Tells whether the exchange is part of the recording. How often the SDK polls depends on time."""
    name = route(request)
    if name in BACKGROUND:
        return False
    if name == "client/dynamic_config":
        return all(route(other) != name for _, other, _ in earlier)
    if name == "retrieve_futures":
        return bool(json.loads(response["raw"]).get("completions"))
    if name == "retrieve_future":
        if response["status"] != 200:
            return False
        json_body = response["headers"].get("content-type", "").startswith("application/json")
        return not (json_body and json.loads(response["raw"]).get("type") == "try_again")
    return True


RECORDER = Recorder()


class Proxy(http.server.BaseHTTPRequestHandler):
    """Forwards requests to the server and records the exchanges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def forward(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        connection = http.client.HTTPConnection(SERVER.hostname, SERVER.port, timeout=120)
        # The server compresses nothing without `accept-encoding`.
        sent = {name: value for name, value in headers.items() if name not in ("host", "accept-encoding", "connection")}
        connection.request(self.command, self.path, body=body, headers=sent)
        reply = connection.getresponse()
        raw = reply.read()
        connection.close()
        RECORDER.add(
            {"method": self.command, "path": self.path, "headers": headers, "raw": body},
            {"status": reply.status, "headers": {k.lower(): v for k, v in reply.getheaders()}, "raw": raw},
        )
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = do_PUT = do_DELETE = forward


class Normalizer:
    """Replaces values that differ between runs."""

    ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{32}\b")
    TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)")

    def __init__(self, version, addresses):
        self.version, self.addresses, self.ids = version, addresses, {}

    def bytes(self, raw):
        """Replaces ids by ids of the same length, in the order of their first use."""
        return self.ID.sub(lambda match: self.identifier(match.group()), raw)

    def identifier(self, found):
        n = len(self.ids) + 1
        fixed = b"%032d" % n if len(found) == 32 else b"%08d-2222-4333-8444-%012d" % (n, n)
        return self.ids.setdefault(found, fixed)

    def text(self, text):
        text = self.bytes(text.encode()).decode()
        text = self.TIME.sub("<time>", text)
        for address in self.addresses:
            text = text.replace(address, "<host>")
        text = re.sub(r"(signature|token|sig|expires)=[^&]+", r"\1=<\1>", text)
        return text.replace(API_KEY, "<api-key>")

    def value(self, value, key=None):
        if isinstance(value, dict):
            return {name: self.value(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        if key == "sdk_version":
            return "<sdk-version>"
        return self.text(value) if isinstance(value, str) else value

    def header(self, name, value):
        fixed = {
            "x-idempotency-key": "stainless-python-retry-<uuid4>",
            "x-stainless-os": "<os>",
            "x-stainless-arch": "<arch>",
            "x-stainless-runtime-version": "<python-version>",
            "x-tinker-create-promise-roundtrip-time": "<seconds-float>",
            "x-tinker-request-iteration": "<iteration>",
        }
        return fixed.get(name) or self.text(value).replace(self.version, "<sdk-version>")


def decompressed(raw, encoding):
    if encoding is None:
        return raw
    assert encoding == "zstd", encoding
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj().decompress(raw)


def body(normalizer, step, side, message):
    """Returns the fields of a recorded body: JSON, or protobuf as bytes and as text."""
    raw = decompressed(side["raw"], side["headers"].get("content-encoding"))
    if not raw:
        return {"body": None}
    if not side["headers"].get("content-type", "").startswith("application/x-protobuf"):
        try:
            return {"body": normalizer.value(json.loads(raw))}
        except ValueError:
            return {"body_text": normalizer.text(raw.decode(errors="replace"))}
    from google.protobuf import json_format

    message.ParseFromString(normalizer.bytes(raw))
    if step == "compute_logprobs":
        # The SDK sets no seed for the token that it has to sample.
        for sequence in message.sequences:
            sequence.tokens, sequence.logprobs = bytes(4), bytes(4)
    # The order of map entries differs between processes.
    raw = message.SerializeToString(deterministic=True)
    decoded = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return {"body_base64": base64.b64encode(raw).decode(), "decoded": decoded}


def write(version, addresses):
    from tinker.proto import tinker_public_pb2 as messages

    normalizer = Normalizer(version, addresses)
    os.makedirs(FOLDER, exist_ok=True)
    headers = [
        {n: normalizer.header(n, v) for n, v in request["headers"].items() if n not in IGNORED_HEADERS}
        for _, request, _ in RECORDER.exchanges
    ]
    # Most headers are the same in every request; `sdk.json` has them once.
    common = dict(set.intersection(*[set(of_request.items()) for of_request in headers]))
    used = {}
    for (step, request, response), of_request in zip(RECORDER.exchanges, headers):
        kind = request["headers"].get("x-tinker-request-type", "")
        output = messages.SampleResponse() if kind == "Sample" else messages.ForwardBackwardOutput()
        exchange = {
            "request": {
                "method": request["method"],
                "path": normalizer.text(request["path"]),
                "headers": {n: v for n, v in of_request.items() if n not in common},
                **body(normalizer, step, request, messages.ForwardBackwardRequest()),
            },
            "response": {
                "status": response["status"],
                "headers": {"content-type": response["headers"].get("content-type")},
                **body(normalizer, step, response, output),
            },
        }
        name = f"{step}.{route(exchange['request']).replace('/', '_')}"
        used[name] = used.get(name, 0) + 1
        save(name if used[name] == 1 else f"{name}.{used[name]}", exchange)
    save("sdk", {"package": "tinker", "version": version, "headers": common})
    print(f"recorded {len(RECORDER.exchanges)} exchanges of tinker {version}", flush=True)


def save(name, content):
    with open(os.path.join(FOLDER, f"{name}.json"), "w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")


def program():
    """Runs the recorded calls, one after the other. `client/tests/it/replay.rs` makes the same calls."""
    import numpy as np
    import tinker
    from tinker import types
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    def step(name):
        with RECORDER.lock:
            RECORDER.step = name

    def datum(tokens, **inputs):
        tensors = {
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            **{k: types.TensorData.from_numpy(np.array(v, dtype=np.float32)) for k, v in inputs.items()},
        }
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)

    batch = [datum([5, 6, 7, 8], weights=[0.0, 1.0, 0.5]), datum([9, 10, 11], weights=[1.0, 1.0])]
    prompt = types.ModelInput.from_ints([5, 6, 7])

    service = tinker.ServiceClient(user_metadata={"k": "v"})
    service.get_server_capabilities()
    step("create_model")
    model = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1, user_metadata={"exp": "1"})
    step("get_info")
    model.get_info()
    step("forward_backward")
    model.forward_backward(batch, "cross_entropy").result()
    step("optim_step")
    model.optim_step(types.AdamParams(learning_rate=0.01)).result()
    step("forward")
    model.forward(batch, "cross_entropy").result()
    step("ppo")
    rollout = datum([5, 6, 7, 8], logprobs=[0.0, -4.0, -4.5], advantages=[0.0, 1.0, -0.5])
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    model.forward_backward([rollout], "ppo", loss_fn_config=config).result()
    step("save_state")
    state = model.save_state("a").result().path
    step("save_state_again")
    model.save_state("a", ttl_seconds=3600, overwrite=True, user_metadata={"a": "b"}).result()
    step("create_model_from_state")
    service.create_training_client_from_state(state)
    step("create_model_from_state_with_optimizer")
    service.create_training_client_from_state_with_optimizer(state)
    step("save_weights_for_sampler")
    weights = model.save_weights_for_sampler("s").result().path

    step("sampler_of_base_model")
    sampler = service.create_sampling_client(base_model=MODEL)
    step("sampler_of_checkpoint")
    trained = service.create_sampling_client(model_path=weights)
    step("sample_until_length")
    params = types.SamplingParams(max_tokens=4, seed=1, temperature=0.7, top_k=20, top_p=0.9, stop=[])
    tokens = sampler.sample(prompt, 2, params).result().sequences[0].tokens
    step("sample_until_stop")
    # The same seed gives the same tokens, so the second of them ends this sample.
    stop = types.SamplingParams(max_tokens=4, seed=1, temperature=0.7, top_k=20, top_p=0.9, stop=[tokens[1]])
    assert sampler.sample(prompt, 1, stop).result().sequences[0].stop_reason == "stop"
    step("sample_checkpoint")
    trained.sample(prompt, 1, types.SamplingParams(max_tokens=2, temperature=0.0), include_prompt_logprobs=True).result()
    step("compute_logprobs")
    sampler.compute_logprobs(prompt).result()

    # The public clients always name a sampling session. The other forms of the request are encoded
    # by the SDK's own types.
    async def send(request):
        with sampler.holder.aclient(ClientConnectionPoolType.SAMPLE) as client:
            try:
                await client.sampling.asample(request=request, max_retries=0)
            except tinker.APIStatusError:
                pass  # The recording has the status.

    def sample_request(name, **fields):
        step(name)
        params = types.SamplingParams(max_tokens=1)
        request = types.SampleRequest(prompt=prompt, sampling_params=params, **fields)
        sampler.holder.run_coroutine_threadsafe(send(request)).result()

    sample_request("sample_request_base_model", base_model=MODEL)
    sample_request("sample_request_model_path", model_path=weights)
    sample_request("sample_request_prompt_logprobs_null", base_model=MODEL, prompt_logprobs=None)
    sample_request("sample_request_prompt_logprobs_true", base_model=MODEL, prompt_logprobs=True)
    sample_request("sample_request_prompt_logprobs_false", base_model=MODEL, prompt_logprobs=False)

    step("end")
    return tinker.__version__


def main():
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{proxy.server_address[1]}"
    os.environ["TINKER_BASE_URL"] = f"http://{address}"
    # Replace a real key of the environment, so that it is never sent.
    os.environ["TINKER_API_KEY"] = API_KEY
    os.environ["TINKER_TELEMETRY"] = "0"
    os.environ.pop("TINKER_TAGS", None)
    write(program(), [address, SERVER.netloc])
    # Exit without waiting for the background threads of the SDK.
    sys.stdout.flush()
    os._exit(0)


main()
