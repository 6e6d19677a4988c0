"""How many kernels a step launches per layer on a GPU, counted without one on the meta device.

Launches of Triton are counted by a stub, those of torch's operators by a dispatch mode; views and allocations are none.
A read of a value raises.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.device.kv_cache import allocate_kv_cache
from engine.lora.loader import Adapter
from engine.model import DecoderModel, ModelConfig
from engine.model.adapters import AdapterTables, StepAdapters, join_segments
from engine.model.attn_metadata import AttnMetadata
from engine.model.linear import Linear
from engine.worker.state_slots import allocate_states, cut_runs
from kernels.lora import LoraMatrix, LoraPart
from tests.engine.model.drive import make_transformers_model, save
from tests.kernels.triton.conftest import IS_INTERPRETED

pytest.importorskip("triton", reason="needs triton")

from triton.runtime.jit import JITFunction

import kernels.triton as triton_ops

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="a process that interprets launches nothing")

META = torch.device("meta")
BLOCK = 16
DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
# Family, config beside the common sizes, layers that repeat, launches of a layer at most.
MODELS: dict[str, tuple[str, dict[str, Any], int, float]] = {
    "dense": ("qwen3", {}, 1, 8),
    "experts": ("qwen3_moe", {}, 1, 13),
    "hybrid": ("qwen3_5", DELTA, 4, 10),
    "prompt": ("qwen3_5", DELTA, 4, 12),
    "adapter": ("qwen3", {}, 1, 17),
}


class Counts(TorchDispatchMode):
    """Counts what torch would launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, found = func._schema.name, tree_leaves(result)
        is_free = func.is_view or name.startswith("aten::empty") or name in ("aten::_unsafe_view", "aten::new_empty")
        if not is_free and any(isinstance(each, Tensor) and each.is_meta for each in found):
            self.launches[name] += 1
        return result


def count(
    launched: Counter[str], family: str, shape: dict[str, Any], num_layers: int, folder: Path, *, has_adapter: bool,
    num_new: int = 1,
) -> Counter[str]:
    """Compute new tokens of each of two requests: slices of one row alone need no copy."""
    sizes = {"head_dim": 64, "hidden_size": 256, "num_hidden_layers": num_layers}
    config = ModelConfig.from_pretrained(save(make_transformers_model(family, **sizes | shape), folder))
    model = DecoderModel(config, torch.bfloat16, META, triton_ops.make_ops(META, torch.bfloat16))
    model.pack()
    model.reserve_positions(64)
    caches = allocate_kv_cache(model.kv_specs(), 8, BLOCK, torch.bfloat16, META)
    caches += allocate_states(model.state_specs(), 2, META)
    two = np.arange(2)
    metadata = AttnMetadata(
        slot_mapping=torch.zeros(1, 2 * num_new, dtype=torch.int64, device=META),
        block_tables=torch.zeros(1, 2, 4, dtype=torch.int32, device=META),
        query_start_loc=torch.zeros(3, dtype=torch.int32, device=META),
        seq_lens=torch.zeros(2, dtype=torch.int32, device=META),
        query_lens_list=[num_new, num_new],
        seq_lens_list=[num_new + 4, num_new + 5],
        states=cut_runs(two, two + 4, np.full_like(two, num_new), []),
    )
    adapters = add_adapter(model) if has_adapter else None
    ids = torch.zeros(2 * num_new, dtype=torch.int64, device=META)
    launched.clear()
    with torch.no_grad(), Counts() as counts:
        model.forward(ids, ids, caches, metadata, adapters)
    return launched + counts.launches


def add_adapter(model: DecoderModel) -> StepAdapters | None:
    """An adapter of rank 8 for all matrices of the layers."""
    adapter = Adapter()
    for linear in model.layers.modules():
        if isinstance(linear, Linear):
            part = LoraPart(0, 0, torch.zeros(linear.out_features, 8), 1.0)
            matrix = LoraMatrix(torch.zeros(8, linear.in_features), (part,), linear.out_features)
            adapter.matrices[linear] = matrix
    tables = AdapterTables(model.ops, model.matrix_parts.values(), 1, 8, META)
    return join_segments(model.ops, [adapter.bind(model)], [np.arange(2)], META, tables)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found: Counter[str] = Counter()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: found.update((kernel.__name__,)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_launches_few_kernels(launched: Counter[str], tmp_path: Path, name: str) -> None:
    """A layer is the difference between two sizes of the model."""
    family, shape, period, most = MODELS[name]
    totals = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        num_new = 40 if name == "prompt" else 1
        options: dict[str, Any] = {"has_adapter": name == "adapter", "num_new": num_new}
        totals.append(count(launched, family, shape, number * period, folder, **options))
    layer = totals[1] - totals[0]
    assert layer.total() / period <= most, dict(layer)
    assert layer["add_rms_norm_kernel"] == 2 * period, "the stub counts"
