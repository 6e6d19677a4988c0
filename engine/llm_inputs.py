"""Normalises the arguments of LLM: prompts, conversations and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from engine.errors import InvalidRequest
from engine.input.input_processor import Prompt
from engine.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
# Iterables that are never meant as a list of prompts: their items are integers or have no order.
_NO_LISTS = (bytes, bytearray, memoryview, set, frozenset)


def list_prompts(prompts: Any) -> list[Prompt]:
    """Return one prompt or several as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, _NO_LISTS) or not isinstance(prompts, Iterable):
        raise InvalidRequest(
            "prompts must be text, a list of token ids, {'prompt_token_ids': [...]}, or a list of these, "
            f"not {type(prompts).__name__}",
            "prompt",
        )
    listed = list(prompts)
    if listed and all(isinstance(item, int | np.integer) for item in listed):
        return [prompts if isinstance(prompts, list) else listed]  # a list of ids may have images
    return listed


def list_conversations(messages: Any) -> list[Messages]:
    """Return one conversation or several as a list. The messages are validated when they are rendered."""
    if isinstance(messages, (str, Mapping, *_NO_LISTS)) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists, "
            f"not {type(messages).__name__}",
            "messages",
        )
    listed = list(messages)
    return [listed] if listed and isinstance(listed[0], Mapping) else listed


def list_params(params: Any, count: int) -> list[SamplingParams]:
    """Return the parameters of `count` prompts, given one for all prompts or a list with one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = list(params) if isinstance(params, Sequence) else [params]
    for each in listed:
        if not isinstance(each, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be a SamplingParams or a list of them, not {type(each).__name__}",
                "sampling_params",
            )
    if len(listed) != count:
        raise InvalidRequest(
            f"sampling_params has {len(listed)} entries for {count} prompts", "sampling_params"
        )
    return listed


def list_each(name: str, given: Any, count: int) -> list[Any]:
    """Return the value of each prompt, given one for all prompts or a list with one for each."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(f"{name} has {len(given)} entries for {count} prompts", name)
    return list(given)
