"""A second process that computes gradients on its own examples while the first one trains.

The two share the weights in memory. The helper reads them while they change and hands over each gradient
when the trainer asks for it, so that neither waits for the other; on a busy machine this uses both cores
where two threads of one process would spin.
"""

from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, multiprocessing
from torch.nn import functional as F

from .batches import Batch, stream_batches
from .examples import Encoder
from .model import Decoder, ModelShape

Tensors = dict[str, Tensor]


def compute_loss(model: Decoder, batch: Batch) -> Tensor:
    """Mean loss over the weighted answer tokens."""
    logits = model.logits_at(batch.token_ids, batch.positions, batch.places, batch.branches)
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum()


class GradientHelper:
    """Owns the shared gradients and the process that fills them."""

    def __init__(self, model: Decoder, tokenizer_path: Path, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        weights = {name: weight.data.share_memory_() for name, weight in model.named_parameters()}
        self.gradients: Tensors = {
            name: torch.zeros_like(weight).share_memory_() for name, weight in weights.items()
        }
        self.share = torch.zeros(1, dtype=torch.float64).share_memory_()
        self.num_tokens = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.full, self.empty = context.Event(), context.Event()
        self.empty.set()
        shared = (weights, self.gradients, self.share, self.num_tokens, self.full, self.empty)
        arguments = (model.shape, str(tokenizer_path), seed, *shared)
        self.process = context.Process(target=run_helper, args=arguments, daemon=True)
        self.process.start()

    def add_gradients(self, model: Decoder, share: float) -> int:
        """Average a waiting gradient into the model's own; returns the tokens it saw, 0 when none waits."""
        self.share[0] = share
        if not self.full.is_set():
            return 0
        for name, weight in model.named_parameters():
            assert weight.grad is not None, f"no gradient for {name}"
            weight.grad.add_(self.gradients[name]).mul_(0.5)
        num_tokens = int(self.num_tokens[0])
        self.full.clear()
        self.empty.set()
        return num_tokens


def run_helper(
    shape: ModelShape,
    tokenizer_path: str,
    seed: int,
    weights: Tensors,
    gradients: Tensors,
    share: Tensor,
    num_tokens: Tensor,
    full: Event,
    empty: Event,
) -> None:
    """Body of the helper process: one gradient after another, until it is ended with its parent."""
    torch.set_num_threads(1)
    model = make_model(shape)
    for name, weight in model.named_parameters():
        weight.data = weights[name]
    for batch in stream_batches(Encoder(Tokenizer.from_file(tokenizer_path)), seed, lambda: float(share[0])):
        compute_loss(model, batch).backward()
        empty.wait()
        empty.clear()
        for name, weight in model.named_parameters():
            assert weight.grad is not None, f"no gradient for {name}"
            gradients[name].copy_(weight.grad)
            weight.grad = None
        num_tokens[0] = batch.num_tokens
        full.set()


def make_model(shape: ModelShape) -> Decoder:
    """A bfloat16 model with float32 rotary tables."""
    model = Decoder(shape)
    tables = model.cos, model.sin
    model = model.to(torch.bfloat16)
    model.cos, model.sin = tables
    return model
