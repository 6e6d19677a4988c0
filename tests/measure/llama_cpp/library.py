"""llama.cpp's C interface, as far as the benchmark uses it, over the prebuilt library that an npm package brings.

The structures are those of release v0.5.0. Other releases may have others, so only this one is loaded. Fields that the
benchmark leaves as they are stand together as arrays.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path

INSTALL = "npm install --prefix ~/.cache/troupe/llama.cpp @node-llama-cpp/linux-x64@3.22.1"
FOLDER = Path.home() / ".cache/troupe/llama.cpp/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
LIBRARY = FOLDER / "libllama.v0.5.0.so"
FLASH_ATTENTION, Q4_K_M = 1, 15  # values of llama_flash_attn_type and llama_ftype
LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class ModelParams(Structure):
    """llama_model_params."""

    _fields_ = (
        ("devices", c_void_p * 2), ("num_gpu_layers", c_int32), ("modes", c_int32 * 4), ("more", c_void_p * 4),
        ("flags", c_bool * 6),
    )  # fmt: skip


class ContextParams(Structure):
    """llama_context_params."""

    _fields_ = (
        ("num_tokens", c_uint32), ("num_batch_tokens", c_uint32), ("num_micro_batch_tokens", c_uint32),
        ("num_sequences", c_uint32), ("outputs", c_uint32 * 3), ("num_threads", c_int32),
        ("num_prompt_threads", c_int32), ("kinds", c_int32 * 4), ("flash_attention", c_int32),
        ("rope", c_float * 8), ("on_node", c_void_p * 2), ("cache_types", c_int32 * 2), ("on_abort", c_void_p * 2),
        ("embeddings", c_bool), ("offloads_cache", c_bool), ("has_no_timings", c_bool), ("offloads_ops", c_bool),
        ("has_full_windows", c_bool), ("is_cache_shared", c_bool), ("samplers", c_void_p),
        ("num_samplers", c_size_t), ("other", c_void_p),
    )  # fmt: skip


class QuantizeParams(Structure):
    """llama_model_quantize_params."""

    _fields_ = (
        ("num_threads", c_int32), ("file_type", c_int32), ("tensor_types", c_int32 * 2), ("flags", c_bool * 6),
        ("more", c_void_p * 4), ("buffer_bytes", c_size_t),
    )  # fmt: skip


class Batch(Structure):
    """llama_batch."""

    _fields_ = (
        ("num_tokens", c_int32), ("token", POINTER(c_int32)), ("embeddings", c_void_p),
        ("position", POINTER(c_int32)), ("num_sequences", POINTER(c_int32)),
        ("sequence", POINTER(POINTER(c_int32))), ("has_logits", POINTER(c_int8)),
    )  # fmt: skip


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ggml_backend_load_all_from_path": (None, (c_char_p,)), "llama_log_set": (None, (LogCallback, c_void_p)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)), "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)), "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_model_quantize_default_params": (QuantizeParams, ()),
    "llama_model_quantize": (c_uint32, (c_char_p, c_char_p, POINTER(QuantizeParams))),
    "llama_context_default_params": (ContextParams, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)), "llama_free": (None, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)), "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)), "llama_batch_free": (None, (Batch,)),
    "llama_decode": (c_int32, (c_void_p, Batch)), "llama_get_logits": (POINTER(c_float), (c_void_p,)),
}


def load_library() -> ctypes.CDLL:
    """Load the library, and of its CPU code the best variant for this machine.

    Raises:
        OSError: it is not installed.
    """
    library = ctypes.CDLL(str(LIBRARY))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_drop_log, None)
    library.ggml_backend_load_all_from_path(str(FOLDER).encode())
    return library


@LogCallback
def _drop_log(level: int, text: bytes, user_data: object) -> None:
    """llama.cpp writes pages about every model it loads."""
