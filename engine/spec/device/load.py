"""Loads the drafter of a speculative config."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.kv_cache_spec import group_layers
from engine.model import Model, load_model
from engine.spec.device.draft_model import DraftModel
from engine.spec.device.drafter import Drafter
from engine.spec.device.load_eagle import load_eagle
from engine.spec.device.mtp import load_mtp
from engine.speculative_config import SpeculativeConfig
from kernels import Ops


def load_drafter(config: SpeculativeConfig, target: Model, ops: Ops, device: torch.device) -> Drafter | None:
    """Load what proposes drafts on the device; None if the config names no such method.

    Args:
        ops: for the drafter alone, since ops may keep what they computed for one model.
    """
    method, path = config.device_method, config.model
    if method is None or path is None:
        return None
    if group_layers(target.kv_specs())[0].window is not None:
        raise ConfigError(
            f"speculative_config: method={method!r} needs a target with layers that attend to all tokens: "
            "the drafter's keys are in their blocks"
        )
    is_greedy = config.draft_sample_method == "greedy"
    if method == "draft_model":
        return _load_draft_model(path, target, ops, device, is_greedy)
    if method == "mtp":
        return load_mtp(path, target, ops, is_greedy=is_greedy, device=device)
    return load_eagle(path, target, ops, is_eagle3=method == "eagle3", is_greedy=is_greedy, device=device)


def _load_draft_model(
    path: str, target: Model, ops: Ops, device: torch.device, is_greedy: bool
) -> DraftModel:
    model = load_model(path, dtype=target.dtype, device=device, ops=ops)
    if model.state_specs():
        raise ConfigError(
            f"speculative_config: model: {Path(path).name} has layers with a state per request, which a draft model "
            "cannot have"
        )
    if model.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"speculative_config: model: {Path(path).name} has a vocabulary of {model.config.vocab_size} tokens, the "
            f"target {target.config.vocab_size}; a draft model must have the same tokenizer"
        )
    return DraftModel(model, is_greedy)
