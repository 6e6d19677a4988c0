"""ModelConfig: the validated content of a checkpoint's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.model.checkpoint import read_json_object, resolve_checkpoint
from engine.model.config_reader import ConfigReader
from engine.model.layer_spec import LayerSpec
from engine.model.registry import FAMILIES, Family
from engine.model.rope_config import RopeConfig, parse_rope

# Fields that do not influence inference. ConfigReader also ignores "_*", "*_version" and "*_token_id".
_INERT = frozenset(
    [
        *("architectures", "model_type", "transformers.js_config", "is_llama_config", "unsloth_fixed"),
        *("use_cache", "initializer_range", "pretraining_tp", "gradient_checkpointing", "torchscript"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "dropout"),
        *("classifier_dropout", "neftune_noise_alpha", "output_attentions", "output_hidden_states"),
        *("return_dict", "tf_legacy_loss", "pruned_heads", "cross_attention_hidden_size", "use_bfloat16"),
        *("chunk_size_feed_forward", "finetuning_task", "id2label", "label2id", "task_specific_params"),
        *("problem_type", "tokenizer_class", "prefix", "name_or_path"),
        # Generation settings in old checkpoints.
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "begin_suppress_tokens", "suppress_tokens", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "return_dict_in_generate", "output_scores"),
    ]
)
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and arithmetic of one decoder. Field names follow config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # per layer, None: full attention; (): full in all layers
    dtype: str = "float32"  # of the checkpoint

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.rope.rope_type == "dynamic" and self.head_dim < 4:
            raise ConfigError(
                f"head_dim={self.head_dim} must be at least 4 with dynamic RoPE, which does not scale the first pair"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ConfigError(
                f"sliding_windows={self.sliding_windows} must have num_hidden_layers="
                f"{self.num_hidden_layers} entries"
            )

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path) -> ModelConfig:
        """Read the config.json of a local folder or of a repository on the hub.

        Raises:
            ConfigError: the checkpoint does not exist, or its architecture or a field is not supported.
        """
        path = resolve_checkpoint(path_or_name, ("config.json",)) / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path.parent} is not a checkpoint: it has no config.json")
        return cls.from_dict(read_json_object(path), str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Parse the content of a config.json; `where` is its name in error messages.

        Raises:
            ConfigError: as `from_pretrained`.
        """
        reader = ConfigReader(data, where)
        architecture = _parse_architecture(reader, where)
        config = _parse(reader, architecture, FAMILIES[architecture], where)
        reader.refuse_rest(_INERT)
        return config

    @property
    def max_model_len(self) -> int:
        """Context length of the checkpoint in tokens, including RoPE scaling."""
        return max(self.max_position_embeddings, self.rope.stretched_len)

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The layers, first to last."""
        windows = self.sliding_windows or (None,) * self.num_hidden_layers
        return tuple(
            LayerSpec(
                hidden_size=self.hidden_size,
                num_heads=self.num_attention_heads,
                num_kv_heads=self.num_key_value_heads,
                head_size=self.head_dim,
                intermediate_size=self.intermediate_size,
                rope=self.rope,
                rms_norm_eps=self.rms_norm_eps,
                scale=self.head_dim**-0.5,
                window=window,
                qk_norm=self.qk_norm,
                qkv_bias=self.qkv_bias,
                output_bias=self.output_bias,
                mlp_bias=self.mlp_bias,
            )
            for window in windows
        )


def _parse_architecture(reader: ConfigReader, where: str) -> str:
    names = reader.take("architectures") or []
    model_type = reader.take("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    name = names[0] if isinstance(names, list) and len(names) == 1 else names or model_type
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            f"{where}: architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if model_type not in (None, family.model_type):
        raise reader.error("model_type", model_type, f"does not belong to {name}")
    assert isinstance(name, str)
    return name


def _parse(reader: ConfigReader, architecture: str, family: Family, where: str) -> ModelConfig:
    if (activation := reader.take("hidden_act", "silu")) not in ("silu", "swish"):
        raise reader.error("hidden_act", activation, "is not supported; supported: silu")
    num_heads = reader.integer("num_attention_heads")
    num_layers = reader.integer("num_hidden_layers")
    max_position_embeddings = reader.integer("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=reader.integer(
            "num_key_value_heads", family.default_num_key_value_heads or num_heads
        ),
        head_dim=_parse_head_dim(reader, family, num_heads),
        max_position_embeddings=max_position_embeddings,
        rope=parse_rope(reader, max_position_embeddings, where),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        qk_norm=family.qk_norm,
        **_parse_biases(reader, family),
        sliding_windows=_parse_windows(reader, family, num_layers),
        dtype=_parse_dtype(reader),
    )


def _parse_head_dim(reader: ConfigReader, family: Family, num_heads: int) -> int:
    if reader.take("head_dim", family.default_head_dim) is not None:
        return reader.integer("head_dim", family.default_head_dim)
    hidden_size = reader.integer("hidden_size")
    if hidden_size % num_heads:
        raise reader.error(
            "hidden_size", hidden_size, f"is not a multiple of num_attention_heads={num_heads}"
        )
    return hidden_size // num_heads


def _parse_biases(reader: ConfigReader, family: Family) -> dict[str, bool]:
    if family.qkv_bias is None:
        attention_bias = reader.boolean("attention_bias", False)
        qkv_bias = output_bias = attention_bias
    else:
        qkv_bias, output_bias = family.qkv_bias, bool(family.output_bias)
    mlp_bias = reader.boolean("mlp_bias", False) if family.has_mlp_bias_key else False
    return {"qkv_bias": qkv_bias, "output_bias": output_bias, "mlp_bias": mlp_bias}


def _parse_dtype(reader: ConfigReader) -> str:
    old = reader.take("torch_dtype")
    dtype = reader.take("dtype") or old or "float32"
    if dtype not in _DTYPES:
        raise reader.error("dtype", dtype, f"is not supported; supported: {', '.join(_DTYPES)}")
    return str(dtype)


def _parse_windows(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; () if all layers have full attention."""
    window = reader.take("sliding_window", family.default_sliding_window)
    layer_types = reader.take("layer_types")
    first_windowed = 0
    if family.sliding_window == "layers":
        first_windowed = reader.integer("max_window_layers", 28, minimum=0)
        if not reader.boolean("use_sliding_window", False):
            window = None
    elif family.sliding_window == "none" and window is not None:
        raise reader.error("sliding_window", window, f"is not supported for {family.model_type}")
    if window is not None:
        window = reader.integer("sliding_window", family.default_sliding_window)
    expected = [window if layer >= first_windowed else None for layer in range(num_layers)]
    if layer_types is None:
        return tuple(expected) if any(expected) else ()
    kinds = {"full_attention": None, "sliding_attention": window}
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not is_list or any(not isinstance(kind, str) or kind not in kinds for kind in layer_types):
        wanted = f"must name {' or '.join(kinds)} for each of {num_layers} layers"
        raise reader.error("layer_types", layer_types, wanted)
    if window is None and "sliding_attention" in layer_types:
        raise reader.error("layer_types", layer_types, "has sliding layers, but no sliding window is set")
    windows = [kinds[kind] for kind in layer_types]
    if family.sliding_window != "layers" and windows != expected:
        raise reader.error("layer_types", layer_types, f"is not supported for {family.model_type}")
    return tuple(windows) if any(windows) else ()
