"""Trains the demo model on fresh examples for a given time, and resumes where an earlier run stopped.

`python -m assets.demo_model.recipe.training.train --out RUN --minutes 120`; the schedule follows the time spent.
"""

import argparse
import json
import signal
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .batches import Batch, make_batch, stream_batches
from .examples import Encoder, Example, sample_example
from .export import export_checkpoint
from .growth import count_layers, grow
from .helper import GradientHelper, compute_loss, make_model
from .model import ModelShape
from .optimizer import Optimizer
from .scoring import score_development
from .tokenizer import sample_texts, save_tokenizer, train_tokenizer

WARM_UP_STEPS, DECAY_FROM, FINAL_RATE = 60, 0.5, 0.02
DEVELOPMENT_SEED, DEVELOPMENT_SIZE = 1_000_003, 240


@dataclass(slots=True)
class Progress:
    """How far a run is; kept in `progress.json` beside the state."""

    spent_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_runs: int = 0


class Trainer:
    """One run in a folder: tokenizer, state, log of figures, exported snapshots."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shape: ModelShape) -> None:
        self.folder, self.tokenizer, self.shape = folder, tokenizer, shape
        self.encoder = Encoder(tokenizer)
        self.model = make_model(shape)
        self.optimizer = Optimizer(self.model)
        self.exported = make_model(shape)  # holds the means when they are scored
        self.progress = Progress()
        self.loss = 0.0
        self.helper: GradientHelper | None = None
        self.stopped = False
        rng = Random(DEVELOPMENT_SEED)
        self.development: list[Example] = [sample_example(self.encoder, rng) for _ in range(DEVELOPMENT_SIZE)]

    def start_helper(self, seed: int) -> None:
        self.helper = GradientHelper(self.model, self.folder / "tokenizer.json", seed)

    def resume(self) -> None:
        """Load the state of the folder, if there is one; one of fewer layers grows."""
        if (self.folder / "progress.json").exists():
            self.progress = Progress(**json.loads((self.folder / "progress.json").read_text()))
            state = grow(load_file(self.folder / "state.safetensors"), self.shape.num_layers)
            self.optimizer.restore(state, self.progress.num_steps)

    def stop(self, *_: object) -> None:
        """End after the current step, with everything saved."""
        self.stopped = True

    def save(self) -> None:
        save_file(self.optimizer.state(), self.folder / "state.new")
        (self.folder / "state.new").replace(self.folder / "state.safetensors")
        fields = {name: getattr(self.progress, name) for name in Progress.__slots__}
        (self.folder / "progress.json").write_text(json.dumps(fields) + "\n")
        export_checkpoint(self.optimizer.means, self.shape, self.tokenizer, self.folder / "snapshot")

    def train(self, budget_s: float, snapshot_s: float, seed: int) -> None:
        """Train for `budget_s` more seconds; the schedule covers these and all earlier seconds."""
        total, begun, before = self.progress.spent_s + budget_s, time.monotonic(), self.progress.spent_s
        self.progress.num_runs += 1
        saved = begun

        def share() -> float:
            return (before + time.monotonic() - begun) / total

        for batch in stream_batches(self.encoder, seed + self.progress.num_runs, share):
            if share() >= 1 or self.stopped:
                break
            self.step(batch, share())
            self.progress.spent_s = before + time.monotonic() - begun
            if self.progress.num_steps % 50 == 0:
                self.log(share(), self.progress.num_tokens)
            if time.monotonic() - saved > snapshot_s:
                saved = time.monotonic()
                self.save()
                self.report()
        self.save()
        self.report()

    def step(self, batch: Batch, share: float) -> None:
        loss = compute_loss(self.model, batch)
        loss.backward()
        self.progress.num_tokens += batch.num_tokens
        if self.helper is not None:
            self.progress.num_tokens += self.helper.add_gradients(self.model, share)
        self.optimizer.step(compute_rate(share, self.progress.num_steps))
        self.progress.num_steps += 1
        self.loss = loss.item() if self.loss == 0 else self.loss + 0.03 * (loss.item() - self.loss)

    def log(self, share: float, num_tokens: int) -> None:
        spent = self.progress.spent_s
        rate = compute_rate(share, self.progress.num_steps)
        print(
            f"{datetime.now():%H:%M:%S} step {self.progress.num_steps} minute {spent / 60:.1f} ({share:.3f}) "
            f"tokens {num_tokens / 1e6:.2f}M {num_tokens / spent:.0f}/s loss {self.loss:.3f} rate {rate:.2f}",
            flush=True,
        )

    def report(self) -> None:
        self.exported.load_state_dict(self.optimizer.means)
        figures = score_development(self.exported, self.development, make_batch)
        print(f"EVAL minute {self.progress.spent_s / 60:.1f} {json.dumps(figures)}", flush=True)


def compute_rate(share: float, num_steps: int) -> float:
    """Learning-rate factor: warm-up, constant, then linear towards zero over the second half."""
    decay = min(1.0, max(FINAL_RATE, (1 - share) / (1 - DECAY_FROM)))
    return min(1.0, (num_steps + 1) / WARM_UP_STEPS) * decay


def open_tokenizer(folder: Path, num_texts: int) -> Tokenizer:
    """The run's tokenizer, trained first when the folder has none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        save_tokenizer(train_tokenizer(sample_texts(num_texts, Random(11))), folder)
    return Tokenizer.from_file(str(path))


def find_layers(folder: Path) -> int:
    """How many layers the folder's run has, or a new one begins with."""
    path = folder / "state.safetensors"
    return count_layers(load_file(path)) if path.exists() else ModelShape().num_layers


def seconds_until(moment: str) -> float:
    return (datetime.fromisoformat(moment) - datetime.now()).total_seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model, or go on with an earlier run.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=120.0, help="time to spend from now on")
    parser.add_argument("--until", default="", help="ISO time at which to stop, instead of --minutes")
    parser.add_argument("--snapshot-minutes", type=float, default=8.0)
    parser.add_argument("--helper", action="store_true", help="compute more gradients in a second process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0, help="an earlier run may grow; as it is by default")
    parser.add_argument("--texts", type=int, default=30000, help="examples the tokenizer learns from")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = open_tokenizer(args.out, args.texts)
    shape = ModelShape(
        num_layers=args.layers or find_layers(args.out), vocabulary_size=tokenizer.get_vocab_size()
    )
    trainer = Trainer(args.out, tokenizer, shape)
    trainer.resume()
    if args.helper:
        trainer.start_helper(args.seed + 500 + trainer.progress.num_runs)
    budget = seconds_until(args.until) if args.until else args.minutes * 60
    signal.signal(signal.SIGTERM, trainer.stop)
    trainer.train(budget, args.snapshot_minutes * 60, args.seed)


if __name__ == "__main__":
    main()
