"""Trains a layer that predicts the token after the next on the demo model, and counts tokens a step with it.

`python -m tests.measure.mtp_head --minutes 4 --folder DIR`: the demo model is written as a checkpoint of GLM-4.5
without experts, whose further layer is trained on hidden states of the model and on the texts of its recipe. It starts
from the EAGLE layer, which has the same parts but no norms. Then documents and questions of the recipe's sets are
answered greedily through the engine, one at a time, without drafts and with them.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from assets.demo_model.recipe.companions.acceptance import read_prompts
from assets.demo_model.recipe.companions.eagle import PEAK_RATE, sample_batches
from assets.demo_model.recipe.companions.frozen import FOLDER, Rate, load_decoder, open_encoder
from assets.demo_model.recipe.training.attention import make_bias
from assets.demo_model.recipe.training.batches import Batch
from assets.demo_model.recipe.training.model import Decoder, Layer
from engine import LLM, SamplingParams

DEPTH = 2  # predictions in a row that are trained, each from the hidden state before it
DECAY = 0.7
SEED = 31


class MtpLayer(nn.Module):
    """`eh_proj` over the normed embedding and hidden state, one decoder layer, and a norm."""

    def __init__(self, base: Decoder) -> None:
        super().__init__()
        width, eps = base.shape.width, base.shape.norm_eps
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(width, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = Layer(base.shape)
        # Plain tensors: they belong to the model.
        self.embeddings, self.cos, self.sin = base.embed_tokens.weight.detach().float(), base.cos, base.sin
        eagle = {name: each.float() for name, each in load_file(FOLDER / "eagle" / "model.safetensors").items()}
        self.layer.load_state_dict(
            {name.removeprefix("layers.0."): each for name, each in eagle.items() if name.startswith("layers.")}
        )
        # The norms divide by the root mean square, which the first weights give back.
        sizes = [each.float().pow(2).mean().sqrt() for each in (self.embeddings, base.norm.weight)]
        scales = torch.cat([size.expand(width) for size in sizes])
        self.eh_proj.weight.data.copy_(eagle["fc.weight"] * scales)
        self.norm.weight.data.fill_(sizes[1])

    def forward(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Return the hidden states that follow [B, T, width], given those up to T and the tokens after each."""
        pairs = torch.cat((self.enorm(F.embedding(next_ids, self.embeddings)), self.hnorm(hidden)), -1)
        places = torch.arange(next_ids.shape[1])[None]
        cos, sin = (table[places][:, None].float() for table in (self.cos, self.sin))
        found: Tensor = self.norm(self.layer(self.eh_proj(pairs), cos, sin, make_bias(torch.zeros_like(places))))
        return found


def compute_loss(layer: MtpLayer, base: Decoder, batch: Batch) -> Tensor:
    """Mean loss on the answers' tokens, predicted from the model's hidden states and then from the layer's own."""
    with torch.no_grad():
        hidden = base(batch.token_ids).float()
    answers = torch.zeros(batch.token_ids.numel() + 1, dtype=torch.bool)
    answers[batch.positions + 1] = True
    is_answer, total = answers[:-1].view(batch.token_ids.shape), torch.zeros(())
    for depth in range(DEPTH):
        # What stands at place t follows the tokens up to t + depth + 1.
        hidden = layer(hidden[:, :-1], batch.token_ids[:, depth + 1 :])
        wanted = is_answer[:, depth + 2 :]
        logits = F.linear(hidden[:, :-1][wanted], layer.embeddings)
        total = total + DECAY**depth * F.cross_entropy(logits, batch.token_ids[:, depth + 2 :][wanted])
    return total


def train(base: Decoder, seconds: float) -> MtpLayer:
    torch.manual_seed(SEED)
    layer, encoder, rng, begun = MtpLayer(base), open_encoder(FOLDER), Random(SEED), time.monotonic()
    optimizer = torch.optim.AdamW(layer.parameters(), weight_decay=0.01)
    rate, loss = Rate(optimizer, PEAK_RATE / 2), torch.zeros(())
    while time.monotonic() - begun < seconds:
        for batch in sample_batches(encoder, rng):
            rate.set(min(1.0, (time.monotonic() - begun) / seconds))
            loss = compute_loss(layer, base, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if time.monotonic() - begun > seconds:
                break
    print(json.dumps({"batches": rate.num_steps, "loss": round(loss.item(), 3)}), flush=True)
    return layer


def save(layer: MtpLayer, folder: Path) -> None:
    """Write the demo model with the layer as a checkpoint of GLM-4.5, all of whose layers are dense."""
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    number = config["num_hidden_layers"]
    kept = {
        key: config[key]
        for key in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "dtype"),
            *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"),
            *("eos_token_id", "hidden_act"),
        )
    }
    routing = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_shared_experts": 0}
    config = kept | routing | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": True,
        "first_k_dense_replace": number, "num_nextn_predict_layers": 1,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": 1.0},
    }  # fmt: skip
    prefix = f"model.layers.{number}."
    names = {"norm.": "shared_head.norm.", "layer.": ""}
    added = {}
    for name, weight in layer.named_parameters():
        for ours, theirs in names.items():
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        added[prefix + name] = weight.detach().to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    save_file(load_file(FOLDER / "model.safetensors") | added, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def measure(folder: Path, num_prompts: int, drafts: list[int], adaptive: bool) -> None:
    """Print how many tokens a step of a request yields without its first one, and whether texts are equal."""
    params = SamplingParams(temperature=0.0, max_tokens=160)
    for task, prompts in read_prompts(open_encoder(FOLDER), num_prompts, num_prompts).items():
        expected: list[Any] = []
        for num_drafts in (0, *drafts):
            method = {"method": "mtp", "num_speculative_tokens": num_drafts, "adaptive": adaptive}
            settings: dict[str, Any] = {"num_threads": 1, "max_model_len": 1024, "num_blocks": 200}
            with LLM(str(folder), speculative_config=method if num_drafts else "off", **settings) as llm:
                begun = time.perf_counter()
                outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
                seconds, counts = time.perf_counter() - begun, llm.stats().drafts.get("mtp")
            found = [output.outputs[0].token_ids for output in outputs]
            expected = expected or found
            num_tokens = sum(len(ids) - 1 for ids in found)
            num_accepted = sum(counts.accepted_per_position) if counts else 0
            figures = {
                "task": task, "drafts": num_drafts, "tokens_per_s": round(num_tokens / seconds),
                "tokens_per_step": round(num_tokens / (num_tokens - num_accepted), 3), "equal": found == expected,
            }  # fmt: skip
            print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is written")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training; 0: measure the checkpoint")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--drafts", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--adaptive", action="store_true", help="draft only where it pays")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.minutes:
        save(train(load_decoder(FOLDER), args.minutes * 60), args.folder)
    measure(args.folder, args.prompts, args.drafts, args.adaptive)


if __name__ == "__main__":
    main()
