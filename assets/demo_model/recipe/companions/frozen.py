"""The finished model as others build on it: loaded from its checkpoint, its weights fixed."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ..training.examples import Encoder
from ..training.export import measure_shape
from ..training.helper import make_model
from ..training.model import Decoder

FOLDER = Path(__file__).parents[2]


def load_decoder(folder: Path) -> Decoder:
    """The decoder of an exported checkpoint, in bfloat16, without gradients."""
    named = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model."): weight for name, weight in named.items()}
    model = make_model(measure_shape(weights))
    model.load_state_dict(weights)
    return model.requires_grad_(False)


def open_encoder(folder: Path) -> Encoder:
    return Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))


class Rate:
    """A learning rate that warms up for a few steps and falls to zero with the time."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak: float, warm_up: int = 20) -> None:
        self.optimizer, self.peak, self.warm_up, self.num_steps = optimizer, peak, warm_up, 0

    def set(self, share: float) -> None:
        """Set the rate for the next step; `share` in 0..1 of the time is over."""
        self.num_steps += 1
        rate = self.peak * min(1.0, self.num_steps / self.warm_up) * max(0.02, 1 - share)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
