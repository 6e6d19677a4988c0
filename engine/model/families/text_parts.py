"""TextPart: the text part of checkpoints that contain more, such as an image encoder."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.vision.spec import VisionKind


@dataclass(frozen=True, slots=True)
class TextPart:
    """A model for texts and images, whose text part is one of the families."""

    inert: frozenset[str]  # keys of the other parts
    ignored_weights: tuple[str, ...]
    prefix: str = "language_model."  # of the names of all weights
    renames: tuple[tuple[str, str], ...] = ()  # parts of names, ours and the checkpoint's
    architecture: str = ""  # of the text part; "": as its config says
    text_inert: frozenset[str] = frozenset()  # keys of the text part without influence
    vision: VisionKind | None = None  # None: images are not supported
    vision_prefix: str = "model."  # of the names of the image encoder's weights


_IMAGE_WEIGHTS = ("vision_tower.", "multi_modal_projector.")
_IDEFICS3 = TextPart(
    frozenset(["vision_config", "scale_factor", "vocab_size", "use_reentrant_checkpointing"]),
    ("model.vision_model.", "model.connector."),
    prefix="",
    renames=(("model.", "model.text_model."),),
    architecture="LlamaForCausalLM",
    text_inert=frozenset(
        ["perceiver_config", "pixel_shuffle_factor", "qk_layer_norms", "use_resampler", "rope_interleaved"]
    ),
    vision="idefics3",
)
_QWEN3_VL = TextPart(
    frozenset(["vision_config"]), ("model.visual.",), prefix="",
    renames=(("model.", "model.language_model."),), architecture="Qwen3VLForConditionalGeneration",
    vision="qwen_vl",
)
_QWEN2_VL = TextPart(
    frozenset(["vision_config", "vision_token_id"]), ("visual.",), prefix="",
    architecture="Qwen2_5_VLForConditionalGeneration", vision="qwen_vl", vision_prefix="",
)
TEXT_PARTS: dict[str, TextPart] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": _QWEN3_VL,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "gemma3": TextPart(
        frozenset(
            [
                *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index"),
            ]
        ),
        _IMAGE_WEIGHTS, vision="gemma3", vision_prefix="",
    ),
    "mistral3": TextPart(
        frozenset(
            [
                *("vision_config", "multimodal_projector_bias", "projector_hidden_act"),
                *("spatial_merge_size", "vision_feature_layer"),
            ]
        ),
        _IMAGE_WEIGHTS, vision="pixtral", vision_prefix="",
    ),
    "lfm2_vl": TextPart(
        frozenset(
            [
                *("vision_config", "projector_hidden_act", "projector_hidden_size", "projector_bias"),
                *("projector_use_layernorm", "downsample_factor", "tie_embedding", "vision_feature_layer"),
                # Also in the settings of the image processor, which are used.
                *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "min_image_tokens"),
                *("max_num_patches", "max_pixels_tolerance", "max_tiles", "min_tiles", "tile_size"),
                *("use_image_special_tokens", "use_thumbnail"),
            ]
        ),
        ("model.vision_tower.", "model.multi_modal_projector."),
        prefix="", renames=(("model.", "model.language_model."),), vision="lfm2_vl",
    ),
} | dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe"),
    TextPart(
        frozenset(["vision_config"]), ("model.visual.",), prefix="",
        renames=(("model.", "model.language_model."),),
    ),
)
