"""4-bit blocks against transformers' decoder."""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.model.formats.mxfp4 import Mxfp4Tensor


def test_numbers_equal_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 3), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)  # [E, out, in]
    tensor = Mxfp4Tensor(blocks, scales)
    assert tensor.shape == expected.shape and torch.equal(tensor.dequantize().float(), expected)
    for expert, rows in enumerate(expected):
        found = tensor[expert].read(slice(2, 9))
        assert found.form == tensor.form and torch.equal(found.dequantize(), rows[2:9])
