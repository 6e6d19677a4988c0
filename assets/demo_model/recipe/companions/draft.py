"""Trains the draft model: 2 layers of width 128 with the demo model's tokenizer, on the same examples.

`python -m assets.demo_model.recipe.companions.draft --minutes 8`; writes a checkpoint like the model's own.
"""

import argparse
import time
from pathlib import Path
from random import Random

import torch

from ..training.batches import group_by_length, make_batch
from ..training.examples import sample_example
from ..training.export import export_checkpoint
from ..training.helper import compute_loss, make_model
from ..training.model import ModelShape
from ..training.optimizer import Optimizer
from ..training.train import compute_rate
from .frozen import FOLDER, load_decoder, open_encoder

SHAPE = ModelShape(num_layers=2, width=128, num_heads=2, num_kv_heads=1, mlp_width=384)
MAX_LENGTH, TOKENS_PER_BATCH, CHUNK = 420, 3072, 256


def train_draft(folder: Path, seconds: float, seed: int, start: Path | None = None) -> Optimizer:
    """The optimizer, which owns the trained weights; `start` is the checkpoint of an earlier run to go on from."""
    torch.manual_seed(seed)
    encoder = open_encoder(folder)
    model = load_decoder(start).requires_grad_(True) if start else make_model(SHAPE)
    optimizer, rng, begun = Optimizer(model), Random(seed), time.monotonic()
    num_tokens, mean = 0, 0.0
    while (time.monotonic() - begun) / seconds < 1:
        examples = [sample_example(encoder, rng, 0.0, 0.4) for _ in range(CHUNK)]
        groups = group_by_length([e for e in examples if len(e.token_ids) <= MAX_LENGTH], TOKENS_PER_BATCH)
        rng.shuffle(groups)
        for group in groups:
            share = (time.monotonic() - begun) / seconds
            if share >= 1:
                break
            batch = make_batch(group)
            loss = compute_loss(model, batch)
            loss.backward()
            optimizer.step(compute_rate(share, optimizer.num_steps))
            num_tokens += batch.num_tokens
            mean = loss.item() if mean == 0 else mean + 0.03 * (loss.item() - mean)
    print(f"draft: {optimizer.num_steps} steps, {num_tokens / 1e6:.2f} M tokens, loss {mean:.3f}", flush=True)
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the draft model.")
    parser.add_argument("--model", type=Path, default=FOLDER, help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, default=FOLDER / "draft")
    parser.add_argument("--start", type=Path, default=None, help="checkpoint of an earlier run to go on from")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    optimizer = train_draft(args.model, args.minutes * 60, args.seed, args.start)
    export_checkpoint(optimizer.masters, SHAPE, open_encoder(args.model).tokenizer, args.out)


if __name__ == "__main__":
    main()
