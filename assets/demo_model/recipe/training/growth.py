"""Grows a run in depth: copies of layers that add nothing at first, so that the grown model reads as the old one did.

Source: Wu et al., 2024 (LLaMA Pro), block expansion.
"""

import re

from torch import Tensor

IN_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
# Matrices that add to the residual stream: zero in a copy.
OUTPUTS = ("o_proj.weight", "down_proj.weight")


def count_layers(state: dict[str, Tensor]) -> int:
    """How many layers a saved state or a model's weights have."""
    return 1 + max(int(found[2]) for name in state if (found := IN_LAYER.fullmatch(name)))


def grow(state: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The state of a run with `num_layers` layers that computes the same: masters, means and moments.

    Raises:
        ValueError: the state has more layers than that.
    """
    before = count_layers(state)
    if num_layers < before:
        raise ValueError(f"layers={num_layers}: the run has {before}; a run only grows")
    grown = {name: tensor for name, tensor in state.items() if not IN_LAYER.fullmatch(name)}
    sources = [layer * before // num_layers for layer in range(num_layers)]
    for name, tensor in state.items():
        if found := IN_LAYER.fullmatch(name):
            places = [place for place, source in enumerate(sources) if source == int(found[2])]
            for place in places:
                # the copies stand behind the layer they were made from
                is_silent = place > places[0] and name.endswith(OUTPUTS)
                grown[f"{found[1]}{place}{found[3]}"] = (
                    tensor.clone().zero_() if is_silent else tensor.clone()
                )
    return grown
