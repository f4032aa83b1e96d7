"""The programs whose requests `wire.py` records. Names of exchanges are names of fixtures."""

import base64
import datetime
import os
import time

import numpy as np
import tinker
from tinker import types
from tinker.lib import public_interfaces

from wire import ACCESS_TOKEN, API_KEY, CHECKPOINT, MODEL, SAMPLER, SESSION, Unrecorded, scene

BASE_MODEL = "Qwen/Qwen3-8B"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DMEL = base64.b64decode("AAIDAQkJCQ==")
PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])
POINTER = types.ImageAssetPointerChunk(format="png", location="https://example.invalid/a.png", expected_tokens=5)
ONE_TOKEN = types.SamplingParams(max_tokens=1)
# Responses to polls that are not recorded.
SUCCESS = Unrecorded("retrieve_future_asample_minimal")
PENDING = {"type": "try_again", "request_id": "r"}


def slow(body):
    """Returns a response that takes a second, so that the SDK does not poll all the time."""

    def respond(_):
        time.sleep(1)
        return body

    return respond


def sampled(number):
    """Returns the future of a sample."""
    return {"request_id": f"{SAMPLER}:{number}", "sample_sequence_ids": ["x"]}


def int64(values, shape=None):
    return types.TensorData(data=values, dtype="int64", shape=shape or [len(values)])


def float32(values, shape=None):
    return types.TensorData(data=values, dtype="float32", shape=shape or [len(values)])


def repeated(token, length=50):
    inputs = {"target_tokens": int64([token] * length), "weights": float32([1.0] * length)}
    return types.Datum(model_input=types.ModelInput.from_ints([token] * length), loss_fn_inputs=inputs)


def dense_datum():
    inputs = {"weights": float32([0.0, 1.0, 1.0, 0.5]), "target_tokens": int64([2, 3, 4, 5])}
    return types.Datum(model_input=PROMPT, loss_fn_inputs=inputs)


def create_model(script, service):
    """Creates a model without recording it."""
    script.expect("POST create_model", {"request_id": f"{MODEL}:0", "model_id": MODEL})
    script.expect("POST retrieve_future", {"type": "create_model", "model_id": MODEL})
    return service.create_lora_training_client(base_model=BASE_MODEL)


def create_sampler(script, service, **options):
    script.expect("POST create_sampling_session", {"type": "create_sampling_session", "sampling_session_id": SAMPLER})
    return service.create_sampling_client(base_model=BASE_MODEL, **options)


@scene
def start(script):
    script.expect("POST client/config", "client_config")
    script.expect("POST client/dynamic_config", "client_dynamic_config")
    script.expect("POST create_session", "create_session_minimal")
    script.expect("GET get_server_capabilities", "get_server_capabilities")
    script.expect("POST session_heartbeat", "session_heartbeat")
    service = tinker.ServiceClient()
    service.holder.get_session_id()
    service.get_server_capabilities()
    # The heartbeat is sent after ten seconds.
    script.wait_until_done()
    script.expect(f"POST sessions/{SESSION}/finish", "session_finish_null_detail")
    service.close("errored").result()


@scene
def named_session(script):
    os.environ["TINKER_TAGS"] = "a,b"
    script.expect("POST create_session", "create_session")
    service = tinker.ServiceClient(user_metadata={"k": "v"}, project_id="proj-1", display_name="fixture run")
    service.holder.get_session_id()
    script.expect(f"POST sessions/{SESSION}/finish", "session_finish")
    service.close("success", detail="done").result()


@scene
def health(script):
    holder = tinker.ServiceClient().holder
    script.expect("GET healthz", "healthz")

    async def check():
        from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

        with holder.aclient(ClientConnectionPoolType.SESSION) as client:
            await client.service.health_check()

    holder.run_coroutine_threadsafe(check()).result()


@scene
def jwt(script):
    script.configure(pjwt_auth_enabled=True)
    script.expect("POST auth/token", "auth_token")
    script.expect("POST client/dynamic_config", "client_dynamic_config_with_jwt")
    tinker.ServiceClient().holder.get_session_id()


@scene
def training(script):
    service = tinker.ServiceClient()
    script.expect("POST create_model", "create_model_lora")
    script.expect("POST retrieve_future", "retrieve_future_create_model")
    model = service.create_lora_training_client(base_model=BASE_MODEL, rank=16, seed=7, user_metadata={"exp": "1"})
    script.expect("POST get_info", "get_info")
    model.get_info()

    script.expect("POST forward_backward", "forward_backward_dense")
    script.expect("POST retrieve_future", "retrieve_future_forward_backward")
    model.forward_backward([dense_datum()], "cross_entropy").result()

    script.expect("POST forward_backward", "forward_backward_multimodal_sparse")
    script.expect("POST retrieve_future", "retrieve_future_forward_backward_rank2")
    sparse = {"shape": [3, 4], "sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [2, 0, 3]}
    chunk = types.EncodedTextChunk
    data = [
        types.Datum(
            model_input=types.ModelInput(chunks=[chunk(tokens=[10, 11]), types.ImageChunk(data=PNG, format="png", expected_tokens=1)]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=[7, 8, 9], dtype="int64", **sparse),
                "weights": types.TensorData(data=[0.25, 0.5, 0.75], dtype="float32", **sparse),
            },
        ),
        types.Datum(
            model_input=types.ModelInput(
                chunks=[chunk(tokens=[-1, 2147483647]), types.ImageChunk(data=PNG, format="jpeg"), types.DmelChunk(dmel=DMEL)]
            ),
            loss_fn_inputs={
                "advantages": np.array([0.5, -0.5], dtype=np.float64),
                "logprobs": np.array([-1.0, np.nan], dtype=np.float64),
                "target_tokens": np.array([5, 6], dtype=np.int32),
            },
        ),
        types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": int64([2, 3, 4])},
            model_input_spans=[
                types.PromptProvenanceSpan(sequence_id="seq-a", offset=0, length=2),
                types.SampledProvenanceSpan(sequence_id="seq-a", offset=0, length=1),
            ],
            loss_fn_input_spans=[
                types.PromptProvenanceSpan(sequence_id="seq-a", offset=1, length=1),
                types.SampledProvenanceSpan(sequence_id="seq-a", offset=0, length=2),
            ],
        ),
    ]
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "int_value": 3, "note": "text-value"}
    model.forward_backward(data, "ppo", loss_fn_config=config).result()

    # Fails without a request and uses a sequence number.
    datum = types.Datum(model_input=types.ModelInput(chunks=[POINTER]), loss_fn_inputs={"target_tokens": int64([1])})
    expect_failure(lambda: model.forward_backward([datum], "cross_entropy").result())

    script.expect("POST forward_backward", "forward")
    script.expect("POST retrieve_future", "retrieve_future_forward")
    model.forward([dense_datum()], "cross_entropy").result()
    script.expect("POST optim_step", "optim_step_adam")
    script.expect("POST retrieve_future", "retrieve_future_optim_step")
    model.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    script.expect("POST optim_step", "optim_step_dimuon")
    script.expect("POST retrieve_future", {})
    model.optim_step(types.DimuonParams(learning_rate=1e-4)).result()
    script.expect("POST save_weights", "save_weights")
    script.expect("POST retrieve_future", "retrieve_future_save_weights")
    model.save_state("ck1").result()
    script.expect("POST save_weights", "save_weights_full")
    script.expect("POST retrieve_future", {"type": "save_weights", "path": CHECKPOINT})
    model.save_state("ck1", ttl_seconds=3600, overwrite=True, user_metadata={"a": "b"}).result()
    script.expect("POST save_weights_for_sampler", "save_weights_for_sampler_named")
    script.expect("POST retrieve_future", "retrieve_future_save_weights_for_sampler_named")
    model.save_weights_for_sampler("s1", ttl_seconds=7200, user_metadata={"a": "b"}).result()
    script.expect("POST save_weights_for_sampler", "save_weights_for_sampler_ephemeral")
    script.expect("POST retrieve_future", "retrieve_future_save_weights_for_sampler_ephemeral")
    model.save_weights_and_get_sampling_client()
    script.expect("POST save_weights_external", "save_weights_external")
    script.expect("POST retrieve_future", "retrieve_future_save_weights_external")
    model.save_weights_external("e1", ttl_seconds=3600, age_encryption_recipients=["age1xyz"]).result()
    loaded = {"type": "load_weights", "path": CHECKPOINT, "model_id": MODEL}
    script.expect("POST load_weights", "load_weights")
    script.expect("POST retrieve_future", "retrieve_future_load_weights")
    model.load_state(CHECKPOINT).result()
    script.expect("POST load_weights", "load_weights_with_optimizer")
    script.expect("POST retrieve_future", loaded)
    model.load_state_with_optimizer(CHECKPOINT).result()
    script.expect("POST load_weights", "load_weights_access_token")
    script.expect("POST retrieve_future", loaded)
    model.load_state(CHECKPOINT, weights_access_token=ACCESS_TOKEN).result()


def expect_failure(call):
    try:
        call()
    except Exception:
        return
    raise AssertionError("the call did not fail")


@scene
def more_models(script):
    service = tinker.ServiceClient()
    create_model(script, service)
    script.expect("POST create_model", "create_model_defaults_dimuon")
    script.expect("POST retrieve_future", {"type": "create_model", "model_id": f"{SESSION}:train:1"})
    service.create_lora_training_client(base_model=BASE_MODEL, optimizer=types.DimuonOptimizerConfig())
    script.expect("POST weights_info", "weights_info")
    script.expect("POST create_model", "from_state_create_model")
    script.expect("POST retrieve_future", {"type": "create_model", "model_id": f"{SESSION}:train:2"})
    script.expect("POST load_weights", "from_state_load_weights")
    script.expect("POST retrieve_future", {"type": "load_weights", "path": CHECKPOINT})
    service.create_training_client_from_state_with_optimizer(CHECKPOINT)


@scene
def models_from_weights(script):
    script.configure(create_model_via_load_weights=True)
    service = tinker.ServiceClient()
    path = "tinker://run/weights/ck"
    script.expect("POST load_weights", "load_weights_create_model")
    script.expect("POST retrieve_future", {"type": "load_weights", "path": path, "model_id": MODEL})
    optimizer = types.DimuonOptimizerConfig()
    service.create_training_client_from_state(path, base_model=f"{BASE_MODEL}:long", user_metadata={"a": "b"}, optimizer=optimizer)
    script.expect("POST load_weights", "load_weights_create_model_with_optimizer")
    script.expect("POST retrieve_future", {"type": "load_weights", "path": path, "model_id": f"{SESSION}:train:1"})
    service.create_training_client_from_state_with_optimizer(path, weights_access_token=ACCESS_TOKEN)


@scene
def compressed_chunks(script):
    script.configure(proto_compress_fwdbwd=True, fwdbwd_max_chunk_len=2, parallel_fwdbwd_chunks=True)
    model = create_model(script, tinker.ServiceClient())
    # The second chunk is the first on the wire. The others have the same form.
    promised = {"request_id": f"{MODEL}:1", "model_id": MODEL}
    script.expect("POST forward_backward", "forward_backward_zstd_chunk", promised, promised)
    script.defaults["POST retrieve_future"] = {"error": "not needed", "category": "user"}
    expect_failure(lambda: model.forward_backward([repeated(token) for token in range(5)], "cross_entropy").result())


@scene
def custom_loss(script):
    service = tinker.ServiceClient()
    ref = lambda name: {"ref": name}
    node = lambda op, name, target, *args, **kwargs: {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}
    nodes = [
        node("placeholder", "logprobs", "logprobs"),
        node("placeholder", "weights", "weights"),
        node("call_function", "mul", "operator.mul", ref("logprobs"), ref("weights")),
        node("call_method", "sum_1", "sum", ref("mul"), dim=-1),
        node("call_function", "neg", "operator.neg", ref("sum_1")),
        node("output", "output", "output", {"tuple": [ref("neg"), {"dict": {"custom/nll:sum": ref("neg")}}]}),
    ]
    graph = types.CustomLossGraph.model_validate({"format": 1, "nodes": nodes})
    inputs = [types.CustomLossInput(name=name, rank=1) for name in ("logprobs", "weights")]
    script.expect("POST create_custom_loss", "create_custom_loss")
    script.expect("POST retrieve_future", "retrieve_future_create_custom_loss")

    async def create():
        from tinker.lib.api_future_impl import _APIFuture

        # Tracing a Python function needs torch.
        untyped = await service.holder._create_custom_loss("neg_ll", inputs, graph)
        return await _APIFuture(
            types.CreateCustomLossResponse, service.holder, untyped, request_start_time=time.time(), request_type="CreateCustomLoss"
        ).result_async()

    service.holder.run_coroutine_threadsafe(create()).result()
    model = create_model(script, service)
    script.expect("POST forward_backward", "forward_backward_custom_loss")
    script.defaults["POST retrieve_future"] = {"error": "not needed", "category": "user"}
    expect_failure(lambda: model.forward_backward([repeated(1)], "custom", {"loss_id": "loss-1"}).result())


@scene
def headers(script):
    os.environ.update({"CLOUDFLARE_ACCESS_CLIENT_ID": "cid", "CLOUDFLARE_ACCESS_CLIENT_SECRET": "csec"})
    model = create_model(script, tinker.ServiceClient(default_headers_overrides={"X-Extra": "1"}))
    script.expect("POST forward_backward", {"request_id": f"{MODEL}:7", "model_id": MODEL})
    script.expect("POST retrieve_future", "retrieve_future_forward_backward_two_records")
    model.forward_backward([dense_datum()], "cross_entropy").result()


def sample(sampler, prompt=PROMPT, num_samples=1, params=None, **options):
    return sampler.sample(prompt, num_samples, params or types.SamplingParams(), **options).result()


@scene
def sampling(script):
    service = tinker.ServiceClient()
    script.expect("POST create_sampling_session", "create_sampling_session_base_model")
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    script.expect("POST create_sampling_session", "create_sampling_session_model_path")
    service.create_sampling_client(model_path=f"tinker://{MODEL}/sampler_weights/s1")

    def exchange(name, poll=SUCCESS, **call):
        script.expect("POST asample", name)
        script.expect("POST retrieve_future", poll)
        sample(sampler, **call)

    params = types.SamplingParams
    exchange("asample_minimal", "retrieve_future_asample_minimal")
    full = params(max_tokens=16, seed=42, stop="\n\n", temperature=0.7, top_k=50, top_p=0.9)
    exchange("asample_stop_string_seed", "retrieve_future_asample_stop_string_seed", num_samples=2, params=full)
    exchange("asample_stop_list_str", params=params(stop=["a", "b"]))
    exchange("asample_stop_list_int", params=params(stop=[1, 2]))
    exchange("asample_stop_empty_list", params=params(stop=[]))
    scored = {"params": ONE_TOKEN, "include_prompt_logprobs": True}
    exchange("asample_prompt_logprobs", "retrieve_future_asample_prompt_logprobs", **scored)
    exchange("asample_topk", "retrieve_future_asample_topk", params=params(max_tokens=3), include_prompt_logprobs=True,
             topk_prompt_logprobs=2, topk_sample_logprobs=2)
    exchange("asample_prompt_logprobs_last_n", "retrieve_future_asample_prompt_logprobs_last_n", prompt_logprobs_last_n=2, **scored)
    targets = int64([5, -1, 6, 7, -1, -1], [3, 2])
    exchange("asample_target_prompt_logprobs_dense", "retrieve_future_asample_target_prompt_logprobs_dense",
             params=ONE_TOKEN, target_prompt_logprobs=targets)
    targets = types.TensorData(data=[5, 6], dtype="int64", shape=[3, 2], sparse_crow_indices=[0, 1, 2, 2], sparse_col_indices=[0, 1])
    exchange("asample_target_prompt_logprobs_sparse", "retrieve_future_asample_target_prompt_logprobs_sparse",
             params=ONE_TOKEN, target_prompt_logprobs=targets)
    exchange("asample_prompt_alt_tokens", "retrieve_future_asample_prompt_alt_tokens", params=ONE_TOKEN, prompt_alt_tokens_k=2)
    chunks = [
        types.EncodedTextChunk(tokens=[1, 2]),
        types.ImageChunk(data=PNG, format="png"),
        types.ImageChunk(data=PNG, format="jpeg", expected_tokens=4),
        POINTER,
        types.DmelChunk(dmel=DMEL),
    ]
    exchange("asample_multimodal", prompt=types.ModelInput(chunks=chunks), params=ONE_TOKEN)
    script.expect("POST asample", "asample_compute_logprobs")
    script.expect("POST retrieve_future", Unrecorded("retrieve_future_asample_prompt_logprobs"))
    sampler.compute_logprobs(PROMPT).result()
    script.expect("GET samplers/" + SAMPLER, "get_sampler_from_sampling_client")
    sampler.get_base_model()
    poll_outcomes(script, sampler)


def poll_outcomes(script, sampler):
    def polled(number, *names, fails=False):
        script.expect("POST asample", sampled(number))
        script.expect("POST retrieve_future", *names)
        expect_failure(lambda: sample(sampler)) if fails else sample(sampler)

    polled(14, "retrieve_future_try_again_0", "retrieve_future_try_again_1")
    polled(15, "retrieve_future_408_0", "retrieve_future_408_1", "retrieve_future_408_2")
    polled(16, "retrieve_future_metadata_0", "retrieve_future_metadata_1")
    polled(17, "retrieve_future_503_0", "retrieve_future_503_1")
    polled(18, "retrieve_future_429_0", "retrieve_future_429_1")
    polled(19, "retrieve_future_400_0", "retrieve_future_400_1")
    polled(20, "retrieve_future_failed_user", fails=True)
    polled(21, "retrieve_future_failed_server", fails=True)
    polled(22, "retrieve_future_failed_unknown", fails=True)
    polled(23, "retrieve_future_404", fails=True)
    polled(24, "retrieve_future_json_for_proto", fails=True)
    polled(25, "retrieve_future_zstd_encoded")
    # A lost future makes the SDK submit the sample again, with another sequence number.
    script.expect("POST asample", sampled(26), "asample_resubmit_after_410")
    script.expect("POST retrieve_future", "retrieve_future_410", SUCCESS)
    sample(sampler)
    script.expect("POST asample", "asample_429", sampled(28))
    script.expect("POST retrieve_future", SUCCESS)
    sample(sampler)


@scene
def stability(script):
    session = {"type": "create_sampling_session", "sampling_session_id": f"{SESSION}:sample:2"}
    script.expect("POST create_sampling_session", session)
    sampler = tinker.ServiceClient().create_sampling_client(base_model=BASE_MODEL, record_stability_info=True)
    script.expect("POST asample", "asample_record_stability_info")
    script.expect("POST retrieve_future", SUCCESS)
    sample(sampler)


@scene
def cancellation(script):
    script.defaults["POST client/dynamic_config"] = {"sample_cancel_enabled": True}
    sampler = create_sampler(script, tinker.ServiceClient())
    script.expect("POST asample", sampled(1))
    script.expect("POST retrieve_future", slow(PENDING))
    script.defaults["POST retrieve_future"] = slow(PENDING)
    future = sampler.sample(PROMPT, 1, types.SamplingParams())
    script.wait_until_done()
    # Cancel in the middle of a poll: the SDK ignores a cancellation between two polls.
    time.sleep(0.5)
    script.expect("POST cancel_future", "cancel_future")
    future.cancel()


@scene
def batch_polls(script):
    script.configure(sample_use_retrieve_futures=True)
    sampler = create_sampler(script, tinker.ServiceClient())
    script.expect("POST asample", sampled(0))
    # The last poll acknowledges the result.
    script.expect("POST retrieve_futures", "retrieve_futures_0", "retrieve_futures_1", "retrieve_futures_2")
    script.expect("POST retrieve_future", "retrieve_future_after_poller")
    sample(sampler)


@scene
def clone(script):
    script.configure(sample_use_retrieve_futures=True, sample_join_sampling_session=True)
    sampler = create_sampler(script, tinker.ServiceClient())
    script.expect("POST join_sampling_session", "join_sampling_session")
    script.expect("POST asample", "asample_joined_clone")
    script.expect("POST retrieve_futures", "retrieve_futures_clone")
    script.defaults["POST retrieve_futures"] = slow({"completions": [], "cursor": 1})
    script.expect("POST retrieve_future", SUCCESS)
    copy = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    sample(copy, types.ModelInput.from_ints([1]))


def rest_client():
    # Releases before 0.36.0 have no constructor of their own for it.
    has_constructor = hasattr(public_interfaces, "RestClient")
    return public_interfaces.RestClient() if has_constructor else tinker.ServiceClient().create_rest_client()


def admin_client():
    has_constructor = hasattr(public_interfaces, "AdminClient")
    return public_interfaces.AdminClient() if has_constructor else rest_client()


@scene
def rest(script):
    client = rest_client()
    run = f"training_runs/{MODEL}"
    checkpoint = f"{run}/checkpoints/weights/ck1"

    def call(route, name, method, *arguments, **options):
        script.attempt(route, name, lambda: getattr(client, method)(*arguments, **options).result())

    call(f"GET {run}", "get_training_run", "get_training_run", MODEL)
    call(f"GET {run}", "get_training_run_by_tinker_path", "get_training_run_by_tinker_path", CHECKPOINT, access_scope="accessible")
    call("GET training_runs", "list_training_runs", "list_training_runs")
    call("GET training_runs", "list_training_runs_project", "list_training_runs", limit=50, offset=50, access_scope="accessible", project_id="p 1")
    call(f"GET {run}/checkpoints", "list_checkpoints", "list_checkpoints", MODEL)
    call("GET checkpoints", "list_user_checkpoints", "list_user_checkpoints")
    external = f"{run}/checkpoints/external_weights/e1/external_weights_urls"
    call(f"GET {external}", "external_weights_urls", "get_external_weights_urls", f"tinker://{MODEL}/external_weights/e1")
    call(f"DELETE {checkpoint}", "delete_checkpoint", "delete_checkpoint_from_tinker_path", CHECKPOINT)
    call(f"POST {checkpoint}/publish", "publish_checkpoint", "publish_checkpoint_from_tinker_path", CHECKPOINT)
    call(f"DELETE {checkpoint}/publish", "unpublish_checkpoint", "unpublish_checkpoint_from_tinker_path", CHECKPOINT)
    call(f"PUT {checkpoint}/ttl", "set_checkpoint_ttl", "set_checkpoint_ttl_from_tinker_path", CHECKPOINT, 86400)
    call(f"PUT {checkpoint}/ttl", "set_checkpoint_ttl_remove", "set_checkpoint_ttl_from_tinker_path", CHECKPOINT, None)
    call("POST copy_weights", "copy_weights", "copy_weights", CHECKPOINT, "proj-archive", ttl_seconds=3600, weights_access_token=ACCESS_TOKEN)
    call("POST copy_weights", "copy_weights_minimal", "copy_weights", CHECKPOINT, "proj-archive")
    call(f"GET samplers/{SAMPLER}", "get_sampler", "get_sampler", SAMPLER)
    call(f"GET sessions/{SESSION}", "get_session", "get_session", SESSION)
    call("GET sessions", "list_sessions", "list_sessions")
    call(f"PUT sessions/{SESSION}/project", "assign_session_project", "assign_session_project", SESSION, "proj-2")
    call(f"GET sessions/{SESSION}/trace_export", "trace_export", "export_session_trace", SESSION)


@scene
def session_search(script):
    client = rest_client()
    script.expect("POST sessions/search", "search_sessions_default", "search_sessions_full")
    client.search_sessions(types.SessionSearchRequest()).result()
    client.search_sessions(types.SessionSearchRequest.model_validate({
        "session_id": "s", "project_ids": ["p"], "user_metadata": {"a": "b"}, "display_name": "n",
        "owner": {"type": "user", "owner_urns": ["u"]},
        "statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}, {"type": "failed"}, {"type": "cancelled"}],
        "limit": 10,
        "cursor": {"last_created_at": "2026-01-02T03:04:05.123456+02:00", "last_session_id": "x"},
    })).result()


@scene
def administration(script):
    client = admin_client()

    def call(route, name, method, *arguments, **options):
        script.attempt(route, name, lambda: getattr(client, method)(*arguments, **options).result())

    call("GET audit", "audit", "get_audit_log", day=datetime.date(2025, 1, 15))
    call("GET audit", "audit_default", "get_audit_log")
    usage = "GET billing/usage/events"
    call(usage, "billing_usage", "get_billing_usage", "2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z")
    zone = datetime.timezone(datetime.timedelta(hours=2))
    start, end = datetime.datetime(2026, 7, 13, tzinfo=zone), datetime.datetime(2026, 7, 14)
    call(usage, "billing_usage_datetime", "get_billing_usage", start, end)
    storage = "GET billing/usage/checkpoints/current"
    call(storage, "checkpoint_storage", "get_current_checkpoint_storage_usage", "p1")


@scene
def telemetry(script):
    model = create_model(script, tinker.ServiceClient())
    script.expect("POST telemetry", "telemetry_session_start")
    datum = types.Datum(model_input=types.ModelInput(chunks=[POINTER]), loss_fn_inputs={"target_tokens": int64([1])})
    expect_failure(lambda: model.forward_backward([datum], "cross_entropy").result())
    script.wait_until_done()
    script.expect("POST get_info", "error_404_get_info")
    script.expect("POST telemetry", "telemetry_user_error")
    expect_failure(model.get_info)


@scene
def telemetry_of_invalid_body(script):
    model = create_model(script, tinker.ServiceClient())
    script.expect("POST get_info", {"nonsense": 1})
    script.expect("POST telemetry", "telemetry_unhandled_exception")
    expect_failure(model.get_info)


@scene
def telemetry_without_session(script):
    script.expect("GET sessions", "error_403_list_sessions")
    script.expect("POST telemetry", "telemetry_sessionless")
    expect_failure(lambda: rest_client().list_sessions().result())


@scene
def api_key(script):
    import httpx
    from tinker.cli.auth_api import TinkerAuthApi

    with httpx.Client() as client:
        script.expect("GET auth/apikey/me", "apikey_me_get")
        TinkerAuthApi(client).get_self_api_key(API_KEY)
        script.expect("DELETE auth/apikey/me", "apikey_me_delete")
        TinkerAuthApi(client).delete_self_api_key(API_KEY)
