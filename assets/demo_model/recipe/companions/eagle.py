"""Trains an EAGLE layer, which drafts from the hidden states of the finished model, read after the final norm.

`python -m assets.demo_model.recipe.companions.eagle --minutes 8`

fc([embedding of the next token, hidden state]) -> one decoder layer -> the next hidden state
Source: Li et al., 2024 (EAGLE).
"""

import argparse
import json
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ..training.attention import make_bias
from ..training.batches import Batch, group_by_length, make_batch
from ..training.examples import Encoder, sample_example
from ..training.export import make_config
from ..training.model import Decoder, Layer, ModelShape
from .frozen import FOLDER, Rate, load_decoder, open_encoder

MAX_LENGTH, TOKENS_PER_BATCH, CHUNK = 420, 2048, 256
PEAK_RATE = 2e-3


class EagleLayer(nn.Module):
    """One decoder layer over pairs of a hidden state and the embedding of the token that followed it."""

    def __init__(self, base: Decoder) -> None:
        super().__init__()
        width = base.shape.width
        self.fc = nn.Linear(2 * width, width)
        self.layer = Layer(base.shape)
        # Plain tensors: they belong to the model and are not saved with the layer.
        self.embeddings, self.cos, self.sin = base.embed_tokens.weight.detach(), base.cos, base.sin

    def forward(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """The hidden states that follow [B, T, width], given those up to T and the tokens after each."""
        pairs = torch.cat((F.embedding(next_ids, self.embeddings).to(hidden.dtype), hidden), -1)
        places = torch.arange(next_ids.shape[1])[None]
        cos, sin = (table[places][:, None].to(hidden.dtype) for table in (self.cos, self.sin))
        found: Tensor = self.layer(self.fc(pairs), cos, sin, make_bias(torch.zeros_like(places)))
        return found


def eagle_loss(eagle: EagleLayer, base: Decoder, batch: Batch) -> Tensor:
    """Distance to the true next hidden state plus a little loss on the token that it predicts."""
    with torch.no_grad():
        hidden = base(batch.token_ids).float()
    answers, targets = _spread(batch)
    found = eagle(hidden[:, :-1], batch.token_ids[:, 1:])  # found[:, t] stands for hidden[:, t + 1]
    wanted = answers[:, 2:]
    states, truth = found[:, :-1][wanted], hidden[:, 1:-1][wanted]
    logits = F.linear(states, eagle.embeddings.float())
    return F.smooth_l1_loss(states, truth) + 0.1 * F.cross_entropy(logits, targets[:, 2:][wanted])


def _spread(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which tokens [B, T] are answers, and all tokens: `positions` name the place before each answer token."""
    answers = torch.zeros(batch.token_ids.numel() + 1, dtype=torch.bool)
    answers[batch.positions + 1] = True
    return answers[:-1].view(batch.token_ids.shape), batch.token_ids


def sample_batches(encoder: Encoder, rng: Random) -> list[Batch]:
    """Fresh batches of the training mix, short prompts only."""
    examples = [sample_example(encoder, rng, 0.0, 0.5) for _ in range(CHUNK)]
    groups = group_by_length([e for e in examples if len(e.token_ids) <= MAX_LENGTH], TOKENS_PER_BATCH)
    rng.shuffle(groups)
    return [make_batch(group) for group in groups]


def train(base: Decoder, encoder: Encoder, seconds: float, seed: int) -> EagleLayer:
    """The trained layer, in float32."""
    torch.manual_seed(seed)
    eagle = EagleLayer(base)
    optimizer = torch.optim.AdamW(eagle.parameters(), weight_decay=0.01)
    rate, rng, begun, mean = Rate(optimizer, PEAK_RATE), Random(seed), time.monotonic(), 0.0
    while (time.monotonic() - begun) / seconds < 1:
        for batch in sample_batches(encoder, rng):
            share = (time.monotonic() - begun) / seconds
            if share >= 1:
                break
            rate.set(share)
            loss = eagle_loss(eagle, base, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.item() if mean == 0 else mean + 0.05 * (loss.item() - mean)
    print(f"eagle: {rate.num_steps} steps, loss {mean:.3f}", flush=True)
    return eagle


def save_eagle(eagle: EagleLayer, folder: Path, shape: ModelShape) -> None:
    """Names as the EAGLE project writes them; embeddings, final norm and output matrix are the model's own."""
    tensors = {"fc.weight": eagle.fc.weight, "fc.bias": eagle.fc.bias}
    tensors |= {f"layers.0.{name}": weight for name, weight in eagle.layer.named_parameters()}
    config = make_config(shape) | {
        "architectures": ["EagleQwen3ForCausalLM"],
        "base_model_name_or_path": "assets/demo_model",
        "layer_types": ["full_attention"],
        "max_window_layers": 1,
        "num_hidden_layers": 1,
    }
    _save({name: weight.detach().to(torch.bfloat16) for name, weight in tensors.items()}, config, folder)


def _save(tensors: dict[str, Tensor], config: dict[str, object], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an EAGLE layer on the demo model.")
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--out", type=Path, default=FOLDER / "eagle")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base, encoder = load_decoder(args.model), open_encoder(args.model)
    save_eagle(train(base, encoder, args.minutes * 60, args.seed), args.out, base.shape)


if __name__ == "__main__":
    main()
