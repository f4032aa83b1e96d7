"""Recorders of the SDK's loops: retries, polls, heartbeats, limits and the order of requests."""

import asyncio
import contextlib
import datetime

import httpx
import tinker
from tinker import types
from tinker.lib import api_future_impl, internal_client_holder, session_futures_poller, telemetry
from tinker.lib.public_interfaces import sampling_client, training_client

from behaviour import Client, Clock, VirtualLoop, bare_holder, expanded, failure, records, replaced, settle, status_error


PROMPT = types.ModelInput.from_ints([1])


class Stop(BaseException):
    """Ends a loop when its script is over."""


@records("bytes_semaphore")
def bytes_semaphore(file):
    async def run(case):
        semaphore, log, ends, tasks = internal_client_holder.BytesSemaphore(case["max"]), [], {}, {}

        async def hold(name, size):
            async with semaphore.acquire(size):
                log.append(f"in:{name}")
                await ends[name].wait()
                log.append(f"out:{name}")

        for action, name, *size in case["ops"]:
            if action == "acquire":
                ends[name] = asyncio.Event()
                tasks[name] = asyncio.create_task(hold(name, *size))
            elif action == "release":
                ends[name].set()
            else:
                tasks[name].cancel()
            await settle()
            log.append(f"budget={semaphore._bytes}")
        return log

    for case in file["cases"]:
        case["log"] = asyncio.run(run(case))


@records("client_pool")
def client_pool(file):
    async def run(case):
        loop = asyncio.get_running_loop()
        pool = internal_client_holder.ClientConnectionPool(loop, case["max_per_client"], {})
        active, used = {}, []
        for operation in case["ops"]:
            action, name = operation[0], operation[1:]
            if action == "+":
                active[name] = pool.aclient()
                used.append(pool._clients.index(active[name].__enter__()))
            else:
                active.pop(name).__exit__(None, None, None)
                used.append(None)
        return used

    for case in file["cases"]:
        with replaced(internal_client_holder, AsyncTinker=lambda: object()):
            case["client_index"] = asyncio.run(run(case))


@records("empty_400")
def empty_400(file):
    def error(item):
        request = httpx.Request("POST", "http://127.0.0.1:1/x")
        headers = {"content-length": str(len(item["body"]))} if item["content_length_header_present"] else {}
        response = httpx.Response(item["status"], headers=headers, request=request)
        return tinker.APIStatusError("x", response=response, body=None)

    async def run(case):
        made = []

        def client():
            made.append(object())
            return made[-1]

        with replaced(internal_client_holder, AsyncTinker=client):
            pool = internal_client_holder.ClientConnectionPool(asyncio.get_running_loop(), 1, {})
            results = []
            for item in expanded(case["script"]):
                seen = "ok"
                try:
                    with pool.aclient():
                        if item != "ok":
                            raise error(item)
                except tinker.APIConnectionError:
                    seen = "connection_error"
                except tinker.APIStatusError as found:
                    seen = f"status_{found.status_code}"
                results.append([seen, pool._connection_error_retries_remaining, len(made)])
        return results

    for case in file["cases"]:
        case["result_budget_clients_made"] = asyncio.run(run(case))


@records("execute_with_retries")
def execute_with_retries(file):
    async def run(case, clock):
        holder, script, attempts = bare_holder(), list(case["script"]), []

        async def attempt():
            attempts.append(None)
            clock.now += case["seconds_per_attempt"]
            item = script.pop(0) if script else case["then_forever"]
            if item != "ok":
                raise failure(item)

        try:
            await holder.execute_with_retries(attempt)
            case["result"] = {"ok": True}
        except Exception as error:
            case["result"] = {"ok": False, "error": type(error).__name__, "status": getattr(error, "status_code", None)}
        case["attempts"] = len(attempts)

    for case in file["cases"]:
        clock = Clock()
        with clock.installed(internal_client_holder):
            asyncio.run(run(case, clock))
        is_long = len(clock.sleeps) > 100
        assert not is_long or len(set(clock.sleeps)) == 1
        case["sleeps"] = {"count": len(clock.sleeps), "each": clock.sleeps[0]} if is_long else clock.sleeps
        case["total_elapsed"] = clock.elapsed()


@records("future_retrieve")
def future_retrieve(file):
    def outcome(error):
        if isinstance(error, tinker.RequestFailedError):
            return {"outcome": "request_failed", "category": error.category.value}
        if isinstance(error, AssertionError):
            return {"outcome": "protocol_error"}
        if isinstance(error, api_future_impl.RetryableException):
            return {"outcome": "promise_expired"}
        return {"outcome": "cancelled" if isinstance(error, asyncio.CancelledError) else "fatal"}

    class Response:
        headers = {"content-type": "application/json"}

        def __init__(self, body):
            self.body = body

        async def json(self):
            return self.body

    async def run(case, clock):
        script, sent = list(case["script"]), []
        case["observer_calls"], case["bytes_acquired"], case["cancel_requests"] = [], [], []

        async def send(_, arguments):
            headers = arguments["extra_headers"]
            sent.append([headers["X-Tinker-Request-Iteration"], arguments["request"].allow_metadata_only,
                         "X-Tinker-Create-Promise-Roundtrip-Time" in headers])
            case["accept_proto"] = headers.get("Accept") == "application/x-protobuf"
            case["http_timeout"] = arguments["timeout"]
            item = script.pop(0)
            if item == "hang":
                await asyncio.Event().wait()
            if isinstance(item, dict):
                return Response(item)
            raise status_error(*item) if isinstance(item, list) else failure(item)

        class Observer:
            def on_queue_state_change(self, state, reason):
                case["observer_calls"].append([state.value, reason])

        class Budget:
            @contextlib.asynccontextmanager
            async def acquire(self, size):
                case["bytes_acquired"].append(size)
                yield

        holder = bare_holder(billing_exception_max_pause_duration_sec=20)
        holder.aclient = lambda _: Client(send)
        holder.enqueue_cancel = case["cancel_requests"].append
        holder._inflight_response_bytes_semaphore = Budget()
        future = object.__new__(api_future_impl._APIFuture)
        future.model_cls = getattr(types, case["result_type"])
        future.holder, future.untyped_future = holder, types.UntypedAPIFuture(request_id="req-1")
        future.request_type = "Sample" if case["result_type"] == "SampleResponse" else "Other"
        future._cached_result, future._futures_poller = api_future_impl._UNCOMPUTED, None
        future.request_queue_roundtrip_time, future._queue_state_observer = 0.0, Observer()
        task = asyncio.create_task(future._result_async())
        await settle()
        if not task.done():
            task.cancel()
        try:
            await task
            case["result"] = {"outcome": "success"}
        except BaseException as error:
            case["result"] = outcome(error)
        case["requests"], case["sent"], case["sleeps"] = len(sent), sent, clock.sleeps

    for case in file["cases"]:
        clock = Clock()
        with clock.installed(api_future_impl, internal_client_holder):
            asyncio.run(run(case, clock))


@records("futures_poller")
def futures_poller(file):
    async def run(case, clock):
        script, requests, waiters = list(case["script"]), [], {}

        async def send(_, arguments):
            request = arguments["request"]
            requests.append({"prev_cursor": request.prev_cursor, "retrieved": list(request.retrieved_request_ids),
                             "timeout": arguments["timeout"], "max_retries": arguments["max_retries"]})
            if not script:
                await asyncio.Event().wait()
            item = script.pop(0)
            if isinstance(item, dict):
                return types.FuturesRetrieveResponse.model_validate(item)
            raise failure(item)

        async def wait(name):
            try:
                waiters[name] = (await poller.wait_for(name)).model_dump()
            except Exception as error:
                waiters[name] = f"error:{type(error).__name__}"

        holder, tasks = bare_holder(), []
        holder.aclient, holder.track_futures_poller_task = lambda _: Client(send), tasks.append
        poller = session_futures_poller.SessionFuturesPoller(holder, sampling_session_id="s", cloned_sampler_id=0)
        await settle()
        for action, *arguments in case["actions"]:
            if action == "wait":
                tasks.append(asyncio.create_task(wait(*arguments)))
            elif action == "retrieved":
                poller.mark_retrieved(*arguments)
            await settle()
        for task in tasks:
            task.cancel()
        case["requests"], case["sleeps"], case["waiters"] = requests, clock.sleeps, waiters

    for case in file["cases"]:
        clock = Clock()
        with clock.installed(session_futures_poller, internal_client_holder):
            asyncio.run(run(case, clock))


@records("heartbeat")
def heartbeat(file):
    async def run(case, clock):
        outcomes, case["sent_at"], case["warned_at"] = list(case["outcomes"]), [], []

        async def send(_, arguments):
            if not outcomes:
                raise Stop
            case["sent_at"].append(clock.elapsed())
            case["http"] = {name: arguments[name] for name in ("max_retries", "timeout")}
            if (item := outcomes.pop(0)) != "ok":
                clock.now += case["failure_latency"]
                raise failure(item)

        holder = bare_holder()
        holder.aclient = lambda _: Client(send)
        try:
            await holder._session_heartbeat("s")
            case["end"] = "stopped"
        except Stop:
            case["end"] = "still_running"

    for case in file["cases"]:
        clock = Clock()

        def warned(*_, clock=clock, case=case):
            case["warned_at"].append(clock.elapsed())

        with clock.installed(internal_client_holder), replaced(internal_client_holder.logger, warning=warned):
            run_until_stopped(run(case, clock))


def run_until_stopped(coroutine):
    """Runs a coroutine step by step. `asyncio.run` would pass on the exception that ends a script."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


class Future:
    """Stands in for the future of a request whose result does not matter."""

    def __init__(self, model, *_, **__):
        self.result = model

    async def result_async(self, timeout=None):
        return self.result

    def __await__(self):
        return self.result_async().__await__()


def sampler_with(clock, script, posts, **state):
    """Returns a sampling client whose requests get the outcomes of a script."""

    async def send(_, arguments):
        outcome = script.pop(0)
        posts.append([clock.elapsed(), arguments["request"].seq_id, outcome])
        if outcome != "ok":
            raise failure(outcome)
        return types.UntypedAPIFuture(request_id="r", sample_sequence_ids=[])

    holder = bare_holder()
    holder.aclient = lambda _: Client(send)
    holder._sample_dispatch_semaphore = asyncio.Semaphore(400)
    holder._sample_dispatch_throttled_semaphore = asyncio.Semaphore(10)
    holder._sample_dispatch_bytes_semaphore = internal_client_holder.BytesSemaphore(10 * 1024 * 1024)
    for name, value in state.items():
        setattr(holder, name, value)
    return sampling_client.SamplingClient(holder, sampling_session_id="s")


async def take_sample(client):
    response = types.SampleResponse(sequences=[])
    with replaced(sampling_client, _APIFuture=lambda *_, **__: Future(response)):
        return await client._sample_async_impl(PROMPT, 1, types.SamplingParams(), False)


@records("sampling_backoff")
def sampling_backoff(file):
    async def run(case, clock):
        posts = []
        client = sampler_with(clock, list(case["script"]), posts)
        client.holder.estimate_bytes_count_in_model_input = lambda _: case["estimated_bytes"]
        try:
            for _ in range(case["samples"]):
                await take_sample(client)
            case["result"] = "ok"
        except Exception as error:
            case["result"] = type(error).__name__
        case["posts_time_seq_outcome"], case["sleeps"] = posts, clock.sleeps

    for case in file["cases"]:
        clock = Clock()
        with clock.installed(sampling_client, internal_client_holder):
            asyncio.run(run(case, clock))


class LoopClock(Clock):
    """Clock that shows the time of an event loop."""

    def __init__(self, loop):
        self.loop, self.start, self.sleeps = loop, 0.0, []

    @property
    def now(self):
        return self.loop.time()


@records("sampling_concurrency")
def sampling_concurrency(file):
    async def run(case, clock):
        limited, posts, active, most = dict(case["limited"]), [], 0, 0

        async def send(_, arguments):
            nonlocal active, most
            number = arguments["request"].seq_id
            left = limited.get(str(number), 0)
            limited[str(number)] = left - 1
            outcome = 429 if left > 0 else "ok"
            posts.append([round(clock.now, 3), number, outcome])
            active += 1
            most = max(most, active)
            await asyncio.sleep(case["response_seconds"])
            active -= 1
            if outcome != "ok":
                raise failure(outcome)
            return types.UntypedAPIFuture(request_id="r", sample_sequence_ids=[])

        client = sampler_with(clock, [], [])
        client.holder.aclient = lambda _: Client(send)
        client.holder.estimate_bytes_count_in_model_input = lambda _: case["estimated_bytes"]
        tasks = []
        for time, count in case["submitted"]:
            await asyncio.sleep(time - clock.now)
            tasks += [asyncio.create_task(client._sample_async_impl(PROMPT, 1, types.SamplingParams(), False)) for _ in range(count)]
        await asyncio.gather(*tasks)
        # The order of requests at the same time has no meaning.
        case["posts_time_seq_outcome"] = sorted(posts, key=lambda post: post[:2])
        case["max_in_flight"] = most
        case["finished_at"] = round(clock.now, 3)

    response = types.SampleResponse(sequences=[])
    for case in file["cases"]:
        loop = VirtualLoop()
        clock = LoopClock(loop)
        modules = (sampling_client, internal_client_holder)
        with clock.installed(*modules, only_time=True), replaced(sampling_client, _APIFuture=lambda *_, **__: Future(response)):
            loop.run_until_complete(run(case, clock))
        loop.close()


@records("sampling_recent_backoff")
def sampling_recent_backoff(file):
    class Counting:
        """Semaphore that counts how often it is used."""

        used = 0

        async def __aenter__(self):
            self.used += 1

        async def __aexit__(self, *_):
            return None

    class Budget:
        @contextlib.asynccontextmanager
        async def acquire(self, size):
            self.size = size
            yield

    async def run(case, clock):
        state = {"_sample_backoff_until": case["backoff_until"], "_sample_dispatch_throttled_semaphore": Counting(),
                 "_sample_dispatch_bytes_semaphore": Budget()}
        client = sampler_with(clock, ["ok"], [], **state)
        client.holder.estimate_bytes_count_in_model_input = lambda _: 1
        case["recent"] = client.holder._sample_backoff_requested_recently()
        await take_sample(client)
        case["must_wait"] = bool(clock.sleeps)
        case["byte_multiplier"] = client.holder._sample_dispatch_bytes_semaphore.size
        case["throttled_semaphore_used"] = client.holder._sample_dispatch_throttled_semaphore.used > 0

    for case in file["cases"]:
        clock = Clock(case["now"])
        with clock.installed(sampling_client, internal_client_holder):
            asyncio.run(run(case, clock))


@records("turn_taking")
def turn_taking(file):
    async def run(case):
        log, calls, failing = [], [], set()
        holder = bare_holder(parallel_fwdbwd_chunks=case["parallel_chunks"], fwdbwd_max_chunk_len=1)
        holder._loop = asyncio.get_running_loop()
        holder._fwdbwd_dispatch_bytes_semaphore = internal_client_holder.BytesSemaphore(50_000_000)

        async def send(_, arguments):
            number = arguments["request"].seq_id
            log.append(f"start {number}")
            for _ in range(10):
                await asyncio.sleep(0)
            if number in failing:
                log.append(f"fail {number}")
                raise status_error(400)
            log.append(f"done {number}")
            return types.UntypedAPIFuture(request_id="r")

        holder.aclient = lambda _: Client(send)
        client = training_client.TrainingClient(holder, 0, "m")
        datum = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={})
        for action, *arguments in case["ops"]:
            if action == "fb":
                count, *options = arguments
                first = client._request_id_counter + 1
                failing |= {first + int(number) for option in options for number in option}
                calls.append(client.forward_backward([datum] * count, "cross_entropy").future())
            elif action == "optim":
                calls.append(client.optim_step(types.AdamParams()).future())
            else:
                for _ in range(5):
                    await asyncio.sleep(0)
                calls[arguments[0]].cancel()
        for _ in range(10):
            await settle()
        case["log"], case["calls"] = log, [state(call) for call in calls]

    def state(call):
        if not call.done():
            return "pending"
        return "cancelled" if call.cancelled() else "error" if call.exception() else "ok"

    output = types.ForwardBackwardOutput(loss_fn_output_type="", metrics={}, loss_fn_outputs=[])
    for case in file["cases"]:
        with replaced(training_client, _APIFuture=lambda *_, **__: Future(output)):
            asyncio.run(run(case))


@records("telemetry_events")
def telemetry_events(file):
    loop = asyncio.new_event_loop()

    class Provider:
        def get_loop(self):
            return loop

    def shown(event):
        found = event.model_dump(exclude_none=True, mode="json")
        for name in ("event_id", "timestamp", "traceback"):
            found.pop(name, None)
        if "duration" in found:
            found["duration"] = "<H:MM:SS.ffffff>"
        return found

    def caused_by_404():
        try:
            try:
                raise status_error(404)
            except tinker.APIStatusError as cause:
                raise ValueError("wrapped") from cause
        except ValueError as error:
            return error

    def events(case):
        recorder = telemetry.Telemetry(Provider(), "s")
        recorder.log("my.event", event_data={"k": 1}, severity="WARNING")
        recorder._log(recorder._exception_or_user_error_event(ValueError("boom"), "ERROR"))
        recorder._log(recorder._exception_or_user_error_event(caused_by_404(), "ERROR"))
        recorder._log(recorder._session_end_event())
        failed = tinker.RequestFailedError("rf", request_id="r", category=types.RequestErrorCategory.User)
        recorder._log(recorder._exception_or_user_error_event(failed, "ERROR"))
        case["events"] = [shown(event) for event in recorder._queue]

    def sessionless(case):
        recorder = telemetry.Telemetry(Provider(), None)
        case["initial_events"] = len(recorder._queue)
        case["session_id_prefix"] = recorder._session_id.split("-")[0] + "-"
        case["fatal_event_types"] = [event.event for event in recorder._fatal_events(ValueError("x"), "ERROR")]

    def queue_cap(case):
        recorder = telemetry.Telemetry(Provider(), "s")
        event = recorder._queue[0]
        case["start"] = len(recorder._queue)
        case["accepted"] = [recorder._log(*[event] * size) for size in case["push_sizes"]]
        case["final_len"] = len(recorder._queue)

    def flush(case):
        recorder = telemetry.Telemetry(Provider(), None)
        event = recorder._generic_event("x")
        recorder._log(*[event] * case["queued"])
        case["batches"] = []

        async def send(batch):
            case["batches"].append(len(batch.events))

        recorder._send_batch_with_retry = send
        asyncio.run(recorder._flush())

    recorders = {"events": events, "sessionless": sessionless, "queue_cap": queue_cap, "flush": flush}
    for case in file["cases"]:
        recorders[case["id"]](case)
    for case in file["duration_text"]:
        # The event has the text of a Python duration.
        case["text"] = str(datetime.timedelta(microseconds=case["microseconds"]))
