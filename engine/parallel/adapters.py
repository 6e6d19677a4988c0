"""Adapters on several ranks: rank 0 reads and checks the files, and every rank keeps its part of each matrix.

OpenAdapter ─▶ (MeasureModule ─▶ Measured) PutModule ... ─▶ FinishAdapter ─▶ Forward(adapters) ... ─▶ FreeAdapters

There is one message per module, so steps run between them.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from safetensors.torch import load, save
from torch import Tensor

from engine.lora.adapter_config import read_adapter_config
from engine.lora.adapter_files import AdapterFiles
from engine.lora.loader import Adapter, AdapterBuilder
from engine.model.adapters import AdapterHandle, AdapterSegment, StepAdapters
from engine.model.decoder import DecoderModel
from engine.parallel.commands import (
    AdapterCommand,
    FinishAdapter,
    FreeAdapters,
    Measured,
    MeasureModule,
    OpenAdapter,
    PutModule,
    Segment,
    UnbindAdapter,
)
from engine.parallel.ranks import Ranks


class PeerAdapters:
    """Rank 0's side: gives the other ranks each adapter that it loads."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._numbers = count()
        self._freed: deque[int] = deque()

    def open(self, files: AdapterFiles) -> PeerAdapter:
        """Start to load an adapter."""
        handle = AdapterHandle(next(self._numbers), self._freed)
        self._ranks.send(OpenAdapter(handle.number, files.parse_config()))
        return PeerAdapter(self._ranks, handle)

    def unbind(self, number: int) -> None:
        """Let the other ranks free what an adapter holds on their devices."""
        self._ranks.send(UnbindAdapter(number))

    def free_unused(self) -> None:
        """Let the other ranks free the adapters that nothing on rank 0 refers to."""
        numbers = [self._freed.popleft() for _ in range(len(self._freed))]
        if numbers:
            self._ranks.send(FreeAdapters(numbers))


class PeerAdapter:
    """One adapter that is being loaded; implements `AdapterPeers`."""

    def __init__(self, ranks: Ranks, handle: AdapterHandle) -> None:
        self._ranks = ranks
        self.handle = handle

    def measure(self, module: str, tensors: dict[str, Tensor]) -> list[Tensor]:
        replies = self._ranks.ask(MeasureModule(self.handle.number, module, _encode(tensors)))
        return [load(reply.squares)[""] for reply in replies if isinstance(reply, Measured)]

    def put(self, module: str, tensors: dict[str, Tensor]) -> None:
        self._ranks.send(PutModule(self.handle.number, module, _encode(tensors)))

    def finish(self) -> None:
        """Let the other ranks prepare the adapter for steps."""
        self._ranks.send(FinishAdapter(self.handle.number))


class RankAdapters:
    """Another rank's parts of the adapters, by number."""

    def __init__(self, model: DecoderModel, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._builders: dict[int, AdapterBuilder] = {}
        self._adapters: dict[int, Adapter] = {}

    def handle(self, command: AdapterCommand) -> Measured | None:
        """Obey rank 0. Returns the reply, if there is one."""
        match command:
            case OpenAdapter(number=number, config=config):
                settings = read_adapter_config(config)
                self._builders[number] = AdapterBuilder(settings, self._model, self._max_rank)
            case MeasureModule(number=number, module=module, tensors=tensors):
                return Measured(save({"": self._builders[number].measure(module, load(tensors))}))
            case PutModule(number=number, module=module, tensors=tensors):
                self._builders[number].add(module, load(tensors))
            case FinishAdapter(number=number):
                self._adapters[number] = adapter = self._builders.pop(number).finish()
                if self._model.embed_tokens.device.type == "cpu":
                    adapter.bind(self._model)
            case UnbindAdapter(number=number):
                if (bound := self._adapters.get(number)) is not None:
                    bound.bound = None
            case FreeAdapters(numbers=numbers):
                for number in numbers:
                    self._builders.pop(number, None)
                    self._adapters.pop(number, None)
        return None

    def find(self, segments: list[Segment], rows: Tensor) -> StepAdapters | None:
        """Return the adapters of a step, given what `list_segments` returned on rank 0."""
        if not segments:
            return None
        found = [
            AdapterSegment(self._adapters[number].bind(self._model), start, end)
            for number, start, end in segments
        ]
        return StepAdapters(self._model.ops, rows, found)

    def unbind(self) -> None:
        """Free what adapters hold on the device."""
        for adapter in self._adapters.values():
            adapter.bound = None


def list_segments(adapters: StepAdapters | None) -> list[Segment]:
    """Return (number, start, end) of each adapter in a step."""
    if adapters is None:
        return []
    found = []
    for adapter, start, end in adapters.segments:
        assert adapter.handle is not None, "adapters of several ranks have numbers"
        found.append((adapter.handle.number, start, end))
    return found


def _encode(tensors: dict[str, Tensor]) -> bytes:
    return save({kind: tensor.contiguous() for kind, tensor in tensors.items()})
