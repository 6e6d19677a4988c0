"""4-bit blocks against transformers' decoder."""

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.model.mxfp4 import Mxfp4Experts, decode_mxfp4


def make_encoded(num_experts: int = 3, num_outputs: int = 10, num_inputs: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_experts, num_outputs, num_inputs // 32)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8)


def test_numbers_equal_those_of_transformers() -> None:
    blocks, scales = make_encoded()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, in, out]
    for expert, matrix in enumerate(expected):
        assert torch.equal(decode_mxfp4(blocks[expert], scales[expert]), matrix.t())


@pytest.mark.parametrize("order", [("blocks", "scales"), ("scales", "blocks")])
def test_the_two_tensors_may_come_in_any_order(order: tuple[str, str]) -> None:
    encoded = dict(zip(("blocks", "scales"), make_encoded(), strict=True))
    written: dict[int, Tensor] = {}
    experts = Mxfp4Experts((3, 10, 96), written.__setitem__)
    assert {part: target.shape for part, target in experts.targets.items()} == {
        part: tensor.shape for part, tensor in encoded.items()
    }
    for part in order:
        assert not written
        experts.targets[part].copy(encoded[part])
    assert all(
        torch.equal(written[i], decode_mxfp4(encoded["blocks"][i], encoded["scales"][i])) for i in range(3)
    )
