"""Mtp: the multi-token-prediction layer of the target's own checkpoint as an EAGLE layer.

    x = eh_proj([normed embedding, normed hidden state]) ─▶ layer ─▶ norm ─▶ next hidden ─▶ the target's output matrix

A checkpoint with several such layers drafts with the first one, again and again. Source: DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model import Model, ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.linear import make_parameter
from engine.model.loader import load_part
from engine.model.moe import repack_modules
from engine.model.weight_targets import Targets, WeightTarget, WeightTargets, add_prefix
from engine.spec.device.eagle import Eagle
from engine.spec.device.eagle_net import EagleNet, EagleShape
from kernels import Ops
from kernels.ops import Quantization


class MtpNet(EagleNet):
    """The layer, which reads the norms of both of its inputs."""

    def __init__(
        self, config: ModelConfig, embedding: Tensor, ops: Ops, dtype: torch.dtype, device: torch.device,
        quantization: Quantization | None,
    ) -> None:
        size = config.hidden_size
        shape = EagleShape(
            config.layer_specs[-1], is_eagle3=False, target_hidden_size=size, has_input_norm=True, norm_output=True
        )
        super().__init__(shape, embedding, ops, dtype, device)
        self.config = config
        self.quantization = quantization
        self.pair_norms = tuple(make_parameter(size, dtype=dtype, device=device) for _ in range(2))
        self.embedding_norm, self.target_norm = self.pair_norms  # named, so that they are parameters
        self.norm = make_parameter(size, dtype=dtype, device=device)

    def checkpoint_targets(self) -> WeightTargets:
        """Return the memory for the layer's tensors; all others are ignored, and so are copies of the target's."""
        assert self.norm is not None, "it has been made"
        norms = {"enorm": self.embedding_norm, "hnorm": self.target_norm, "shared_head.norm": self.norm}
        targets: Targets = {f"{name}.weight": WeightTarget(norm) for name, norm in norms.items()}
        targets |= add_prefix("eh_proj", self.fc.weight_targets()) | self.layer.weight_targets()
        found = WeightTargets(add_prefix(f"model.layers.{self.config.num_hidden_layers}", targets), {}, ("",))
        return found.rename(self.config.weight_prefix, self.config.weight_renames)

    def repack(self, ops: Ops) -> Iterator[None]:
        yield from repack_modules(self.modules(), self.ops, ops, self.quantization)
        self.ops = ops


def load_mtp(path_or_name: str, target: Model, ops: Ops, *, is_greedy: bool, device: torch.device) -> Eagle:
    """Load the layer from the target's checkpoint.

    Raises:
        ConfigError: it has none that is run here.
    """
    config = target.config
    if not isinstance(target, DecoderModel) or not config.num_mtp_layers:
        raise ConfigError(
            f"speculative_config: method='mtp': {config.architecture} has no multi-token-prediction layers here "
            "(num_nextn_predict_layers=0); use eagle3, draft_model, ngram or suffix"
        )
    embedding = target.unpack_embedding().detach().to(device, target.dtype)
    net = MtpNet(config, embedding, ops, target.dtype, device, target.quantization).eval()
    load_part(path_or_name, net.checkpoint_targets(), ops, config.weight_format, target.quantization)
    return Eagle(net, target, None, (), is_greedy)
