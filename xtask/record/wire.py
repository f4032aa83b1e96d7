"""Records every kind of request of the Python SDK, answered with the responses of `fixtures/wire`.

    python wire.py FIXTURES FOLDER [SCENE...]

A scene is a program that uses the SDK, in a process of its own. Its script names, for each route,
the exchanges in the order in which the SDK makes them. The recording server answers with
`<name>.response.json`, which is written by hand, and records the request as `<name>.request.json`.
The decoded forms of protobuf messages are written too. Values that differ between runs are
replaced; see `Normalizer`.
"""

import base64
import collections
import http.server
import json
import logging
import os
import re
import sys
import threading
import warnings

import common
import protobuf

SESSION = "11111111-2222-4333-8444-555555555555"
SAMPLER = f"{SESSION}:sample:0"
MODEL = f"{SESSION}:train:0"
CHECKPOINT = f"tinker://{MODEL}/weights/ck1"
API_KEY = "tml-recorded"
ACCESS_TOKEN = "weights-token"
LIMIT_SECONDS = 60
SCENES = {}


def b64url(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


JWT = f"{b64url({'alg': 'none'})}.{b64url({'exp': 4070908800, 'sub': 'tml:organization_user:u1', 'org_id': 'o', 'email': 'a@b.c', 'iss': 'passport-x'})}.s"


def scene(function):
    SCENES[function.__name__] = function
    return function


class Unrecorded(str):
    """Name of an exchange whose response is used without recording the request."""


class Script:
    """The exchanges of a scene by route, and what was recorded."""

    def __init__(self, responses):
        self.responses = responses
        self.exchanges = collections.defaultdict(collections.deque)
        self.recorded = []
        self.unexpected = []
        self.failures = {}
        self.changed = threading.Condition()
        self.defaults = {
            "POST client/config": {},
            "POST client/dynamic_config": {},
            "POST create_session": {"type": "create_session", "session_id": SESSION},
            "POST session_heartbeat": {"type": "session_heartbeat"},
            "POST telemetry": {"status": "accepted"},
        }

    def expect(self, route, *names):
        """Answers the next requests to `route` with exchanges: names, or responses that are not recorded."""
        with self.changed:
            self.exchanges[route].extend(names)

    def attempt(self, route, name, call):
        """Records one exchange whose failure does not end the scene."""
        self.expect(route, name)
        try:
            call()
        except Exception as failure:
            self.exchanges[route].clear()
            self.failures[name] = f"{type(failure).__name__}: {failure}"

    def configure(self, **flags):
        """Sets the feature flags that the server announces."""
        self.defaults["POST client/config"] = flags

    def answer(self, route, request):
        with self.changed:
            waiting = self.exchanges[route]
            name = waiting.popleft() if waiting else None
            if isinstance(name, str) and not isinstance(name, Unrecorded):
                self.recorded.append((name, request))
            elif name is None and route not in self.defaults:
                self.unexpected.append(route)
            self.changed.notify_all()
        if isinstance(name, str):
            return self.responses(name)
        body = name if name is not None else self.defaults.get(route)
        if callable(body):
            body = body(request)
        if body is None:
            return 404, {"content-type": "application/json"}, b'{"detail": "no route"}'
        return 200, {"content-type": "application/json"}, json.dumps(body).encode()

    def wait_until_done(self):
        """Waits until all expected exchanges were made."""
        with self.changed:
            done = lambda: not any(self.exchanges.values())
            if not self.changed.wait_for(done, LIMIT_SECONDS):
                raise TimeoutError(f"not requested: {[list(names) for names in self.exchanges.values() if names]}")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def serve(self):
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        route = f"{self.command} {self.path.split('?')[0].removeprefix('/api/v1/')}"
        request = {"method": self.command, "path": self.path, "headers": [(n.lower(), v) for n, v in self.headers.items()], "raw": raw}
        status, headers, body = self.server.script.answer(route, request)
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("content-length", str(len(body)))
            self.end_headers()
            if status != 204:
                self.wfile.write(body)
        except OSError:
            pass  # The scene ended.

    do_GET = do_POST = do_PUT = do_DELETE = serve


class Responses:
    """The responses of the fixtures."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, name):
        response = common.load(self.folder, f"{name}.response.json")
        if "body_base64" in response:
            raw = base64.b64decode(response["body_base64"])
        else:
            raw = b"" if response["body"] is None else json.dumps(response["body"]).encode()
        raw = re.sub(rb"<jwt:[^>]*>", JWT.encode(), raw)
        return response["status"], response["headers"], raw


class Normalizer:
    """Replaces values that differ between runs by fixed ones."""

    HEADERS = {
        "x-stainless-os": "<os>",
        "x-stainless-arch": "<arch>",
        "x-stainless-runtime-version": "<python-version>",
        "x-tinker-create-promise-roundtrip-time": "<seconds-float>",
        "host": "<host>",
    }
    # Fields of telemetry events, which have the types of the real values.
    FIELDS = {
        "timestamp": "2026-01-02T03:04:05.000006Z",
        "duration": "0:00:12.000345",
        "start_time": 1767323045.25,
        "current_time": 1767323045.5,
        "elapsed_time": 0.25,
        "exception_stack": "<python traceback text>",
        "traceback": "<python traceback text>",
        "platform": "Linux",
    }
    UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

    def __init__(self):
        self.ids = {SESSION: SESSION}

    def text(self, text):
        number = lambda found: self.ids.setdefault(found.group(), f"00000000-0000-4000-8000-{len(self.ids):012}")
        text = self.UUID.sub(number, text)
        for value, shown in ((API_KEY, "<api-key>"), (JWT, "<jwt>"), (ACCESS_TOKEN, "<weights-access-token>")):
            text = text.replace(value, shown)
        return text

    def header(self, name, value):
        if name == "x-idempotency-key":
            return self.UUID.sub("<uuid4>", value)
        value = re.sub(r"(python-httpx)/[\d.]+", r"\1/<version>", value)
        return self.HEADERS.get(name) or self.text(value)

    def value(self, value, name=None):
        if name in self.FIELDS and value is not None:
            return self.FIELDS[name]
        if isinstance(value, dict):
            return {key: self.value(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        return self.text(value) if isinstance(value, str) else value



def recorded_request(normalizer, request):
    """Returns the request as a fixture, and the protobuf message of its body."""
    import zstandard

    headers = {name: normalizer.header(name, value) for name, value in request["headers"]}
    shown = {"method": request["method"], "path": normalizer.text(request["path"]), "headers": headers}
    raw = request["raw"]
    if headers.get("content-type") != "application/x-protobuf":
        body = json.loads(raw) if raw else None
        shown["body"] = normalizer.value(body)
        if shown["body"] != body:
            headers["content-length"] = str(len(json.dumps(shown["body"], separators=(",", ":"), ensure_ascii=False).encode()))
        return shown, None
    is_compressed = headers.get("content-encoding") == "zstd"
    message = protobuf.parsed("ForwardBackwardRequest", protobuf.decompressed(raw) if is_compressed else raw)
    # The order of map entries differs between processes.
    raw = message.SerializeToString(deterministic=True)
    if is_compressed:
        raw = zstandard.ZstdCompressor().compress(raw)
        headers["content-length"] = str(len(raw))
    return {**shown, "body_base64": base64.b64encode(raw).decode()}, message


def write(folder, script):
    normalizer = Normalizer()
    for name, request in script.recorded:
        shown, message = recorded_request(normalizer, request)
        common.save(folder, f"{name}.request.json", shown)
        if message is not None:
            common.save(folder, f"{name}.request.decoded.json", protobuf.request(message))


def write_decoded_responses(responses, folder):
    """Decodes the protobuf responses. The type of a message follows from its file name."""
    for file in sorted(os.listdir(responses.folder)):
        name = file.removesuffix(".response.json")
        if name == file or "body_base64" not in (response := common.load(responses.folder, file)):
            continue
        raw = base64.b64decode(response["body_base64"])
        if response["headers"].get("content-encoding") == "zstd":
            raw = protobuf.decompressed(raw)
        is_pass = "forward" in name
        show = protobuf.training_output if is_pass else protobuf.sample_output
        kind = "ForwardBackwardOutput" if is_pass else "SampleResponse"
        common.save(folder, f"{name}.response.decoded.json", show(protobuf.parsed(kind, raw)))


def run_scene(name, fixtures, folder):
    """Runs a scene in this process and exits."""
    script = Script(Responses(os.path.join(fixtures, "wire")))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.script = script
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["TINKER_BASE_URL"] = f"http://127.0.0.1:{server.server_address[1]}"
    failures = script.failures

    def give_up():
        common.save(folder, f"failed-{name}.json", {f"scene {name}": f"not finished within {2 * LIMIT_SECONDS} seconds"})
        os._exit(0)

    limit = threading.Timer(2 * LIMIT_SECONDS, give_up)
    limit.daemon = True
    limit.start()
    try:
        SCENES[name](script)
        script.wait_until_done()
        if script.unexpected:
            failures[f"scene {name}"] = f"unexpected requests: {script.unexpected}"
    except BaseException as failure:
        # The exchanges of a scene depend on each other, so one failure ends the rest of the scene.
        failures[f"scene {name}"] = f"{type(failure).__name__}: {failure}"
    write(folder, script)
    if failures:
        common.save(folder, f"failed-{name}.json", failures)
    sys.stdout.flush()
    os._exit(0)


def main(fixtures, folder, *only):
    # Import the SDK once. Each scene runs in a copy of this process.
    import tinker  # noqa: F401
    from tinker.lib.public_interfaces import service_client  # noqa: F401
    import wire_scenes  # noqa: F401

    logging.disable()
    warnings.simplefilter("ignore")
    os.environ.update({"TINKER_API_KEY": API_KEY, "HOME": folder})
    os.environ.pop("TINKER_TAGS", None)
    os.makedirs(folder, exist_ok=True)
    children = {}
    for name in only or SCENES:
        if (process := os.fork()) == 0:
            run_scene(name, fixtures, folder)
        children[process] = name
    for _ in children:
        process, status = os.wait()
        assert status == 0, f"{children[process]} ended with status {status}"
    write_decoded_responses(Responses(os.path.join(fixtures, "wire")), folder)
    failures = {}
    for file in sorted(file for file in os.listdir(folder) if file.startswith("failed-")):
        failures |= common.load(folder, file)
        os.remove(os.path.join(folder, file))
    count = sum(file.endswith(".request.json") for file in os.listdir(folder))
    common.finish(folder, failures, f"{count} requests")


if __name__ == "__main__":
    # The scenes import this module by its name.
    import wire

    wire.main(*sys.argv[1:])
