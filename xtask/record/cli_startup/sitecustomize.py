"""Prepares the Python process of a recorded command. Python imports this module at start-up.

Waiting between retries takes no time: a sleep of the SDK returns at once and moves the SDK's clock.
With RECORD_SHORT_TIMEOUTS, read timeouts are a twentieth of what the SDK asks for, as are the waits of
the recording server.
The jitter of delays is the same in every run, and so is the name of the host.
"""

import asyncio
import os
import random
import socket
import sys
import time as real_time
import types

SCALE = 20
# Functions that run beside the calls. Their sleeps must take time, or they would use all of it.
BACKGROUND = {
    "_session_heartbeat",
    "_client_dynamic_config_refresh_loop",
    "_refresh_loop",
    "_send_batch_with_retry",
}
# Shorter sleeps are waits for another task.
SHORTEST_DELAY = 0.25


class Clock(types.ModuleType):
    """Stands in for the module `time` in the modules of the SDK."""

    now = real_time.time()

    def __getattr__(self, name):
        return getattr(real_time, name)

    def time(self):
        return self.now

    monotonic = time

    def sleep(self, seconds):
        self.now += seconds


CLOCK = Clock("time")


def sleeps_at_once(sleep):
    def skipping(delay, *arguments):
        caller = sys._getframe(1)
        of_sdk = caller.f_globals.get("__name__", "").startswith("tinker.")
        if of_sdk and delay >= SHORTEST_DELAY and caller.f_code.co_name not in BACKGROUND:
            CLOCK.now += delay
            delay = 0
        return sleep(delay, *arguments)

    return skipping


def prepare():
    random.seed(0)
    socket.gethostname = lambda: "myhost"

    import anyio
    import httpx
    import tinker._base_client
    import tinker.lib.public_interfaces

    asyncio.sleep = sleeps_at_once(asyncio.sleep)
    anyio.sleep = sleeps_at_once(anyio.sleep)
    for name, module in list(sys.modules.items()):
        if name.startswith("tinker.") and getattr(module, "time", None) is real_time:
            module.time = CLOCK

    if "RECORD_SHORT_TIMEOUTS" in os.environ:
        shorten_timeouts(httpx)


def shorten_timeouts(httpx):
    send = httpx.AsyncHTTPTransport.handle_async_request

    async def with_short_timeout(self, request):
        limits = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {**limits, "read": limits.get("read") and limits["read"] / SCALE}
        try:
            return await send(self, request)
        except httpx.ReadTimeout:
            CLOCK.now += limits["read"]
            raise

    httpx.AsyncHTTPTransport.handle_async_request = with_short_timeout


prepare()
