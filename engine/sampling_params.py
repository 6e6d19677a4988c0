"""SamplingParams: the sampling settings of one request, validated at construction."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from engine.errors import InvalidRequest
from engine.structured_outputs import read_structured_outputs
from grammar import GrammarSpec

PoolingKind = Literal["last", "mean", "logits", "cls", "labels"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """One vector per prompt, float32.

    last: the final hidden state of the last token, [hidden_size]. mean: the mean over all tokens, which are therefore
    all computed, without the prefix cache. logits: the logits of `token_ids` after the prompt, [len(token_ids)].
    Of encoders only: cls: the final hidden state of the first token; labels: the logits of the classifier's labels.
    """

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()
    second_start: int | None = None  # first token of the second text of a pair, where the model marks it

    @property
    def needs_all_tokens(self) -> bool:
        return self.kind == "mean"


OutputKind = Literal["cumulative", "delta", "final"]

MAX_N = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_ID_LIST = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 2**24  # max_logprobs of the engine is the limit in force
MAX_SEED = 2**63 - 1
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it; values below 1e-38 would make them infinite
_PLAIN_TYPES = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop. Names and defaults follow vLLM.

    The sampler applies them in this order: penalties, logit_bias, allowed_token_ids, bad_words, grammar mask,
    min_tokens, temperature, top_k, top_p, min_p. The noise of the draw depends only on (seed, position, token id).

    NumPy numbers and arrays are accepted.

    Raises:
        InvalidRequest: a value is outside its range; the message names field, value and range.
    """

    n: int = 1  # number of completions, 1..256
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0  # EOS and stop tokens are masked before this many
    temperature: float = 1.0  # 0 = greedy; any finite number
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # [0.01, 10]; counts prompt and output
    seed: int | None = None  # None: a random seed for every request
    stop: tuple[str, ...] = ()  # a str or a list is accepted
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    # Token id -> added to the logit, [-100, 100]
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()  # at most 128 words, with 2048 tokens in total
    logprobs: int | None = None  # top alternatives beside the sampled token, to max_logprobs; -1: all tokens
    # As logprobs. The prompt is computed without the prefix cache, 64 tokens a step.
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: only token ids, the text is empty
    truncate_prompt_tokens: int | None = None  # only this many last tokens of the prompt; -1: as many as fit
    grammar: GrammarSpec | None = None
    structured_outputs: Any = None  # a StructuredOutputsParams; it becomes `grammar`
    output_kind: OutputKind = "cumulative"
    pooling: Pooling | None = None  # also return a vector computed from the prompt
    saves_blocks: bool = False  # end only when the prompt's KV blocks are saved, see `kv_transfer_config`

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        for name in self.__slots__:
            if type(value := getattr(self, name)) not in _PLAIN_TYPES:
                set_field(self, name, _to_python(value))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name != "allowed_token_ids":
                set_field(self, name, ())
            elif isinstance(value, str) and name == "stop":
                set_field(self, name, (value,))
            elif isinstance(value, list):
                set_field(self, name, tuple(value))
        if self.structured_outputs is not None:
            if self.grammar is not None:
                raise InvalidRequest("grammar and structured_outputs are two constraints; give one", "grammar")
            set_field(self, "grammar", read_structured_outputs(self.structured_outputs))
            set_field(self, "structured_outputs", None)
        if self.top_k == -1:
            set_field(self, "top_k", 0)
        bias: object = self.logit_bias
        if bias is not None and not isinstance(bias, Mapping):
            raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias")
        # Copied, so that the caller cannot change it after validation.
        copied = {_to_python(token_id): _to_python(value) for token_id, value in bias.items()} if bias else {}
        set_field(self, "logit_bias", copied)
        self._check_numbers()
        self._check_lists()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return replace(self)

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}", "min_tokens"
            )
        _check_float("temperature", self.temperature, 0.0, sys.float_info.max)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, 2**31 - 1, note="0 or -1 disables it")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, -1, MAX_LOGPROBS, note="-1: all tokens")
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1)
            if self.truncate_prompt_tokens == 0:
                message = "truncate_prompt_tokens=0 leaves no prompt; give at least 1, or -1"
                raise InvalidRequest(message, "truncate_prompt_tokens")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop needs detokenize: stop strings are found in the text", "stop")

    def _check_lists(self) -> None:
        _check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_STRING_CHARS)
        _check_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids must not be empty; omit it to allow all tokens", "allowed_token_ids"
                )
        if len(self.logit_bias) > MAX_ID_LIST:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_ID_LIST} are allowed",
                "logit_bias",
            )
        _check_ids("logit_bias", tuple(self.logit_bias))
        for value in self.logit_bias.values():
            _check_float("logit_bias", value, -100.0, 100.0)
        for name in (
            *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "saves_blocks"),
        ):
            if not isinstance(flag := getattr(self, name), bool):
                raise InvalidRequest(f"{name}={flag!r} must be true or false", name)
        if self.output_kind not in ("cumulative", "delta", "final"):
            raise InvalidRequest(
                f"output_kind={self.output_kind!r} must be one of 'cumulative', 'delta', 'final'",
                "output_kind",
            )
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise InvalidRequest(
                "grammar must be a GrammarSpec, for example GrammarSpec.json_schema(...), "
                f"not {type(self.grammar).__name__}",
                "grammar",
            )


def is_unicode(text: str) -> bool:
    """Whether the string can be encoded as UTF-8; a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_python(value: Any) -> Any:
    """Convert NumPy numbers and arrays, alone or in a list or tuple, to Python values; return others unchanged."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)([each.tolist() if isinstance(each, np.generic) else each for each in value])
    return value


def _check_int(name: str, value: object, low: int, high: int, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        more = f" ({note})" if note else ""
        raise InvalidRequest(f"{name}={value!r} must be an integer from {low} to {high}{more}", name)


def _check_float(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN and infinities are outside any range.
    if not is_number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        left = "above" if open_low else "from"
        raise InvalidRequest(f"{name}={value!r} must be a number {left} {low:g} up to {high:g}", name)


def _check_strings(name: str, values: object, max_count: int, max_chars: int) -> None:
    if not isinstance(values, tuple) or not set(map(type, values)) <= {str}:
        raise InvalidRequest(f"{name} must be a string or a list of strings", name)
    if len(values) > max_count:
        raise InvalidRequest(f"{name} has {len(values)} entries; at most {max_count} are allowed", name)
    for value in values:
        if not 1 <= len(value) <= max_chars:
            raise InvalidRequest(
                f"{name}: each string must have 1 to {max_chars} characters; one has {len(value)}", name
            )
        if not is_unicode(value):
            raise InvalidRequest(f"{name}: {value[:40]!r} is not valid Unicode", name)


def _check_ids(name: str, values: object) -> None:
    ids = values if isinstance(values, tuple) else ()
    if not isinstance(values, tuple) or not all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 for value in ids
    ):
        raise InvalidRequest(f"{name} must hold token ids (integers from 0 to 2**31 - 1)", name)
    if len(ids) > MAX_ID_LIST:
        raise InvalidRequest(f"{name} has {len(ids)} entries; at most {MAX_ID_LIST} are allowed", name)


def find_end_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the token ids that end a completion.

    `ignore_eos` has no effect with a grammar: a complete grammar allows no token but EOS.
    """
    is_ignored = params.ignore_eos and params.grammar is None
    return frozenset(params.stop_token_ids) | (frozenset() if is_ignored else frozenset(eos_token_ids))
