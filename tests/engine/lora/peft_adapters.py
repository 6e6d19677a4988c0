"""Random adapters of every supported kind, made and computed by PEFT on a tiny model."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.model.drive import compute_expected, make_transformers_model, save

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]
# PEFT's "all-linear" selects routers and experts of these as well, which are not matrices of a module.
NOT_ALL_LINEAR = ("qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "olmoe")
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 7},
    "rslora": {"r": 3, "lora_alpha": 5, "use_rslora": True},
    "patterns": {
        "r": 2, "target_modules": ATTENTION, "rank_pattern": {"layers.1.self_attn.o_proj": 3, "o_proj": 5},
        "alpha_pattern": {"^model.layers.0.*": 9}, "layers_to_transform": [0, 1], "lora_bias": True,
    },
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True},
    "tables": {"r": 3, "lora_alpha": 4, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "saved": {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


class PeftTwin:
    """A tiny model, and one adapter of each kind.

    Args:
        folder: gets the checkpoint, and a folder of each adapter.
    """

    def __init__(self, family: str, folder: Path, kinds: dict[str, dict[str, Any]] = KINDS, **overrides: Any) -> None:
        self._base: PreTrainedModel = make_transformers_model(family, **overrides)
        self.checkpoint = save(self._base, folder / "base")
        self.folder = folder
        linears = ATTENTION if family in NOT_ALL_LINEAR else "all-linear"
        # PEFT cannot add all kinds to one model.
        self._models: dict[str, PeftModel] = {}
        for kind, options in kinds.items():
            config = LoraConfig(**({"target_modules": linears, "task_type": "CAUSAL_LM"} | options))
            self._models[kind] = PeftModel(deepcopy(self._base), config).eval()
            fill_randomly(self._models[kind])
            self._models[kind].save_pretrained(str(folder / kind))

    def compute(self, token_ids: list[int], kind: str | None = None) -> Tensor:
        """Return PEFT's logits of one sequence, [n, V]; without a kind, those of the base model."""
        model: Any = self._base if kind is None else self._models[kind]
        return compute_expected(model, token_ids)


def fill_randomly(model: PeftModel) -> None:
    """Give the adapter lively weights; PEFT's first ones change nothing."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif "lora_" in name:
                parameter.normal_(0.0, 0.2)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
