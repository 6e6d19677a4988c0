"""LayerTapes: runs the layers of small steps from tapes, one for each number of tokens and choice of adapters.

In a step of few tokens Python costs more than arithmetic. Inputs that change from step to step are copied to where the
tape expects them; see `kernels.ops.Tape`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import call, is_

from torch import Tensor

from engine.model.adapters import StepAdapters
from engine.model.mixers.attention import StepInputs
from engine.model.rope import Rotation
from kernels import Ops
from kernels.ops import KVCache, Tape

# Runs all layers on their input, which may be overwritten, with the caches and inputs of a step, and calls the last
# argument before each layer.
RunLayers = Callable[[Tensor, Sequence[KVCache], StepInputs, Callable[[], None]], tuple[Tensor, ...]]
# Steps of more tokens need more memory for their results, and Python costs them little.
MAX_TOKENS = 64
_MAX_TAPES = 16
_Key = tuple[int, tuple[tuple[int, int, int], ...]]  # tokens; adapter, start and end of each segment


class LayerTapes:
    """Records the steps of one model on one implementation of ops."""

    def __init__(self, ops: Ops, run: RunLayers) -> None:
        self.ops, self._run = ops, run
        self._tapes: OrderedDict[_Key, _RecordedStep] = OrderedDict()
        self._last_key: _Key | None = None
        self._is_off = ops.make_tape is None

    def run(self, x: Tensor, kv_caches: Sequence[KVCache], step: StepInputs) -> tuple[Tensor, ...]:
        """Run all layers on their input [T, ...]. The next step may overwrite the results."""
        num_tokens = x.shape[0]
        if self._is_off or num_tokens > MAX_TOKENS:
            return self._run(x, kv_caches, step, lambda: None)
        adapters: list[tuple[int, int, int]] = []
        if step.adapters is not None:
            adapters = [(id(each), start, end) for each, start, end in step.adapters.segments]
        key = (num_tokens, tuple(adapters))
        # Adapters come and go; a choice of them is recorded when it comes twice in a row.
        is_lasting = step.adapters is None or key == self._last_key
        self._last_key = key
        found = self._tapes.get(key)
        if found is not None and found.has(_list_owned(kv_caches, step)):
            self._tapes.move_to_end(key)
            return found.repeat(x, step)
        if not is_lasting:
            return self._run(x, kv_caches, step, lambda: None)
        assert self.ops.make_tape is not None, "else tapes are off"
        recorded = _RecordedStep(self.ops.make_tape(), x, kv_caches, step)
        result = recorded.record(self._run, kv_caches, step.adapters)
        if recorded.tape.is_complete:
            self._tapes[key] = recorded
            self._tapes.move_to_end(key)
            if len(self._tapes) > _MAX_TAPES:
                self._tapes.popitem(last=False)
        else:
            self._is_off = True
        return result


class _RecordedStep:
    """A tape and its inputs. Caches and adapters belong to others, who may free them."""

    def __init__(self, tape: Tape, x: Tensor, kv_caches: Sequence[KVCache], step: StepInputs) -> None:
        self.tape = tape
        self._x = x.clone()
        self._owned = [weakref.ref(each) for each in _list_owned(kv_caches, step)]
        self._rows = None if step.adapters is None else step.adapters.rows.clone()
        metadata = step.attn_metadata
        if metadata.states is not None:
            metadata = replace(metadata, states=tape.copy_segments(metadata.states))
        self._step = replace(
            step,
            adapters=None,
            attn_metadata=metadata,
            groups=tuple(
                replace(group, slot_mapping=group.slot_mapping.clone(), plan=tape.copy_plan(group.plan))
                for group in step.groups
            ),
            rotations=tuple(_copy_rotation(rotation) for rotation in step.rotations),
        )

    def has(self, owned: Sequence[object]) -> bool:
        """Whether these caches and adapters were recorded."""
        return len(owned) == len(self._owned) and all(map(is_, map(call, self._owned), owned))

    def record(
        self, run: RunLayers, kv_caches: Sequence[KVCache], adapters: StepAdapters | None
    ) -> tuple[Tensor, ...]:
        if adapters is not None:
            assert self._rows is not None, "the step has adapters"
            adapters = replace(adapters, rows=self._rows)
        step = replace(self._step, adapters=adapters)
        return self.tape.record(lambda: run(self._x, kv_caches, step, self.tape.next_layer))

    def repeat(self, x: Tensor, step: StepInputs) -> tuple[Tensor, ...]:
        held = self._step
        self._x.copy_(x)
        for old, new in zip(held.rotations, step.rotations, strict=True):
            old.cos.copy_(new.cos)
            old.sin.copy_(new.sin)
            if old.query_scale is not None and new.query_scale is not None:
                old.query_scale.copy_(new.query_scale)
        for group, other in zip(held.groups, step.groups, strict=True):
            group.slot_mapping.copy_(other.slot_mapping)
            self.tape.update(group.plan, other.plan)
        if held.attn_metadata.states is not None:
            self.tape.update(held.attn_metadata.states, step.attn_metadata.states)
        if self._rows is not None and step.adapters is not None:
            self._rows.copy_(step.adapters.rows)
        return self.tape.repeat()


def _list_owned(kv_caches: Sequence[KVCache], step: StepInputs) -> list[object]:
    owned: list[object] = list(chain.from_iterable(kv_caches))
    return owned if step.adapters is None else owned + [each.adapter for each in step.adapters.segments]


def _copy_rotation(rotation: Rotation) -> Rotation:
    scale = rotation.query_scale
    return Rotation(rotation.cos.clone(), rotation.sin.clone(), None if scale is None else scale.clone())
