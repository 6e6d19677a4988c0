"""Recurrences and convolutions of the Triton kernels against plain loops; bits against other runs and cuts."""

import pytest
import torch

from kernels.states import CONV_WIDTHS
from kernels.triton.states import run_conv, scan_states
from tests.kernels.test_states import SEGMENTS, check_convolution, make_scan, make_segments, scan_slowly

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("kind", "sizes"), [("delta", (40, 12)), ("mamba", (7, 40))], ids=str)
def test_scan_follows_the_recurrence(device: torch.device, kind: str, sizes: tuple[int, int]) -> None:
    weights, operands = make_scan(kind, *sizes, device=device)
    states = operands["states"]
    assert states is not None
    slow = states.double()
    expected = scan_slowly(weights, **operands | {"states": slow})  # type: ignore[arg-type]
    found = scan_states(**operands, weights=weights, segments=SEGMENTS)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=2e-5)
    torch.testing.assert_close(states.double(), slow, atol=2e-5, rtol=2e-5)


def test_bits_do_not_depend_on_cuts_or_other_runs(device: torch.device) -> None:
    """A run of drafts keeps a state before each of them, and gives the bits of single decodes."""
    weights, operands = make_scan("delta", 16, 12, device=device)
    start = operands.pop("states")
    assert start is not None
    tokens = {name: None if each is None else each[:4] for name, each in operands.items()}
    drafts, alone = start.clone(), start.clone()
    runs = make_segments([(3, 5, 1), (5, 6, 1), (6, 3, 1)], [(4, 4, 1)])
    expected = scan_states(**tokens, weights=weights, states=drafts, segments=runs)  # type: ignore[arg-type]
    for at in range(3):
        token = {name: None if each is None else each[at : at + 1] for name, each in tokens.items()}
        one = make_segments([(3, 3, 1)])
        found = scan_states(**token, weights=weights, states=alone, segments=one)  # type: ignore[arg-type]
        assert torch.equal(found[0], expected[at])
        assert torch.equal(alone[3], drafts[(5, 6, 3)[at]])


@pytest.mark.parametrize("width", CONV_WIDTHS)
def test_convolution_reads_the_last_inputs(device: torch.device, width: int) -> None:
    check_convolution(run_conv, width, device)
