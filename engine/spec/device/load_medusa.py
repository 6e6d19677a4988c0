"""Loads Medusa heads, in the format of their authors and in that of earlier vLLM versions."""

from __future__ import annotations

import re

import torch

from engine.errors import ConfigError
from engine.model import Model
from engine.model.linear import Linear
from engine.model.weight_targets import Targets, add_prefix
from engine.spec.device.checkpoint import copy_tensors, read_head_folder
from engine.spec.device.medusa import Medusa, MedusaHead
from kernels import Ops


def load_medusa(
    path_or_name: str, target: Model, ops: Ops, *, is_greedy: bool, device: torch.device
) -> Medusa:
    """Build the heads and load their weights. Their number is counted: config.json often gives another one.

    Raises:
        ConfigError: the tensors are not those of Medusa heads of this size.
    """
    _, tensors = read_head_folder(path_or_name)
    tensors = {_rename(name.removeprefix("medusa_head.")): tensor for name, tensor in tensors.items()}
    outputs = [name for name in tensors if re.fullmatch(r"\d+\.output\.weight", name)]
    num_heads = len(outputs)
    if not num_heads:
        raise ConfigError(f"{path_or_name} has no Medusa heads: no tensor 0.<n>.weight or lm_heads.0.weight")
    num_layers = len([name for name in tensors if re.fullmatch(r"0\.blocks\.\d+\.weight", name)])
    token_map = tensors.pop("token_map", None)
    num_outputs = tensors[outputs[0]].shape[0]
    vocab_size = target.config.vocab_size
    if token_map is None and num_outputs > vocab_size:
        raise ConfigError(f"{path_or_name}: heads predict {num_outputs} tokens; the target has {vocab_size}")
    if token_map is not None and (len(token_map) != num_outputs or int(token_map.max()) >= vocab_size):
        raise ConfigError(f"{path_or_name}: token_map must have {num_outputs} tokens below {vocab_size}")
    heads = [
        MedusaHead(
            target.config.hidden_size, num_outputs, num_layers, "0.blocks.0.bias" in tensors, target.dtype,
            device,
        )
        for _ in range(num_heads)
    ]
    targets: Targets = {}
    for number, head in enumerate(heads):
        targets |= add_prefix(f"{number}.output", head.output.weight_targets())
        for layer, block in enumerate(head.blocks):
            assert isinstance(block, Linear)
            targets |= add_prefix(f"{number}.blocks.{layer}", block.weight_targets())
    copy_tensors(targets, tensors, path_or_name)
    medusa = Medusa(heads, None if token_map is None else token_map.long().to(device), is_greedy).eval()
    medusa.pack(ops)
    return medusa


def _rename(name: str) -> str:
    """Return `head.blocks.layer.*` or `head.output.weight`, from either format; other names are returned unchanged."""
    patterns = (
        (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"\1.blocks.\2.\3"),
        (r"(\d+)\.(\d+)\.weight", r"\1.output.weight"),
        (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"\1.blocks.\2.\3"),
        (r"lm_heads\.(\d+)\.weight", r"\1.output.weight"),
    )
    for pattern, replacement in patterns:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    return name
