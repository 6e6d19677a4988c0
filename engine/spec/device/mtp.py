"""Mtp: the multi-token-prediction layer of the target's own checkpoint as an EAGLE layer.

    x = eh_proj([normed embedding, normed hidden state]) ─▶ layer ─▶ norm ─▶ next hidden ─▶ the target's output matrix

A checkpoint with several such layers drafts with the first one, again and again. Source: DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model import Model, ModelConfig
from engine.model.checkpoint import list_tensor_names, resolve_weights, weight_files
from engine.model.decoder import DecoderModel
from engine.model.decoder_layer import DecoderLayer
from engine.model.formats.gguf_file import is_gguf
from engine.model.layer_spec import LayerSpec
from engine.model.linear import make_parameter
from engine.model.loader import load_part
from engine.model.moe import repack_modules
from engine.model.sharding import ONE_RANK
from engine.model.weight_targets import Targets, WeightTarget, WeightTargets, add_prefix
from engine.spec.device.eagle import Eagle
from engine.spec.device.eagle_net import EagleNet, EagleShape
from kernels import Ops

MTP = '{"method": "mtp"}'


class MtpNet(EagleNet):
    """The layer, which reads the norms of both of its inputs, and the target's embedding."""

    def __init__(self, target: DecoderModel, ops: Ops, device: torch.device) -> None:
        config = target.config
        size, dtype = config.hidden_size, target.dtype
        shape = EagleShape(
            _find_spec(config), is_eagle3=False, target_hidden_size=size, has_input_norm=True, norm_output=True
        )
        super().__init__(shape, None, ops, dtype, device)
        self.config = config
        self.quantization = target.quantization
        self._embed = target.embed
        self.pair_norms = tuple(make_parameter(size, dtype=dtype, device=device) for _ in range(2))
        self.embedding_norm, self.target_norm = self.pair_norms  # named, so that they are parameters
        self.norm = make_parameter(size, dtype=dtype, device=device)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed(token_ids)

    def checkpoint_targets(self) -> WeightTargets:
        """Return the memory for the layer's tensors; all others are ignored, and so are copies of the target's."""
        assert self.norm is not None, "it has been made"
        config, offset = self.config, self.config.style.norm_offset
        layer, fc, *names = list_names(config)
        norms = zip(names, (self.embedding_norm, self.target_norm, self.norm), strict=True)
        targets: Targets = {f"{name}.weight": WeightTarget(norm, offset=offset) for name, norm in norms}
        targets |= add_prefix(fc, self.fc.weight_targets()) | add_prefix(layer, self.layer.weight_targets())
        return WeightTargets(targets, {}, ("",)).rename(config.weight_prefix, config.weight_renames)

    def repack(self, ops: Ops) -> Iterator[None]:
        yield from repack_modules(self.modules(), self.ops, ops, self.quantization)
        self.ops = ops


def _find_spec(config: ModelConfig) -> LayerSpec:
    """Return the shape of the layer: that of the last one with attention."""
    return next(spec for spec in reversed(config.layer_specs) if spec.state is None)


def list_names(config: ModelConfig) -> list[str]:
    """Return the names of the decoder layer, the projection, and the norms of embedding, hidden state and output."""
    layer, prefix = f"{config.mtp_prefix}layers.0", config.mtp_prefix
    names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    if not prefix:
        layer = f"model.layers.{config.num_hidden_layers}"
        prefix, names = f"{layer}.", ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    return [layer, *(prefix + name for name in names)]


def choose_mtp(config: EngineConfig, model_config: ModelConfig, device: str) -> EngineConfig:
    """Return a config that drafts with the checkpoint's own layer, if it is whole and the config says nothing else.

    Not on CUDA, where a step of several tokens rounds differently and might change a text.
    """
    is_open = config.speculative_config is None and config.num_ranks == 1 and config.load_format == "auto"
    is_plain = model_config.weight_format is None and not is_gguf(config.model)
    if not is_open or not is_plain or not model_config.num_mtp_layers or device != "cpu":
        return config
    layer, *others = list_names(model_config)
    made = DecoderLayer(_find_spec(model_config), 0, 0, 0, torch.float32, torch.device("meta"), ONE_RANK)
    targets = add_prefix(layer, made.weight_targets())
    targets |= dict.fromkeys((f"{name}.weight" for name in others), next(iter(targets.values())))
    wanted = WeightTargets(targets, {}, ()).rename(model_config.weight_prefix, model_config.weight_renames)
    names = list_tensor_names(weight_files(resolve_weights(config.model)))
    # The config may name a layer that was left out, as transformers does when it saves a model.
    stored = {part for name in names for part in wanted.list_parts(name) or [name]}
    return replace(config, speculative_config=MTP) if wanted.targets.keys() <= stored else config


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
    net = MtpNet(target, ops, device).eval()
    load_part(path_or_name, net.checkpoint_targets(), ops, config.weight_format, target.quantization)
    return Eagle(net, target, None, (), is_greedy)
