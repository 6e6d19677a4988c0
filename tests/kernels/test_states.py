"""Layers with states: both implementations against a plain loop in float64; native bits against cuts and batches."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu import make_native_ops
from kernels.ops import Ops
from kernels.states import CONV_WIDTHS, RunConv, ScanWeights, StateSegments
from kernels.torch import make_ops
from tests.kernels.cpu.conftest import require_library

NUM_SLOTS = 9


def find_ops(name: str) -> Ops:
    return make_ops() if name == "torch" else make_native_ops(require_library(), 2)


def make_segments(*runs: list[tuple[int, int, int]]) -> StateSegments:
    """Return segments from (source, target, number of tokens), run by run."""
    source, target, count = (np.array(each) for each in zip(*(part for run in runs for part in run), strict=True))
    first = np.cumsum(count) - count
    return StateSegments(source, target, first, count, np.cumsum([len(run) for run in runs]))


# Three runs: one that starts anew and keeps two states on its way, a decode, and one that only copies and goes on.
RUNS = ([(-1, 5, 32), (5, 6, 37), (6, 0, 64)], [(1, 1, 1)], [(2, 7, 0), (7, 2, 9)])
SEGMENTS = make_segments(*RUNS)
NUM_TOKENS = 143


def make_scan(
    kind: str, key_size: int, value_size: int, device: torch.device | None = None
) -> tuple[ScanWeights, dict[str, Tensor | None]]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    heads, groups = 4, 2
    skip = None if kind == "delta" else draw(heads)
    width, steps = heads * value_size, draw(NUM_TOKENS, 2 * heads)
    weights = ScanWeights(
        *(heads, groups, key_size, value_size, width, width + groups * key_size, 0, draw(heads), draw(heads), skip)
    )
    return weights, {
        "mixed": draw(NUM_TOKENS, width + 2 * groups * key_size),
        "dt": steps[:, :heads],
        "beta": steps[:, heads:] if kind == "delta" else None,
        "states": draw(NUM_SLOTS, heads, key_size, value_size),
    }


def scan_slowly(weights: ScanWeights, mixed: Tensor, dt: Tensor, beta: Any, states: Tensor) -> Tensor:
    """Run the recurrence token by token, as its formula says."""
    mixed, dt, states[:] = mixed.double(), dt.double(), states
    shape = NUM_TOKENS, weights.num_heads, weights.value_size
    out = torch.empty(shape, dtype=torch.float64, device=mixed.device)
    for each in range(len(SEGMENTS.source)):
        source, first = int(SEGMENTS.source[each]), int(SEGMENTS.first[each])
        state = torch.zeros_like(states[0]) if source < 0 else states[source].clone()
        for t in range(first, first + int(SEGMENTS.count[each])):
            for head in range(weights.num_heads):
                group = head * weights.num_groups // weights.num_heads
                query, key = (
                    mixed[t, at + group * weights.key_size :][: weights.key_size]
                    for at in (weights.query_at, weights.key_at)
                )
                value = mixed[t, weights.value_at + head * weights.value_size :][: weights.value_size]
                step = math.log1p(math.exp(float(dt[t, head] + weights.dt_bias[head])))
                old = state[head] * math.exp(-math.exp(float(weights.a_log[head])) * step)
                change = step * value
                if beta is not None:
                    query = query / (query.norm() * math.sqrt(weights.key_size))
                    key = key / key.norm()
                    change = torch.sigmoid(beta[t, head].double()) * (value - key @ old)
                state[head] = old + torch.outer(key, change)
                out[t, head] = query @ state[head]
                if weights.skip is not None:
                    out[t, head] += weights.skip[head] * value
        states[int(SEGMENTS.target[each])] = state
    return out.flatten(1)


@pytest.mark.parametrize("sizes", [(128, 128), (16, 12), (7, 40)], ids=str)
@pytest.mark.parametrize("kind", ["delta", "mamba"])
@pytest.mark.parametrize("name", ["torch", "native"])
def test_scan_follows_the_recurrence(name: str, kind: str, sizes: tuple[int, int]) -> None:
    weights, operands = make_scan(kind, *sizes)
    states = operands["states"]
    assert states is not None
    slow = states.double()
    expected = scan_slowly(weights, **operands | {"states": slow})  # type: ignore[arg-type]
    found = find_ops(name).scan_states(**operands, weights=weights, segments=SEGMENTS)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=2e-5)
    torch.testing.assert_close(states.double(), slow, atol=2e-5, rtol=2e-5)


def check_convolution(run_conv: RunConv, width: int, device: torch.device | None = None) -> None:
    """Convolve all runs of `SEGMENTS`, and compare outputs and states with those of a plain loop."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, weight, bias, states = draw(NUM_TOKENS, 75), draw(width, 75), draw(75), draw(NUM_SLOTS, width - 1, 75)
    slow = states.clone()
    expected = torch.empty_like(x)
    for each in range(len(SEGMENTS.source)):
        source, first, count = (int(part[each]) for part in (SEGMENTS.source, SEGMENTS.first, SEGMENTS.count))
        rows = torch.cat((torch.zeros_like(slow[0]) if source < 0 else slow[source], x[first : first + count]))
        for t in range(count):
            expected[first + t] = torch.nn.functional.silu((rows[t : t + width] * weight).sum(0) + bias)
        slow[int(SEGMENTS.target[each])] = rows[count:]
    wide = torch.cat((x, x.new_full((NUM_TOKENS, 3), torch.nan)), dim=1)[:, :75]  # rows lie apart
    found = run_conv(wide, weight, bias, states, SEGMENTS, has_silu=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(states, slow)


@pytest.mark.parametrize("width", CONV_WIDTHS)
@pytest.mark.parametrize("name", ["torch", "native"])
def test_convolution_reads_the_last_inputs(name: str, width: int) -> None:
    check_convolution(find_ops(name).run_conv, width)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_native_bits_do_not_depend_on_cuts_or_other_runs(kind: str) -> None:
    weights, operands = make_scan(kind, 64, 72)
    tokens: dict[str, Any] = {name: operands[name] for name in ("mixed", "dt", "beta")}
    start = operands["states"]
    assert start is not None
    ops = find_ops("native")
    whole = start.clone()
    expected = ops.scan_states(**tokens, weights=weights, states=whole, segments=make_segments([(3, 3, NUM_TOKENS)]))
    for cuts in ([1] * NUM_TOKENS, [17, 1, 32, 93]):
        states, done = start.clone(), 0
        for count in cuts:
            part = slice(done, done + count)
            # Another run goes before this one.
            both = {
                name: None if each is None else torch.cat((each[:5], each[part]))
                for name, each in tokens.items()
            }
            segments = make_segments([(4, 4, 5)], [(3, 8, count // 2), (8, 3, count - count // 2)])
            found = ops.scan_states(**both, weights=weights, states=states, segments=segments)
            assert torch.equal(found[5:], expected[part])
            done += count
        assert torch.equal(states[3], whole[3])
