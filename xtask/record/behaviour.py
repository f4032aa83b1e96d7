"""Records how parts of the Python SDK behave: decisions, delays and loops.

    python behaviour.py FIXTURES FOLDER [NAME...]

A recorder takes a file of FIXTURES/behaviour, runs the SDK with the inputs of each case and replaces
the results. Inputs, descriptions and notes stay as they are. `behaviour_values.py` has the functions
of a value, `behaviour_loops.py` the loops, which run under a virtual clock.
"""

import asyncio
import contextlib
import logging
import math
import os
import sys
import time as real_time
import types as python_types
import warnings

import common

RECORDERS = {}
REQUEST_URL = "http://127.0.0.1:1/x"


def records(name):
    """Registers a function that replaces the results of the fixture `name`."""

    def register(function):
        RECORDERS[name] = function
        return function

    return register


class Clock:
    """Virtual time for the modules of the SDK. Sleeping moves it and is recorded."""

    def __init__(self, now=1000.0):
        self.now = self.start = now
        self.sleeps = []

    @contextlib.contextmanager
    def installed(self, *modules, only_time=False):
        """Replaces `time` and `asyncio.sleep` in modules of the SDK; `only_time` keeps the latter."""
        clock, before = self, [(module, dict(vars(module))) for module in modules]

        class Time(python_types.ModuleType):
            def __getattr__(self, name):
                return getattr(real_time, name)

            def time(self):
                return clock.now

            monotonic = time

        class Asyncio(python_types.ModuleType):
            def __getattr__(self, name):
                return getattr(asyncio, name)

            async def sleep(self, delay):
                clock.sleeps.append(delay)
                clock.now += delay
                await asyncio.sleep(0)

        for module in modules:
            if hasattr(module, "time"):
                module.time = Time("time")
            if hasattr(module, "asyncio") and not only_time:
                module.asyncio = Asyncio("asyncio")
        try:
            yield self
        finally:
            for module, names in before:
                for name in ("time", "asyncio"):
                    if name in names:
                        setattr(module, name, names[name])

    def elapsed(self):
        return self.now - self.start


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose time moves to the next timer instead of waiting, for concurrent tasks.

    There must be no input and output: a wait for it would end at once.
    """

    def __init__(self):
        super().__init__()
        self.now = 0.0
        select = self._selector.select

        def skip(timeout):
            self.now += timeout or 0
            return select(0)

        self._selector.select = skip

    def time(self):
        return self.now


@contextlib.contextmanager
def replaced(owner, **attributes):
    """Sets attributes for the time of a block."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def environment(**variables):
    """Sets environment variables for the time of a block; `None` removes one."""
    before = {name: os.environ.get(name) for name in variables}

    def apply(values):
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    apply(variables)
    try:
        yield
    finally:
        apply(before)


@contextlib.contextmanager
def logged(module):
    """Collects the messages that a module of the SDK logs."""
    messages = []

    class Handler(logging.Handler):
        def emit(self, record):
            messages.append((record.levelname, record.getMessage()))

    handler = Handler()
    module.logger.addHandler(handler)
    try:
        yield messages
    finally:
        module.logger.removeHandler(handler)


def status_error(status, body=None):
    """Returns the error of a response with this status."""
    import httpx
    import tinker

    request = httpx.Request("POST", REQUEST_URL)
    content = {} if body is None else {"json": body}
    response = httpx.Response(status, request=request, **content)
    return tinker.APIStatusError(f"status {status}", response=response, body=body)


def failure(item):
    """Returns the error that a script names."""
    import httpx
    import tinker

    request = httpx.Request("POST", REQUEST_URL)
    return {
        "conn": lambda: tinker.APIConnectionError(request=request),
        "timeout": lambda: tinker.APITimeoutError(request=request),
        "asyncio_timeout": asyncio.TimeoutError,
        "value_error": lambda: ValueError("x"),
    }[item]() if isinstance(item, str) else status_error(item)


def expanded(script):
    """Returns a list that a fixture may abbreviate as `{"repeat": item, "count": number}`."""
    return [script["repeat"]] * script["count"] if isinstance(script, dict) else script


def finite(value):
    """Replaces numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"nonfinite": str(value)}
    return value


def bare_holder(**config):
    """Returns the SDK's shared state without connections and background tasks."""
    from tinker import types
    from tinker.lib import internal_client_holder as module

    holder = object.__new__(module.InternalClientHolder)
    holder._client_config = types.ClientConfigResponse.model_validate(config)
    holder._client_dynamic_config = types.ClientDynamicConfigResponse()
    holder._telemetry = None
    holder._first_billing_exception_time = None
    holder._last_logged_billing_exception_time = None
    holder._sample_backoff_until = None
    return holder


class Client:
    """Stands in for a connection: every resource method calls `send(method, keyword arguments)`."""

    def __init__(self, send):
        self._send = send

    def __getattr__(self, name):
        return Resource(self._send)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class Resource:
    def __init__(self, send):
        self._send = send

    def __getattr__(self, method):
        if method == "with_raw_response":
            return self

        async def call(**arguments):
            return await self._send(method, arguments)

        return call


async def settle():
    """Lets all tasks run until they wait for something that does not come."""
    for _ in range(100):
        await asyncio.sleep(0)


def main(fixtures, folder, *only):
    import behaviour_loops  # noqa: F401
    import behaviour_values  # noqa: F401

    warnings.simplefilter("ignore")
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD", "TINKER_TELEMETRY", "TINKER_TAGS"):
        os.environ.pop(name, None)
    os.makedirs(folder, exist_ok=True)
    failures = {}
    for name, recorder in RECORDERS.items():
        if only and name not in only:
            continue
        file = common.load(fixtures, "behaviour", f"{name}.json")
        try:
            recorder(file)
        except Exception as error:
            if "RECORD_DEBUG" in os.environ:
                raise
            failures[name] = f"{type(error).__name__}: {error}"
            continue
        common.save(folder, f"{name}.json", finite(file))
    common.finish(folder, failures, f"{len(RECORDERS) - len(failures)} files of behaviour")


if __name__ == "__main__":
    # The recorders import this module by its name.
    import behaviour

    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    logging.getLogger("tinker").addHandler(logging.NullHandler())
    behaviour.main(*sys.argv[1:])
