"""Shows the protobuf messages of the SDK as JSON: arrays as numbers, map entries in order."""

import base64

import numpy as np

NUMPY = {"DTYPE_FLOAT32": "<f4", "DTYPE_INT64": "<i8", "DTYPE_INT32": "<i4"}


def messages():
    from tinker.proto import tinker_public_pb2

    return tinker_public_pb2


def numbers(raw, dtype):
    values = np.frombuffer(raw, dtype=NUMPY.get(dtype, dtype)).tolist()
    return ["NaN" if value != value else value for value in values]


def entries(field, show):
    return {name: show(field[name]) for name in sorted(field)}


def dtype_name(value):
    return messages().DType.Name(value)


def tensor(message):
    dtype, encoding = dtype_name(message.dtype), message.WhichOneof("encoding")
    shown = {"dtype": dtype, "shape": list(message.shape), "encoding": encoding}
    if encoding == "dense":
        return {**shown, "dense": numbers(message.dense, dtype)}
    csr = message.sparse_csr
    indices = {name: numbers(getattr(csr, name), "<i8") for name in ("crow_indices", "col_indices")}
    return {**shown, "sparse_csr": {"values": numbers(csr.values, dtype), **indices}}


def chunk(message):
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        return {kind: {"tokens_int32": numbers(message.encoded_text.tokens, "<i4")}}
    if kind == "image":
        image = message.image
        shown = {"data_base64": base64.b64encode(image.data).decode(), "format": image.format}
        if image.HasField("expected_tokens"):
            shown["expected_tokens"] = image.expected_tokens
        return {kind: shown}
    return {kind: {"dmel_base64": base64.b64encode(message.dmel.dmel).decode()}}


def span(message):
    kind = message.WhichOneof("span")
    part = getattr(message, kind)
    return {kind: {"sequence_id": part.sequence_id, "offset": part.offset, "length": part.length}}


def request(message):
    def value(config):
        kind = config.WhichOneof("value")
        return {kind: getattr(config, kind)}

    return {
        "message": message.DESCRIPTOR.full_name,
        "model_id": message.model_id,
        "seq_id": message.seq_id,
        "loss_fn": message.loss_fn,
        "forward_only": message.forward_only,
        "loss_fn_config": entries(message.loss_fn_config, float),
        "loss_fn_config_v2": entries(message.loss_fn_config_v2, value),
        "data": [
            {
                "model_input": [chunk(part) for part in datum.model_input],
                "loss_fn_inputs": entries(datum.loss_fn_inputs, tensor),
                "model_input_spans": [span(part) for part in datum.model_input_spans],
                "loss_fn_input_spans": [span(part) for part in datum.loss_fn_input_spans],
            }
            for datum in message.data
        ],
    }


def training_output(message):
    def field(batched):
        dtype = dtype_name(batched.dtype)
        return {
            "dtype": dtype,
            "trailing_shape": list(batched.trailing_shape),
            "offsets_int64_bytes": numbers(batched.offsets, "<i8"),
            "data": numbers(batched.data, dtype),
        }

    return {
        "message": message.DESCRIPTOR.full_name,
        "loss_fn_output_type": message.loss_fn_output_type,
        "metrics": entries(message.metrics, float),
        "loss_fn_outputs": [
            {"type_tag": record.type_tag, "num_datums": record.num_datums, "fields": entries(record.fields, field)}
            for record in message.loss_fn_outputs
        ],
    }


def topk(message):
    return {
        "k": message.k,
        "length": message.length,
        "token_ids_int32": numbers(message.token_ids, "<i4"),
        "logprobs_float32": numbers(message.logprobs, "<f4"),
    }


def sample_output(message):
    def sequence(part):
        shown = {
            "stop_reason": messages().StopReason.Name(part.stop_reason),
            "tokens_int32": numbers(part.tokens, "<i4"),
        }
        if part.HasField("logprobs"):
            shown["logprobs_float32"] = numbers(part.logprobs, "<f4")
        if part.HasField("topk_sampled_logprobs"):
            shown["topk_sampled_logprobs"] = topk(part.topk_sampled_logprobs)
        return shown

    shown = {"message": message.DESCRIPTOR.full_name, "sequences": [sequence(part) for part in message.sequences]}
    if message.HasField("prompt_logprobs"):
        shown["prompt_logprobs_float32"] = numbers(message.prompt_logprobs, "<f4")
    if message.HasField("topk_prompt_logprobs"):
        shown["topk_prompt_logprobs"] = topk(message.topk_prompt_logprobs)
    shown["prompt_cache_hit_tokens"] = message.prompt_cache_hit_tokens
    if message.HasField("target_prompt_logprobs"):
        shown["target_prompt_logprobs"] = tensor(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        alternatives = message.prompt_alt_tokens
        shown["prompt_alt_tokens"] = {name: tensor(getattr(alternatives, name)) for name in ("tokens", "logprobs")}
    return shown


def decompressed(raw):
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj().decompress(raw)


def parsed(kind, raw):
    message = getattr(messages(), kind)()
    message.ParseFromString(raw)
    return message
