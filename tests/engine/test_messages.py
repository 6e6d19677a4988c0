"""Every message survives the way through bytes, and a scheduler whose messages go that way answers the same."""

import random
from collections import deque
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine import messages
from engine.core.actor_messages import StepPlan
from engine.messages import AddRequest, NewTokens
from engine.sampling_params import SamplingParams
from engine.wire.codec import decode, encode
from grammar import GrammarSpec
from tests.engine.core.fake_worker import RandomProposer, reference_output
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, make_request

MESSAGES = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == messages.__name__
]
TOKENS = st.integers(0, 2**31 - 1)
GRAMMARS = st.sampled_from(
    [
        GrammarSpec.json_schema({"type": "object"}, "any", "llguidance", "a source", "any"),
        GrammarSpec.json_object(), GrammarSpec.regex("ü+", "outlines_core"), GrammarSpec.choice(["a", "b"]),
        GrammarSpec.ebnf('root ::= "x"'),
    ]
)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 64),
    max_tokens=st.none() | st.integers(5, 2**31 - 1),
    min_tokens=st.integers(0, 5),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**31 - 1).filter(lambda number: number != 0),
    presence_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(TOKENS, max_size=3),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=3),
    bad_words=st.lists(st.text("abü ", min_size=1, max_size=3), max_size=2),
    logprobs=st.none() | st.integers(0, 20),
    ignore_eos=st.booleans(),
    grammar=st.none() | GRAMMARS,
    output_kind=st.sampled_from(["cumulative", "delta", "final"]),
)
ARRAYS = arrays.arrays(
    st.sampled_from(["<i8", "<i4", "?"]), arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4)
)
BASES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(), int: st.integers(-(2**63), 2**63 - 1), float: st.floats(allow_nan=False),
    str: st.text(max_size=8), bytes: st.binary(max_size=4), NoneType: st.none(),
    np.ndarray: ARRAYS | ARRAYS.map(lambda array: array.T), SamplingParams: PARAMS,
}


def make_strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that an annotation allows."""
    if kind in BASES:
        return BASES[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of(*map(make_strategy, args))
    if origin is list or Ellipsis in args:
        values = st.lists(make_strategy(args[0]), max_size=3)
        return values if origin is list else values.map(tuple)
    if origin is tuple:
        return st.tuples(*map(make_strategy, args))
    if origin is dict:
        return st.dictionaries(*map(make_strategy, args), max_size=3)
    return st.builds(kind, **{name: make_strategy(hint) for name, hint in get_type_hints(kind).items()})


def is_equal(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, msgspec.Struct):
        return all(is_equal(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_from_its_bytes(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(make_strategy(kind))
    assert is_equal(decode(encode(message), kind), message)


class ArrayMessage(msgspec.Struct):
    array: np.ndarray


def test_arrays_are_read_only_views_of_the_bytes() -> None:
    data = bytearray(encode(ArrayMessage(np.arange(12).reshape(3, 4)[:, ::2])))
    array = decode(data, ArrayMessage).array
    assert array.tolist() == [[0, 2], [4, 6], [8, 10]]
    assert np.shares_memory(array, np.frombuffer(data, np.uint8)) and not array.flags.writeable


@pytest.mark.parametrize("value", [np.int64(3), object()], ids=["number", "object"])
def test_what_no_message_holds_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=f"no message holds a {type(value).__name__}"):
        encode(NewTokens(handles=[value]))


@pytest.mark.parametrize(
    "data", [b"", b"\x80", encode(NewTokens())[:-1], encode(AddRequest("r", [], SamplingParams(), []))]
)
def test_bytes_that_are_no_such_message_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(data, StepPlan)


def cross(message: Any) -> Any:
    return decode(encode(message), type(message))


class Pipe(deque[Any]):
    """A queue whose messages go through bytes."""

    def append(self, message: Any) -> None:
        super().append(cross(message))


class CrossingHarness(SchedulerHarness):
    """Scheduler, worker, grammar and reader are each in a process of their own, as far as messages can tell."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.to_worker, self.to_grammar, self.to_scheduler = Pipe(), Pipe(), Pipe()

    def add_together(self, *requests: AddRequest) -> None:
        super().add_together(*map(cross, requests))

    def _collect(self, told: NewTokens) -> None:
        super()._collect(cross(told))


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_scheduler_whose_messages_go_through_bytes_answers_the_same(has_drafts: bool) -> None:
    chance = random.Random(3)
    proposer = RandomProposer(chance) if has_drafts else None
    house = CrossingHarness(num_blocks=40, proposer=proposer)
    prompts = {f"r{number}": chance.choices(range(90), k=chance.randrange(1, 60)) for number in range(30)}
    for number, (name, prompt) in enumerate(prompts.items()):
        kind: dict[str, Any] = [{}, {"gated": True}, {"logprobs": 1}, {"prompt_logprobs": 0}][number % 4]
        house.add(make_request(name, prompt, 30, **kind))
    house.run(chance)
    assert house.scheduler.state.num_preemptions > 0
    assert house.outputs == {name: reference_output(prompt, 30, MAX_MODEL_LEN) for name, prompt in prompts.items()}
