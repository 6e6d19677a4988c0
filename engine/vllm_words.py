"""Names and values of vLLM's settings: what they are called here, and what to use instead of those that are not done.

A name that only differs is a `--` note beside its field in `engine/config_fields.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from engine.errors import ConfigError

logger = logging.getLogger("troupe.engine")

# vLLM's switches whose field has the opposite meaning.
OPPOSITES = {"enforce_eager": "enable_cuda_graphs"}
# vLLM's values of our fields. A torch.dtype is read by its name.
VALUES: dict[str, dict[Any, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto", "hf": "auto", "gguf": "auto"},
    "model_impl": {"vllm": "troupe"},
    "distributed_executor_backend": {"uni": "mp"},
}
# Names whose other values ask for something that is not done: name -> values that ask for nothing, and the way to it.
_OFF = (False, 0)
_BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": (_OFF, "code of checkpoints never runs; a model that transformers knows runs with model_impl"),
    "tokenizer_mode": (("auto", "hf"), "tokenizer.json decides; name another folder in tokenizer"),
    "tokenizer_revision": ((), "write it behind the name: tokenizer=NAME@REVISION"),
    "code_revision": ((), "code of checkpoints never runs"),
    "swap_space": (_OFF, "preempted requests are computed again; kv_offload_gb keeps evicted blocks in host memory"),
    "cpu_offload_gb": (_OFF, "weights stay on the device; quantization makes them smaller"),
    "guided_decoding_backend": (_BACKENDS, "our grammar backend takes what each of them takes"),
    "structured_outputs_config": (
        ({}, *({"backend": name} for name in _BACKENDS)), "our grammar backend has no settings"
    ),
    "task": (("auto", "generate", "embed", "score", "classify"), "the files of the model decide"),
    "runner": (("auto", "generate", "pooling"), "the files of the model decide"),
    "convert": (("auto", "none"), "the files of the model decide"),
    "config_format": (("auto", "hf"), "checkpoints in the format of Hugging Face are read"),
    "download_dir": ((), "set HF_HUB_CACHE"),
    "hf_token": ((), "set HF_TOKEN"),
    "hf_config_path": ((), "hf_overrides changes config.json"),
    "override_generation_config": (({},), "name a folder with your own file in generation_config"),
    "allowed_local_media_path": (("",), "send images as data: URLs"),
    "enable_prompt_embeds": (_OFF, "send text or token ids"),
    "disable_sliding_window": (_OFF, "lower max_model_len to the window"),
    "logits_processors": (((), []), "use logit_bias, allowed_token_ids, bad_words or a grammar"),
    "logprobs_mode": (("raw_logprobs",), "logprobs are those of the model, before penalties and masks"),
    "fully_sharded_loras": (_OFF, "adapters are divided as the model is"),
    "lora_dtype": (("auto",), "adapters have the dtype of the model"),
    "max_num_partial_prefills": ((1,), "long_prefill_token_threshold bounds the chunk of a prompt"),
    "mm_processor_kwargs": (({},), "change preprocessor_config.json"),
    "kv_events_config": ((), "--admin-key serves the events of the KV cache"),
    "pooler_config": (({},), "the files of the model decide"),
    "enable_sleep_mode": ((True, False), ""),  # always possible
    "enable_auto_tool_choice": ((True, False), ""),  # always possible
}
# Names that tune vLLM's own code and change no result. They are logged and left out.
_WITHOUT_MEANING = frozenset(
    {"compilation_config", "cuda_graph_sizes", "disable_custom_all_reduce", "max_seq_len_to_capture", "worker_cls"}
    | {"num_scheduler_steps", "preemption_mode", "use_v2_block_manager", "disable_async_output_proc", "max_log_len"}
    | {"max_parallel_loading_workers", "use_tqdm_on_load", "disable_cascade_attn", "prefix_caching_hash_algo"}
    | {"disable_log_requests", "enable_log_requests", "disable_mm_preprocessor_cache", "skip_mm_profiling"}
    | {"mm_processor_cache_gb", "disable_hybrid_kv_cache_manager", "max_long_partial_prefills", "optimization_level"}
    | {"safetensors_load_strategy", "disable_frontend_multiprocessing", "reasoning_parser", "collect_detailed_traces"}
)  # fmt: skip
EXTRA_NAMES = (*OPPOSITES, *REFUSED, *sorted(_WITHOUT_MEANING))


def read_settings(given: Mapping[str, Any], names: Iterable[str], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return settings under the names of our fields. None stands for the default, as in vLLM."""
    known = {name: name for name in names} | dict(aliases) | OPPOSITES
    found: dict[str, Any] = {}
    first: dict[str, str] = {}  # field -> the name under which it was given
    for name, value in given.items():
        if name in REFUSED:
            _check_refused(name, value)
        elif name in _WITHOUT_MEANING:
            logger.warning("%s has no meaning here and is left out", name)
        elif name not in known:
            near = get_close_matches(name, [*known, *REFUSED], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name} is not a setting of this engine{hint}")
        elif (other := first.setdefault(known[name], name)) != name:
            raise ConfigError(f"{name} and {other} are the same setting; give one of them")
        elif value is not None:
            found[known[name]] = _read_value(name, known[name], value)
    return found


def _read_value(name: str, field: str, value: Any) -> Any:
    if name in OPPOSITES:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be true or false")
        return not value
    if field == "dtype" and str(value).startswith("torch."):
        value = str(value).removeprefix("torch.")
    return VALUES.get(field, {}).get(value, value) if isinstance(value, str) else value


def _check_refused(name: str, value: Any) -> None:
    neutral, instead = REFUSED[name]
    if value is None or value in neutral:
        return
    allowed = ", ".join(map(repr, neutral))
    raise ConfigError(f"{name}={value!r} must be left out{allowed and ' or one of '}{allowed}: {instead}")
