"""Recorders of functions of the SDK that take values and return values."""

import asyncio
import json
import math
import os
import tempfile

import httpx
import numpy as np
import tinker
from tinker import types
from tinker.lib import internal_client_holder, queue_state_logger, retry_handler, telemetry
from tinker.lib.public_interfaces import sampling_client, training_client

from behaviour import Clock, bare_holder, environment, expanded, logged, records, replaced, status_error


def http_client(**options):
    from tinker._client import AsyncTinker

    return AsyncTinker(api_key="tml-x", base_url=options.pop("base_url", "http://127.0.0.1:1"), **options)


def stored_credentials(home, key):
    if key is not None:
        os.makedirs(os.path.join(home, ".tinker"))
        content = {"version": 1, "default": "k", "keys": {"k": {"type": "manual", "key": key, "name": "n"}}}
        with open(os.path.join(home, ".tinker", "credentials.json"), "w") as file:
            json.dump(content, file)


@records("auth_resolution")
def auth_resolution(file):
    from tinker.lib import _auth_token_provider as module

    def resolved(case):
        try:
            provider = module.resolve_auth_provider(case["api_key_arg"], case["enforce_cmd"])
        except tinker.TinkerError as error:
            if str(error) == module.MISSING_API_KEY_MESSAGE:
                return {"error": "missing_credential"}
            return {"error": "command_required" if "TINKER_CREDENTIAL_CMD" in str(error) else "bad_prefix"}
        if isinstance(provider, module.CredentialCmdAuthProvider):
            return {"provider": "command", "value": provider._cmd}
        return {"provider": "api_key", "value": provider._token}

    for case in file["cases"]:
        with tempfile.TemporaryDirectory() as home:
            stored_credentials(home, case["stored_default"])
            names = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
            with environment(HOME=home, **{name: case[name] for name in names}):
                case["expected"] = resolved(case)


@records("base_url")
def base_url(file):
    from tinker.lib.base_url import resolve_base_url

    with environment(TINKER_BASE_URL=None):
        file["default_base_url"] = resolve_base_url(None)
        for case in file["join_cases"]:
            case["resolved"] = resolve_base_url(case["base_url"])
            client = http_client(base_url=case["resolved"])
            for name in case:
                if name.startswith("joined_"):
                    case[name] = str(client._prepare_url(name.removeprefix("joined_")))
    for case in file["cases"]:
        with environment(TINKER_BASE_URL=case["TINKER_BASE_URL"]):
            case["resolved"] = resolve_base_url(case["arg"])


@records("billing_pause")
def billing_pause(file):
    for case in file["cases"]:
        holder, clock = bare_holder(**case["config"]), Clock()
        case["pause_decision"], case["warned_at"] = [], []
        with clock.installed(internal_client_holder), logged(internal_client_holder) as messages:
            for time in case["times_of_402_seconds"]:
                clock.now = time
                count = len(messages)
                case["pause_decision"].append(holder._should_pause_on_billing(402, "x"))
                if any(level == "WARNING" for level, _ in messages[count:]):
                    case["warned_at"].append(time)


def chunk(described):
    kind = described["type"]
    if kind == "encoded_text":
        return types.EncodedTextChunk(tokens=[0] * described["length"])
    if kind == "image":
        return types.ImageChunk(data=b"x" * described["raw_bytes"], format="png")
    if kind == "image_asset_pointer":
        return types.ImageAssetPointerChunk(format="png", location=described["location"], expected_tokens=1)
    return types.DmelChunk(dmel=b"x" * described["raw_bytes"])


def tensor(described):
    sparse = {f"sparse_{name}_indices": [0] * described[name] for name in ("crow", "col") if name in described}
    count = described["elements"]
    shape = [4, 4] if sparse else [count]
    return types.TensorData(data=[0] * count, dtype=described["dtype"], shape=shape, **sparse)


@records("byte_estimates")
def byte_estimates(file):
    holder = bare_holder()
    for case in file["cases"]:
        model_input = types.ModelInput(chunks=[chunk(part) for part in case["chunks"]])
        inputs = {name: tensor(part) for name, part in case["tensors"].items()}
        datum = types.Datum(model_input=model_input, loss_fn_inputs=inputs)
        case["sampling_estimate"] = holder.estimate_bytes_count_in_model_input(model_input)
        case["training_estimate"] = training_client._estimate_datum_bytes_count_proto(datum)


@records("chunking")
def chunking(file):
    for case in file["cases"]:
        holder = bare_holder(fwdbwd_max_chunk_len=case["max_len"], fwdbwd_max_chunk_bytes_count=case["max_bytes"])
        model = training_client.TrainingClient(holder, 0, "m")
        # A datum is its size.
        with replaced(training_client, _estimate_datum_bytes_count_proto=lambda size: size):
            requests = model._chunked_requests(expanded(case["datum_bytes"]))
        case["chunks"] = [
            {"request_id": number, "seq_id": number + 1, "len": len(data), "bytes": size} for number, data, size in requests
        ]


@records("client_config_defaults")
def client_config_defaults(file):
    file["client_config"] = types.ClientConfigResponse().model_dump()
    file["client_dynamic_config"] = types.ClientDynamicConfigResponse().model_dump()


@records("credentials_file")
def credentials_file(file):
    from tinker.lib import credentials

    with tempfile.TemporaryDirectory() as home:
        path = os.path.join(home, ".tinker", "credentials.json")
        store = credentials.JsonCredentialStore(path)
        example = json.loads(file["example_file_text"])
        for key_id, record in example["keys"].items():
            kind = credentials.ManualKey if record["type"] == "manual" else credentials.GeneratedKey
            store.add_key(key_id, kind.model_validate(record))
        store.set_default(example["default"])
        file["example_file_text"] = open(path).read()
        file["directory_mode"] = oct(os.stat(os.path.dirname(path)).st_mode & 0o777)
        file["file_mode"] = oct(os.stat(path).st_mode & 0o777)
        for case in file["cases"]:
            with open(path, "w") as output:
                output.write(case["raw"])
            for name in ("default_key", "error"):
                case.pop(name, None)
            try:
                record = store.get_default_key()
                case["default_key"] = record and record.key
            except Exception as error:
                case["error"] = type(error).__name__


@records("custom_loss")
def custom_loss(file):
    """Records the rules for names. The losses of the cases are computed by hand."""
    from tinker.lib.public_interfaces import custom_loss as module

    for case in file["metric_key_rule"]:
        case["ok"] = module._METRIC_KEY.fullmatch(case["key"]) is not None
    for case in file["input_name_rule"]:
        case["ok"] = module._INPUT_NAME.fullmatch(case["name"]) is not None


@records("error_mapping")
def error_mapping(file):
    client = http_client()
    for case in file["cases"]:
        request = httpx.Request("POST", "http://127.0.0.1:1/x")
        error = client._make_status_error_from_response(httpx.Response(case["status"], text=case["body"], request=request))
        case["error_kind"] = type(error).__name__
        case["message"] = error.message
        case["parsed_body"] = error.body
        case["status_code_attr"] = error.status_code


RANDOM = {"delay_at_random_0": 0.0, "delay_at_random_half": 0.5, "delay_at_random_1": 1.0}


@records("http_retry_delay")
def http_retry_delay(file):
    from tinker import _base_client as module

    client = http_client()
    for case in file["cases"]:
        options = module.FinalRequestOptions.construct(method="get", url="/", max_retries=case["max_retries"])
        remaining = case["max_retries"] - case["retries_taken"]
        headers = httpx.Headers(case["headers"])
        for name, value in RANDOM.items():
            with replaced(module, random=lambda value=value: value):
                case[name] = client._calculate_retry_timeout(remaining, options, headers)


@records("retry_after_parsing")
def retry_after_parsing(file):
    from tinker import _base_client as module

    client = http_client()
    for case in file["cases"]:
        with Clock(case["now_unix"]).installed(module):
            case["seconds"] = client._parse_retry_after_header(httpx.Headers(case["headers"]))


@records("should_retry")
def should_retry(file):
    client = http_client()
    for case in file["cases"]:
        for name in [name for name in case if name != "status"]:
            headers = {} if name == "absent" else {"x-should-retry": name.removeprefix("header=")}
            case[name] = client._should_retry(httpx.Response(case["status"], headers=headers))


@records("jwt")
def jwt(file):
    from tinker.lib import _jwt_auth as module

    class Stop(BaseException):
        pass

    def refresh_delay(provider, token):
        clock = Clock(case["now"])

        async def fetch():
            raise Stop

        provider._fetch = fetch
        with clock.installed(module):
            try:
                asyncio.run(provider._refresh_loop(token))
            except Stop:
                return clock.sleeps[0]

    def needs_refresh(provider, token):
        fetched = []

        async def fetch():
            fetched.append(True)
            return "new"

        provider._fetch, provider._token = fetch, token
        provider._refresh_task = "not started again"
        with Clock(case["now"]).installed(module):
            asyncio.run(provider.get_token())
        return bool(fetched)

    for case in file["cases"]:
        with Clock(case["now"]).installed(module):
            try:
                case["expiry"] = module._jwt_expiry(case["jwt"])
            except ValueError:
                case["expiry"] = None
            case["seconds_until_expiry"] = module._seconds_until_expiry(case["jwt"])
        case["on_demand_refresh_needed"] = needs_refresh(module.JwtAuthProvider(None), case["jwt"])
        case["background_delay"] = refresh_delay(module.JwtAuthProvider(None), case["jwt"])
    file["whoami"]["expected"] = identity(file["whoami"]["claims"])


def identity(claims):
    import base64

    from tinker.lib.public_interfaces.rest_client import _whoami_response_from_jwt

    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()
    return _whoami_response_from_jwt(f"x.{payload}.x").model_dump()


@records("metrics_reduction")
def metrics_reduction(file):
    from tinker.lib import chunked_fwdbwd_helpers as module

    def output(chunk):
        outputs = chunk.get("outputs", [{}] * chunk.get("num_outputs", 0))
        return types.ForwardBackwardOutput(
            loss_fn_output_type=chunk.get("type", ""), metrics=chunk["metrics"], loss_fn_outputs=outputs
        )

    for case in file["cases"]:
        note = case.pop("note", None)
        for name in ("expected", "expected_error", "expected_key_order", "integer_results"):
            case.pop(name, None)
        try:
            found = module._metrics_reduction([output(chunk) for chunk in case["chunks"]])
            case["expected"] = found
            case["expected_key_order"] = list(found)
            case["integer_results"] = [name for name, value in found.items() if isinstance(value, int)]
        except Exception as error:
            case["expected_error"] = type(error).__name__
        if note is not None:
            case["note"] = note
    for case in file["combine_cases"]:
        found = module.combine_fwd_bwd_output_results([output(chunk) for chunk in case.get("chunks", [])])
        names = ("loss_fn_output_type", "metrics", "loss_fn_outputs")
        case["expected"] = {name: getattr(found, name) for name in names}


@records("optimizer_params")
def optimizer_params(file):
    from tinker.types.optimizer import OptimParamsBase

    wire = {
        "adam_default": lambda: types.AdamParams(),
        "dimuon": lambda: types.DimuonParams(learning_rate=0.01),
        "custom_family": lambda: OptimParamsBase(type="future_opt", learning_rate=0.5, foo=1),
        "config_adam": lambda: types.AdamOptimizerConfig(),
        "config_dimuon": lambda: types.DimuonOptimizerConfig(),
        "optim_step_request_adam": lambda: types.OptimStepRequest(model_id="m", seq_id=3, optim_params=types.AdamParams()),
        "optim_step_request_dimuon": lambda: types.OptimStepRequest(
            model_id="m", seq_id=3, optim_params=types.DimuonParams(learning_rate=0.01)
        ),
    }
    validated = {"dimuon_validate": types.DimuonParams, "adam_validate": types.AdamParams}
    for case in file["cases"]:
        if case["id"] in wire:
            case["wire"] = wire[case["id"]]().model_dump(exclude_none=True)
            continue
        params = {name: math.nan if value == "nan" else value for name, value in case["params"].items()}
        case["ok"] = accepts(lambda: validated[case["id"]](**params))


def accepts(call):
    try:
        call()
    except (ValueError, RuntimeError):
        return False
    return True


@records("queue_state_log")
def queue_state_log(file):
    from tinker.lib.api_future_impl import QueueState

    sampler = sampling_client.SamplingClient(bare_holder(), sampling_session_id="sess:sample:0")
    observers = {
        "training": (queue_state_logger, queue_state_logger.QueueStateLogger("model-1", "Training")),
        "creation": (queue_state_logger, queue_state_logger.QueueStateLogger("model-1", "Model creation")),
        "sampling": (sampling_client, sampler),
    }
    for case in file["cases"]:
        module, observer = observers[case["client"]]
        clock, case["logged"] = Clock(), []
        with clock.installed(module), logged(module) as messages:
            for time, state, reason in case["calls"]:
                clock.now = time
                count = len(messages)
                observer.on_queue_state_change(QueueState(state), reason)
                case["logged"].append(messages[-1][1] if len(messages) > count else None)


@records("retry_classification")
def retry_classification(file):
    request = httpx.Request("POST", "http://127.0.0.1:1/x")
    named = {
        "timeout": asyncio.TimeoutError,
        "connection": lambda: tinker.APIConnectionError(request=request),
        "api_timeout": lambda: tinker.APITimeoutError(request=request),
        "transport_timeout": lambda: httpx.ReadTimeout("x"),
        "raw_connect_error": lambda: httpx.ConnectError("x"),
        "value_error": lambda: ValueError("x"),
        "generic_sdk_error": lambda: tinker.TinkerError("x"),
        "request_failed_server": lambda: request_failed("server"),
        "promise_expired(410)": lambda: retry_handler.RetryableException(message="x"),
    }

    def request_failed(category):
        return tinker.RequestFailedError("x", request_id="r", category=types.RequestErrorCategory(category))

    def error(name):
        if name in named:
            return named[name]()
        if name.startswith("request_failed category="):
            return request_failed(name.split("=")[1])
        wrapped = ValueError("wrapped")
        wrapped.__cause__ = status_error(int(name.split()[-1]))
        return wrapped if name.startswith("generic") else wrapped.__cause__

    handler = retry_handler.RetryHandler()
    for case in file["cases"]:
        found = error(case["error"])
        if "holder_retryable" in case:
            case["holder_retryable"] = internal_client_holder.InternalClientHolder._is_retryable_exception(found)
            case["sampling_handler_retryable"] = handler._should_retry(found)
        case["is_user_error"] = telemetry.is_user_error(found)


@records("retry_handler_delay")
def retry_handler_delay(file):
    class Random:
        def random(self):
            return self.value

    defaults = retry_handler.RetryConfig()
    file["defaults"] = {name: getattr(defaults, name) for name in file["defaults"]}
    for case in file["config_validation"]:
        case["ok"] = accepts(lambda: retry_handler.RetryConfig(max_connections=case["max_connections"]))
    for case in file["cases"]:
        handler = retry_handler.RetryHandler(retry_handler.RetryConfig(**case["config"]))
        for name, value in RANDOM.items():
            random = Random()
            random.value = value
            with replaced(retry_handler, random=random):
                case[name] = handler._calculate_retry_delay(case["attempt"])


@records("sampler_handle")
def sampler_handle(file):
    import base64

    holder = bare_holder()
    holder._session_id, holder._base_url, holder._api_key = "sess-1", "https://h.test/p", "tml-x"
    holder._default_headers_overrides = {"X-A": "1"}
    client = sampling_client.SamplingClient(holder, sampling_session_id="sess-1:sample:0", record_stability_info=True)
    file["handle"] = client.get_sampler_handle()
    file["payload"] = json.loads(base64.urlsafe_b64decode(file["handle"]))


@records("sampling_validation")
def sampling_validation(file):
    def response(logprobs):
        numbers = None if logprobs is None else np.array([math.nan if one is None else one for one in logprobs])
        return types.SampleResponse(sequences=[], prompt_logprobs_np=numbers)

    def tensor_of(case):
        shape = case["shape"]
        count = math.prod(shape) if shape else 6
        kind = int if case["dtype"] == "int64" else float
        return types.TensorData(data=[kind(0)] * count, dtype=case["dtype"], shape=shape)

    checks = {
        "target_prompt_logprobs": lambda case: sampling_client._check_target_prompt_logprobs(tensor_of(case)),
        "prompt_alt_tokens_k": lambda case: sampling_client._check_prompt_alt_tokens_k(case["value"]),
        "prompt_logprobs_last_n": lambda case: sampling_client._check_prompt_logprobs_last_n(
            case["value"], case["include_prompt_logprobs"]
        ),
        "last_n_honored": lambda case: sampling_client._check_prompt_logprobs_last_n_honored(
            response(case["prompt_logprobs"]), case["value"]
        ),
    }
    for case in file["cases"]:
        case["ok"] = accepts(lambda: checks[case["check"]](case))


@records("telemetry_env")
def telemetry_env(file):
    for case in file["cases"]:
        with environment(TINKER_TELEMETRY=case["TINKER_TELEMETRY"]):
            case["enabled"] = telemetry._is_telemetry_enabled()


@records("tinker_path")
def tinker_path(file):
    parsed = ("training_run_id", "checkpoint_type", "checkpoint_id")
    for case in file["cases"]:
        for name in ("ok", *parsed):
            case.pop(name, None)
        try:
            found = types.ParsedCheckpointTinkerPath.from_tinker_path(case["path"])
            case |= {"ok": True, **{name: getattr(found, name) for name in parsed}}
        except ValueError:
            case["ok"] = False


@records("tokenizer_id")
def tokenizer_id(file):
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    def loaded(name, **options):
        return name, options

    load = sampling_client._load_tokenizer_from_model_info.__wrapped__
    for case in file["cases"]:
        for name in ("tokenizer_id", "revision", "trust_remote_code", "error"):
            case.pop(name, None)
        try:
            with replaced(AutoTokenizer, from_pretrained=loaded):
                name, options = load(case["model_name"], case["tokenizer_id_from_server"])
            case["tokenizer_id"] = name
            case["revision"] = options.get("revision")
            case["trust_remote_code"] = options.get("trust_remote_code", False)
        except RuntimeError as error:
            case["error"] = type(error).__name__
