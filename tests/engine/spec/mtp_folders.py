"""Tiny random checkpoints with a layer that predicts the token after the next."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.model.drive import make_transformers_model, save

NUMBERED, SEPARATE = ["deepseek_v3", "glm4_moe"], ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
FAMILIES = NUMBERED + SEPARATE


def write_mtp_folder(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """Save a tiny model, and a layer that predicts, which has the shapes of the last one."""
    if family in NUMBERED:
        overrides |= {"first_k_dense_replace": 0, "num_nextn_predict_layers": 1}
    model = make_transformers_model(family, **overrides)
    file = save(model, folder) / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    size, number = model.config.hidden_size, model.config.num_hidden_layers

    def draw(name: str, *shape: int) -> Tensor:
        noise = torch.rand(shape, generator=generator)
        return noise + 0.5 * (family in NUMBERED) if name.endswith("norm.weight") else (noise - 0.5) / 2

    (fc, *norms), layer, outer = list_names(family, number)
    last = f"model.layers.{number - 1}."
    shapes = {f"{layer}{name.removeprefix(last)}": each.shape for name, each in tensors.items() if last in name}
    shapes |= {outer + fc: (size, 2 * size)} | {outer + name: (size,) for name in norms}
    added = {name: draw(name, *shape) for name, shape in shapes.items()}
    if family in NUMBERED:
        added[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | added, file, {"format": "pt"})
    return model


def list_names(family: str, num_layers: int) -> tuple[list[str], str, str]:
    """Return the names of projection and norms, and the prefixes of the layer and of these names."""
    names = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
    layer, outer = "mtp.layers.0.", "mtp."
    if family in NUMBERED:
        names = ["eh_proj", "enorm", "hnorm", "shared_head.norm"]
        layer = outer = f"model.layers.{num_layers}."
    return [f"{name}.weight" for name in names], layer, outer
