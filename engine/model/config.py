"""ModelConfig: the validated content of a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.model.checkpoint import NO_OVERRIDES, override, read_json_object, resolve_checkpoint
from engine.model.config_reader import ConfigReader
from engine.model.families import FAMILIES
from engine.model.families.family import Family
from engine.model.families.text_parts import TEXT_PARTS
from engine.model.formats.gguf_file import is_gguf
from engine.model.formats.gguf_model import GGUFModel
from engine.model.formats.quant_config import WeightFormat, parse_format
from engine.model.layer_spec import LLAMA_STYLE, Activation, LayerSpec, LayerStyle
from engine.model.mixers.latent_spec import LatentSpec
from engine.model.mixers.state_spec import StateSpec
from engine.model.moe_spec import MoENames, MoESpec
from engine.model.rope_config import RopeConfig, parse_ropes
from engine.model.vision.spec import VisionSpec

# Fields that do not influence inference. ConfigReader also ignores "_*", "*_version" and "*_token_id".
_INERT = frozenset(
    [
        *("architectures", "model_type", "transformers.js_config", "is_llama_config", "unsloth_fixed"),
        # Only classes of the families below are built, so code of the checkpoint is never run.
        *("auto_map", "cache_implementation"),
        *("use_cache", "initializer_range", "pretraining_tp", "gradient_checkpointing", "torchscript"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "dropout"),
        *("classifier_dropout", "neftune_noise_alpha", "output_attentions", "output_hidden_states"),
        *("return_dict", "tf_legacy_loss", "pruned_heads", "cross_attention_hidden_size", "use_bfloat16"),
        *("chunk_size_feed_forward", "finetuning_task", "id2label", "label2id", "task_specific_params"),
        *("problem_type", "tokenizer_class", "prefix", "name_or_path"),
        *("matryoshka_dimensions", "is_matryoshka"),  # read by engine.model.pooling
        # Generation settings in old checkpoints.
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "begin_suppress_tokens", "suppress_tokens", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "return_dict_in_generate", "output_scores"),
    ]
)
_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


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
    style: LayerStyle = LLAMA_STYLE
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # per layer, None: full attention; (): full in all layers
    layer_ropes: tuple[RopeConfig | None, ...] = ()  # per layer, None: no positions; (): `rope` in all layers
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # bound of the attention scores
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_cap: float | None = None
    num_mtp_layers: int = 0  # further layers that the checkpoint may have, which only make drafts
    mtp_prefix: str = ""  # of the names of their weights; "": they are numbered after the other layers
    layer_moes: tuple[MoESpec | None, ...] = ()  # per layer, None: an MLP; (): MLPs in all layers
    layer_states: tuple[StateSpec | None, ...] = ()  # per layer, None: attention; (): attention in all layers
    latent: LatentSpec | None = None  # of all layers, which then have one KV head of `head_dim`
    weight_prefix: str = ""  # of all names in the checkpoint
    weight_renames: tuple[tuple[str, str], ...] = ()  # parts of names, ours and the checkpoint's
    ignored_weights: tuple[str, ...] = ()  # prefixes of names that are not loaded
    dtype: str = "float32"  # of the checkpoint
    weight_format: WeightFormat | None = None  # None: plain numbers
    vision: VisionSpec | None = None  # None: the model does not see images

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ConfigError(
                f"sliding_windows={self.sliding_windows} must have num_hidden_layers="
                f"{self.num_hidden_layers} entries"
            )
        for rope in {self.rope, *self.layer_ropes}:
            if rope is not None:
                _check_rope(rope, self.rope_size)

    @classmethod
    def from_pretrained(
        cls, path_or_name: str | Path, overrides: Mapping[str, Any] = NO_OVERRIDES
    ) -> ModelConfig:
        """Read the config.json of a local folder or of a repository on the hub, or the header of a GGUF file."""
        if is_gguf(path_or_name):
            config = cls.from_dict(override(GGUFModel(path_or_name).make_config(), overrides), str(path_or_name))
            return config.with_plain_tensors()
        path = resolve_checkpoint(path_or_name, ("config.json",)) / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path.parent} is not a checkpoint: it has no config.json")
        return cls.from_dict(override(read_json_object(path), overrides), str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Parse the content of a config.json; `where` is its name in error messages."""
        data, text_fields = _find_text_part(data, where)
        architecture = _parse_architecture(ConfigReader(data, where), where)
        family = FAMILIES[architecture]
        if data.get("architectures") not in (None, [], architecture, [architecture]):
            data = data | {"tie_word_embeddings": True}  # the checkpoint has no lm_head
        reader = ConfigReader({**family.defaults, **data}, where)
        config = _parse(reader, architecture, family, where)
        for key, value in family.constants.items():
            reader.constant(key, value)
        reader.refuse_rest(_INERT | family.inert)
        renames = config.weight_renames + text_fields.pop("weight_renames", ())
        return replace(config, weight_renames=renames, **text_fields)

    def with_plain_tensors(self) -> ModelConfig:
        """Return the config for a checkpoint with one tensor a matrix, under our modules' names, and final norms."""
        style = replace(self.style, has_fused_qkv=False, has_fused_names=False, norm_offset=0.0)
        return replace(
            self, style=style, weight_prefix="", weight_renames=(),
            layer_moes=tuple(moe and replace(moe, names=MoENames()) for moe in self.layer_moes),
            layer_states=tuple(state and replace(state, has_fused_names=False) for state in self.layer_states),
        )

    @property
    def max_model_len(self) -> int:
        """Context length of the checkpoint in tokens, including RoPE scaling."""
        if any(rope not in (None, self.rope) for rope in self.layer_ropes):
            return self.max_position_embeddings  # only some layers are scaled
        return max(self.max_position_embeddings, self.rope.stretched_len)

    @property
    def rope_size(self) -> int:
        """Numbers of a head that the tables of RoPE are made for."""
        return self.head_dim if self.latent is None else self.latent.rope_size

    @property
    def head_shapes(self) -> list[tuple[int, int, int]]:
        """Number of heads, of key heads, and the size of a head, of each kind of layer with attention."""
        specs = [spec for spec in self.layer_specs if spec.state is None]
        return sorted({(spec.num_heads, spec.num_kv_heads, spec.head_size) for spec in specs})

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        windows = self.sliding_windows or (None,) * self.num_hidden_layers
        ropes = self.layer_ropes or (self.rope,) * self.num_hidden_layers
        moes = self.layer_moes or (None,) * self.num_hidden_layers
        states = self.layer_states or (None,) * self.num_hidden_layers
        scale = self.attention_scale or self.head_dim**-0.5
        if self.latent is not None:
            scale = self.latent.compute_scale(self.rope)
        return tuple(
            LayerSpec(
                hidden_size=self.hidden_size,
                num_heads=self.num_attention_heads,
                num_kv_heads=self.num_key_value_heads,
                head_size=self.head_dim,
                intermediate_size=self.intermediate_size,
                rope=rope,
                norm_eps=self.norm_eps,
                scale=scale,
                window=window,
                qkv_bias=self.qkv_bias,
                output_bias=self.output_bias,
                mlp_bias=self.mlp_bias,
                soft_cap=self.soft_cap,
                residual_multiplier=self.residual_multiplier,
                style=self.style,
                moe=moe,
                state=state,
                latent=self.latent,
            )
            for window, rope, moe, state in zip(windows, ropes, moes, states, strict=True)
        )


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    """Reject a head size that the RoPE parameters do not fit."""
    size = rope.rotary_dim(head_dim)
    if size % 2 or not size:
        raise ConfigError(
            f"head_dim={head_dim}: RoPE rotates pairs, but a share of {rope.rotary_share:g} is {size} numbers"
        )
    if rope.rope_type == "dynamic" and size < 4:
        raise ConfigError(
            f"head_dim={head_dim} must be at least 4 with dynamic RoPE, which does not scale the first pair"
        )
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.rope_type == "longrope" and len(factors) != size // 2:
            raise ConfigError(
                f"longrope: {name} has {len(factors)} numbers, and {size // 2} pairs of a head rotate"
            )


def _find_text_part(data: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a text model, which may be a part of one for images, and further fields of ModelConfig."""
    reader = ConfigReader(data, where)
    part = TEXT_PARTS.get(str(reader.take("model_type")))
    if part is None:
        return data, {}
    text = reader.take("text_config")
    if text is None and "num_hidden_layers" in data:  # older files have one object for text and the rest
        outer_keys = _INERT | part.inert | {"model_type", "architectures", "image_token_id"}
        text = {key: reader.take(key) for key in data.keys() - outer_keys}
    if not isinstance(text, dict):
        raise reader.error("text_config", text, "must be an object")
    outer = {key: reader.take(key) for key in ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")}
    fields: dict[str, Any] = {"weight_prefix": part.prefix, "ignored_weights": part.ignored_weights}
    fields["weight_renames"] = part.renames
    if part.vision is not None:
        # The token that stands for one image feature. Checkpoints of every family also use its older name.
        keys = [key for key in ("image_token_index", "image_token_id") if reader.take(key) is not None]
        token_id = reader.integer(keys[0] if keys else "image_token_id", minimum=0)
        fields["vision"] = VisionSpec(
            part.vision, token_id, json.dumps(data, sort_keys=True), part.vision_prefix
        )
    reader.refuse_rest(_INERT | part.inert)
    named = {key: value for key, value in outer.items() if value is not None}
    if part.architecture:
        named["architectures"] = [part.architecture]
    kept = {key: value for key, value in text.items() if key not in part.text_inert}
    return {**kept, **named}, fields


def add_head(name: Any) -> Any:
    """Return the causal LM architecture for a bare one: MistralForCausalLM for MistralModel."""
    whole = f"{str(name).removesuffix('Model')}ForCausalLM"
    return whole if str(name).endswith("Model") and whole in FAMILIES else name


def _parse_architecture(reader: ConfigReader, where: str) -> str:
    names = reader.take("architectures") or []
    model_type = reader.take("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    name = names[0] if isinstance(names, list) and len(names) == 1 else names or model_type
    name = add_head(name)
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            f"{where}: architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if model_type not in (None, family.model_type, *family.other_types):
        raise reader.error("model_type", model_type, f"does not belong to {name}")
    assert isinstance(name, str)
    return name


def _parse(reader: ConfigReader, architecture: str, family: Family, where: str) -> ModelConfig:
    activation = reader.take(family.activation_key, "silu")
    if _ACTIVATIONS.get(str(activation)) != family.style.activation:
        known = [name for name, each in _ACTIVATIONS.items() if each == family.style.activation]
        raise reader.error(
            family.activation_key, activation, f"is not supported; supported: {', '.join(known)}"
        )
    num_heads = reader.integer("num_attention_heads")
    num_layers = reader.integer("num_hidden_layers")
    max_position_embeddings = reader.integer("max_position_embeddings")
    windows = _parse_windows(reader, family, num_layers)
    rope, local_rope = parse_ropes(reader, max_position_embeddings, where, family.rope)
    fields = family.read_fields(reader) if family.read_fields else {}
    values: dict[str, Any] = {
        "architecture": architecture,
        "style": family.style,
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "intermediate_size": reader.integer(family.inner_size_key),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.integer("num_key_value_heads", num_heads),
        "head_dim": fields.get("head_dim") or _parse_head_dim(reader, num_heads),
        "max_position_embeddings": max_position_embeddings,
        "rope": rope,
        "norm_eps": reader.number(family.eps_key, 1e-6),
        "tie_word_embeddings": reader.boolean("tie_word_embeddings", False),
        "qkv_bias": _parse_bias(reader, family.qkv_bias),
        "output_bias": _parse_bias(reader, family.output_bias),
        "mlp_bias": _parse_bias(reader, family.mlp_bias),
        "sliding_windows": windows if any(windows) else (),
        "layer_ropes": _choose_ropes(reader, family, windows, rope, local_rope),
        "dtype": _parse_dtype(reader),
        "weight_format": parse_format(reader.take("quantization_config"), where),
    }
    return ModelConfig(**values | fields)


def _parse_head_dim(reader: ConfigReader, num_heads: int) -> int:
    if reader.take("head_dim") is not None:
        return reader.integer("head_dim")
    hidden_size = reader.integer("hidden_size")
    if hidden_size % num_heads:
        raise reader.error(
            "hidden_size", hidden_size, f"is not a multiple of num_attention_heads={num_heads}"
        )
    return hidden_size // num_heads


def _parse_bias(reader: ConfigReader, rule: bool | str) -> bool:
    return reader.boolean(rule, False) if isinstance(rule, str) else rule


def _parse_dtype(reader: ConfigReader) -> str:
    old = reader.take("torch_dtype")
    dtype = reader.take("dtype") or old or "float32"
    if dtype not in _DTYPES:
        raise reader.error("dtype", dtype, f"is not supported; supported: {', '.join(_DTYPES)}")
    return str(dtype)


def _parse_windows(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention."""
    window = reader.take("sliding_window")
    if family.sliding_window == "none" and window is not None:
        raise reader.error("sliding_window", window, f"is not supported for {family.model_type}")
    is_used = family.sliding_window != "layers" or reader.boolean("use_sliding_window", False)
    window = reader.integer("sliding_window") if is_used and window is not None else None
    expected = _expect_windows(reader, family, num_layers, window)
    layer_types = reader.take("layer_types")
    if layer_types is None:
        return expected
    kinds = {"full_attention": None, "attention": None, "sliding_attention": window}
    kinds |= dict.fromkeys(family.state_layers)
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not is_list or any(not isinstance(kind, str) or kind not in kinds for kind in layer_types):
        wanted = f"must name {' or '.join(kinds)} for each of {num_layers} layers"
        raise reader.error("layer_types", layer_types, wanted)
    if window is None and "sliding_attention" in layer_types:
        raise reader.error("layer_types", layer_types, "has sliding layers, but no sliding window is set")
    windows = tuple(kinds[kind] for kind in layer_types)
    if family.sliding_window in ("none", "all") and windows != expected:
        raise reader.error("layer_types", layer_types, f"is not supported for {family.model_type}")
    return windows


def _expect_windows(
    reader: ConfigReader, family: Family, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    """Return the windows of a config without `layer_types`."""
    if family.sliding_window == "layers":
        first_windowed = reader.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
    if family.sliding_window != "types" or window is None:
        return (window,) * num_layers
    if reader.take("layer_types") is not None:
        reader.take("sliding_window_pattern")  # says the same, in EXAONE as letters
        return (None,) * num_layers
    period = reader.integer("sliding_window_pattern")
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def _choose_ropes(
    reader: ConfigReader, family: Family, windows: tuple[int | None, ...], rope: RopeConfig,
    local_rope: RopeConfig,
) -> tuple[RopeConfig | None, ...]:
    """Return the RoPE of each layer; () if all layers have the same."""
    ropes: list[RopeConfig | None] = [rope if window is None else local_rope for window in windows]
    has_windows = reader.take("sliding_window") is not None
    if family.no_rope == "listed":
        has_rope = _parse_rope_layers(reader, len(windows))
        ropes = [each if has else None for each, has in zip(ropes, has_rope, strict=True)]
    elif family.no_rope == "without key":
        if reader.take("position_embedding_type") != "rope":
            return (None,) * len(windows)
    elif family.no_rope == "full" or (family.no_rope == "full if windowed" and has_windows):
        ropes = [None if window is None else local_rope for window in windows]
    return () if set(ropes) == {rope} else tuple(ropes)


def _parse_rope_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Return for each layer whether it has positions."""
    period = reader.integer("no_rope_layer_interval", 4)
    flags = reader.take("no_rope_layers")
    if flags is None:
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise reader.error("no_rope_layers", flags, f"must be 0 or 1 for each of {num_layers} layers")
    return [bool(flag) for flag in flags[:num_layers]]
