"""Models: configs, weights and forward passes over the paged KV cache."""

from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.implementation import read_model_config
from engine.model.loader import load_model
from engine.model.protocol import Model
from engine.model.rope_config import RopeConfig
from engine.model.sampling_defaults import read_eos_token_ids

__all__ = [
    "DecoderModel", "Model", "ModelConfig", "RopeConfig", "load_model", "read_eos_token_ids",
    "read_model_config",
]
