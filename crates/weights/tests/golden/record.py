#!/usr/bin/env python3
"""Records quants.safetensors, with which the tests compare the block formats.

    pip install gguf safetensors numpy llama-cpp-python
    python record.py

Per format F (q8_0, q4_0, q4_k, q6_k):

    F.blocks   random blocks, some with extreme scales
    F.values   the weights that gguf decodes from them
    F.source   weights to encode: normally distributed, with outliers, tiny, constant, and one-sided
    F.encoded  the blocks that gguf (q8_0, q4_0) or llama.cpp (q4_k, q6_k) encodes from them
"""

import ctypes
import os

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

# Position of the f16 numbers of a block.
F16_AT = {Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_K: [0, 2], Type.Q6_K: [208]}
# Zero, subnormal numbers, the smallest normal, the largest, negative ones.
EXTREME = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00]


def blocks(rng, kind):
    """Random blocks; the first ones have extreme scales."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    out = rng.integers(0, 256, (40, size), dtype=np.uint8)
    for at in F16_AT[kind]:
        scales = rng.integers(0, 0x7C00, len(out), dtype=np.uint16)
        scales |= rng.integers(0, 2, len(out), dtype=np.uint16) << 15
        scales[: len(EXTREME)] = EXTREME if at == 0 else EXTREME[::-1]
        out[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return out


def source(rng):
    """Rows of 256 weights."""
    rows = rng.normal(0, 0.02, (24, 256)).astype(np.float32)
    rows[1] *= 100
    rows[2] *= 1e-6
    rows[3] = np.abs(rows[3])
    rows[4] = -np.abs(rows[4])
    rows[5, ::37] *= 50
    rows[6] = 0.5
    rows[7] = 0
    rows[8, :128] = 0
    rows[9] = np.round(rows[9] * 100) / 100
    rows[10] = rng.uniform(-1, 1, 256)
    rows[11] = rng.standard_t(3, 256)
    return rows


def encode_llama(rows, kind):
    """Encodes rows with the reference implementation of llama.cpp."""
    folder = os.path.join(os.path.dirname(llama_cpp.__file__), "lib")
    library = ctypes.CDLL(os.path.join(folder, "libggml-base.so"))
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]
    length, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.zeros((rows.size // length, size), dtype=np.uint8)
    written = quantize(kind, rows.ctypes.data, out.ctypes.data, 0, len(rows), rows.shape[1], None)
    assert written == out.size
    return out


def main():
    rng = np.random.default_rng(14)
    tensors = {}
    for kind in F16_AT:
        name = kind.name.lower()
        tensors[f"{name}.blocks"] = blocks(rng, kind)
        tensors[f"{name}.values"] = gguf.quants.dequantize(tensors[f"{name}.blocks"], kind)
        rows = source(rng)
        tensors[f"{name}.source"] = rows
        if kind in (Type.Q8_0, Type.Q4_0):
            _, size = gguf.GGML_QUANT_SIZES[kind]
            tensors[f"{name}.encoded"] = gguf.quants.quantize(rows, kind).reshape(-1, size)
        else:
            tensors[f"{name}.encoded"] = encode_llama(rows, kind)
    folder = os.path.dirname(os.path.abspath(__file__))
    save_file(tensors, os.path.join(folder, "quants.safetensors"))


if __name__ == "__main__":
    main()
